"""How questions are worded. Knows nothing of pictures: a question is chosen by kind and filled with names.

A template's `[a|b]` stands for one of its alternatives and `{name}` for a slot. A kind has direct questions
and noun clauses; a clause follows a polite opening ("Can you tell me what colour the star is?").
"""

from __future__ import annotations

import random
import re

from training.sample import Turn

_CHOICE = re.compile(r"\[([^\[\]]*)\]")

PIC = "[picture|picture|image|image|photo|drawing|figure|graphic]"
_POLITE = (
    "[Please |Please, |Could you please |Can you |Can you please |Could you |Would you ][tell me|say|state]"
    "|Tell me|Say|I want to know|I would like to know|I'd like to know|Do you know|I wonder|Let me know"
)
_OPENINGS = (
    f"[Look at the {PIC}.|Look at this {PIC}.|Please look at this {PIC}.|Here is a {PIC}.|In this "
    f"{PIC},|In the {PIC},"
    f"|Looking at the {PIC},|Based on the {PIC},|Hi!|Hello.|OK.|Okay,|Please answer:|Question:|Quick "
    "question:|Thanks.]"
)
_CLOSINGS = (
    "[Answer briefly.|Answer in one word.|Please answer in a sentence.|Be brief.|Answer with one word only."
    "|Reply in one short sentence.|Thanks!|Thank you.|Please.]"
)

# kind -> (direct questions, noun clauses)
_BANK: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "colour": (
        (
            "[What|Which] colo[u|]r is {ref}?",
            "What colo[u|]r is {ref}?",
            "What is the colo[u|]r of {ref}?",
            "What's the colo[u|]r of {ref}?",
            "[What|Which] colo[u|]r does {ref} have?",
            "[Name|Give|State|Identify|Report] the colo[u|]r of {ref}.",
            "In [what|which] colo[u|]r is {ref} [drawn|painted|shown|filled]?",
            "[What|Which] colo[u|]r [was used|is used] [for|to draw] {ref}?",
            "[What|Which] colo[u|]r has {ref} been [painted|given|drawn in]?",
            "How would you describe the colo[u|]r of {ref}?",
            "{ref}: [what|which] colo[u|]r is it?",
            f"[What|Which] colo[u|]r is {{ref}} in [the|this] {PIC}?",
            "Colo[u|]r of {ref}?",
            "What colo[u|]r do you see on {ref}?",
            "[What|Which] colo[u|]r would you say {ref} is?",
            "{ref} is [drawn in|painted] what colo[u|]r?",
        ),
        ("[what|which] colo[u|]r {ref} [is|has]", "the colo[u|]r of {ref}"),
    ),
    "shape": (
        (
            "[What|Which] shape is {ref}?",
            "What shape is {ref}?",
            "What is the shape of {ref}?",
            "What['s| is] {ref}?",
            "What [kind|sort|type] of [shape|figure|object|thing] is {ref}?",
            "[What|Which] shape does {ref} have?",
            "[Name|Identify|State|Give|Recognize] the shape of {ref}.",
            "[Name|Identify] {ref}.",
            "[What|Which] [geometric |geometrical |]shape [best describes|describes] {ref}?",
            "[What|Which] [geometric |geometrical |][shape|figure|form] is {ref}?",
            "What form does {ref} have?",
            "Shape of {ref}?",
            "What do you call {ref}?",
            "How would you describe the shape of {ref}?",
        ),
        ("[what|which] shape {ref} [is|has]", "the shape of {ref}", "what {ref} is"),
    ),
    "only_shape": (
        (
            "[What|Which] [geometric |][shape|figure|object|symbol] is [shown|drawn|displayed|"
            "pictured|depicted|there|"
            f"visible|in the {PIC}|in this {PIC}|on the {PIC}]?",
            f"[What|Which] [shape|object|figure] [do|can] you see[| in the {PIC}| in this {PIC}| here]?",
            "What is this?",
            "What[ is|'s] [it|shown here|drawn here|shown in the picture]?",
            f"[Name|Identify] the [shape|object|figure] in [the|this] {PIC}.",
            f"What [kind|sort|type] of shape is [this|it|in the {PIC}|shown]?",
            f"[What|Which] shape does [the|this] {PIC} [show|contain|have]?",
            "[What|Which] shape is [this|it]?",
            "[What|Which] shape has been drawn?",
            "What [object|thing] is this?",
        ),
        ("[what|which] shape [this is|is shown|you see]", f"what is [shown|drawn] in [the|this] {PIC}"),
    ),
    "only_colour": (
        (
            "[What|Which] colo[u|]r is [it|this]?",
            f"[What|Which] colo[u|]r [do|can] you see[| in the {PIC}]?",
            f"[What|Which] colo[u|]r is the [shape|object|figure|thing|drawing] in [the|this] {PIC}?",
            "[What|Which] colo[u|]r is [shown|used] here?",
        ),
        ("[what|which] colo[u|]r [it|this] is",),
    ),
    "place": (
        (
            "Where is {ref}?",
            "Where's {ref}?",
            f"Where [in|on] [the|this] {PIC} is {{ref}}[| located| placed]?",
            f"[In|On] [which|what] [part|area|region|section|side or corner] of the {PIC} is {{ref}}?",
            "What is the [position|location|place] of {ref}?",
            "Where [can I|do you|can you|would I] [find|see|spot] {ref}?",
            "Where is {ref} [located|placed|positioned|drawn|found|situated]?",
            f"[Which|What] [part|area|region] of the {PIC} [is {{ref}} in|contains {{ref}}|has {{ref}}|shows {{ref}}]?",
            "[What|Which] [position|place|spot] is {ref} [at|in]?",
            "Whereabouts is {ref}?",
            "[Describe|Give|State|Name] the [position|location|place] of {ref}.",
            "Locate {ref}.",
            f"Where [in|within|on] the {PIC} does {{ref}} [appear|sit|lie]?",
            "Where does {ref} [appear|sit|lie]?",
            "Position of {ref}?",
        ),
        (
            "where {ref} is[| located]",
            f"where [in|on] the {PIC} {{ref}} is",
            "the [position|location] of {ref}",
        ),
    ),
    "at_place": (
        (
            "What is [{at}|located {at}]?",
            "[What|Which] shape is {at}?",
            f"What do you see {{at}}[| of the {PIC}]?",
            "[What|Which] [shape|object|figure] [can be seen|appears|is shown] {at}?",
        ),
        ("what is {at}", "[what|which] shape is {at}"),
    ),
    "colour_at_place": (
        (
            "[What|Which] colo[u|]r is the [shape|object|figure|thing|one] {at}?",
            "What is the colo[u|]r of the [shape|object|figure|one] {at}?",
        ),
        ("what colo[u|]r the [shape|object|thing] {at} is",),
    ),
    "count": (
        (
            "How many {things} are there?",
            "How many {things} are there?",
            f"How many {{things}} are [there |]in [the|this] {PIC}?",
            f"How many {{things}} [do|can] you see[| in the {PIC}| in this {PIC}| here]?",
            "How many {things} can you count?",
            f"How many {{things}} [are shown|are drawn|are visible|can be seen|are displayed|appear|"
            "are depicted]"
            f"[| here| in the {PIC}| in this {PIC}]?",
            f"How many {{things}} does [the|this] {PIC} [show|contain|have]?",
            f"[Count|Please count] [the|all the|all] {{things}}[| in the {PIC}| in this {PIC}| you see].",
            f"What is the [number|total number|count|amount] of {{things}}[| in the {PIC}| in this {PIC}]?",
            "[Number|Count] of {things}?",
            "[Give|State|Say|Report] the [number|count] of {things}.",
            "How many {things}?",
            f"How many {{things}} [were drawn|did they draw|exist] [here|in this {PIC}]?",
        ),
        ("how many {things} [there are|are there|you see|you can count|are shown]", "the number of {things}"),
    ),
    "exists": (
        (
            f"[Is there|Can you see|Do you see] {{a_thing}}[| in the {PIC}| in this {PIC}| anywhere]?",
            f"Does [the|this] {PIC} [show|contain|have|include] {{a_thing}}?",
            f"Is {{a_thing}} [in the {PIC}|shown|present|visible]?",
        ),
        (f"[if|whether] there is {{a_thing}}[| in the {PIC}]",),
    ),
    "is_it": (
        ("Is {ref} {claim}?", "Would you say {ref} is {claim}?", "{ref} is {claim}, [right|isn't it]?"),
        ("if {ref} is {claim}",),
    ),
    "read": (
        (
            "What does [it|the text|this|the sign|the label|the word|the writing|the caption] say?",
            f"What does [the text|the word|the sign|it] [say|read] in [the|this] {PIC}?",
            "What [word|text|number|is written|is printed|is the text|is the word] is [shown|this|"
            "written|printed|there|visible]"
            f"[| here| in the {PIC}| in this {PIC}| on the {PIC}]?",
            "What is [written|printed|the text|the word|the writing|the inscription|spelled|the "
            "printed text|the printed word]"
            f"[| here| there| in the {PIC}| in this {PIC}| on the {PIC}]?",
            "[Read|Please read|Transcribe|Copy|Spell out|Type out|Write down|Give me] [the text|the "
            "word|this|it|the writing|"
            f"the printed text|what is written|what it says][| in the {PIC}| in this {PIC}].",
            "Can you read [this|it|the text|the word|what is written][| for me| here]?",
            "[What|Which] [word|text|word or number|characters|letters|writing] [do|can] you [see|read]"
            f"[| in the {PIC}| in this {PIC}| here]?",
            "[What|Which] [word|text] [is written|is printed|is shown|is displayed|appears|stands][| "
            f"here| in the {PIC}| on the {PIC}]?",
            f"What text does [the|this] {PIC} [show|contain|have|display]?",
            "What's [written|printed|the word|the text]?",
            "What does [the|this] {PIC} say?".replace("{PIC}", PIC),
            "Which word is it?",
            "What is this word?",
        ),
        (
            "what [it|the text|the word|the sign|this] says",
            f"what is [written|printed][| here| in the {PIC}| on the {PIC}]",
            "what you can read",
        ),
    ),
    "read_number": (
        (
            f"[What|Which] number is [shown|this|written|printed|there|displayed|in the {PIC}|in this "
            f"{PIC}|on the {PIC}]?",
            f"[What|Which] number [do|can] you [see|read][| in the {PIC}| here]?",
            "What is the [number|printed number|value|figure][| shown| printed| written| here| in the picture]?",
            "[Read|Please read|Give me|Transcribe] the [number|digits].",
            "[What|Which] digits [do you see|are shown|are printed|can you read|are these]?",
            "What does the number say?",
            "What's the number?",
        ),
        (f"[what|which] number is [shown|printed|written][| in the {PIC}]", "what the number is"),
    ),
    "describe": (
        (
            f"[Describe|Please describe] [this|the] {PIC}.",
            f"What [do|can] you see[| in the {PIC}| in this {PIC}| here]?",
            f"What is [in|on|shown in] [this|the] {PIC}?",
            f"What does [this|the] {PIC} show?",
            f"What is [this|the] {PIC} [about|of]?",
            "What's in here?",
            f"Give me a [short |]description of [this|the] {PIC}.",
            f"Tell me about this {PIC}.",
            "What have I sent you?",
            f"Can you describe [this|the] {PIC}?",
        ),
        (
            f"what you see[| in the {PIC}| in this {PIC}| here]",
            f"what is in [this|the] {PIC}",
            f"what this {PIC} shows",
        ),
    ),
    "background": (
        (
            "[What|Which] colo[u|]r is the background?",
            "What is the colo[u|]r of the background?",
            f"What background colo[u|]r does the {PIC} have?",
            "What is the background colo[u|]r?",
        ),
        ("what colo[u|]r the background is",),
    ),
}


def expand(rng: random.Random, template: str) -> str:
    """Chooses one alternative for every `[a|b]`, innermost first."""
    while True:
        replaced = _CHOICE.sub(lambda match: rng.choice(match[1].split("|")), template, count=1)
        if replaced == template:
            return template
        template = replaced


def ask(rng: random.Random, kind: str, **slots: str) -> str:
    """A question of `kind` with its slots filled, as one of many people might type it."""
    direct, clauses = _BANK[kind]
    return _typed(rng, direct, clauses, slots)


def say(rng: random.Random, direct: tuple[str, ...], clauses: tuple[str, ...] = (), **slots: str) -> str:
    """A question from templates given here, worded as `ask` words those of the bank."""
    return _typed(rng, direct, clauses, slots)


def _typed(rng: random.Random, direct: tuple[str, ...], clauses: tuple[str, ...], slots: dict[str, str]) -> str:
    if clauses and rng.random() < 0.16:
        text = f"{expand(rng, f'[{_POLITE}]')} {expand(rng, rng.choice(clauses))}" + rng.choice(("?", "?", "."))
    else:
        text = expand(rng, rng.choice(direct))
    for name, value in slots.items():
        text = text.replace("{" + name + "}", expand(rng, value))
    if rng.random() < 0.12:
        opening = expand(rng, _OPENINGS)
        is_clause = opening.endswith(",") and rng.random() < 0.8
        first = text[0].lower() if is_clause else text[0].upper()
        text = f"{opening} {first}{text[1:]}"
    else:
        text = text[0].upper() + text[1:]
    closing = rng.random()
    if closing < 0.08:
        text = text.rstrip("?.") + rng.choice(("", "", " ?", "??", ", please?", " please"))
    elif closing < 0.2 and text.endswith(("?", ".")):
        text = text[:-1]
    elif closing < 0.27:
        text += " " + expand(rng, _CLOSINGS)
    case = rng.random()
    if case < 0.14:
        text = text.lower()
    elif case < 0.15:
        text = text.upper()
    return text


def article(word: str) -> str:
    """The word with "a" or "an" before it."""
    return f"{'an' if word[0] in 'aeio' else 'a'} {word}"


def plural(noun: str) -> str:
    return noun + ("es" if noun.endswith("s") else "s")


def at(place: str) -> str:
    """The phrase for a place in an answer: "at the top left", "in the center", "on the right"."""
    if place == "center":
        return "in the center"
    return f"on the {place}" if place in ("left", "right") else f"at the {place}"


def in_words(rng: random.Random, place: str) -> str:
    """The phrase for a place in a question, where people vary it more."""
    if place == "center":
        return rng.choice(("in the center", "in the middle", "at the center", "in the centre"))
    if " " in place:
        vertical, horizontal = place.split()
        vertical = rng.choice((vertical, vertical, "upper" if vertical == "top" else "lower"))
        joined = vertical + rng.choice((" ", " ", "-")) + horizontal
        return rng.choice((f"at the {joined}", f"in the {joined}", f"in the {joined} corner"))
    if place in ("left", "right"):
        return rng.choice((f"on the {place}", f"at the {place}", f"on the {place} side"))
    return rng.choice((f"at the {place}", f"at the {place}", f"on the {place}", f"in the {place}"))


def count_turn(rng: random.Random, things: str, number: int) -> Turn:
    """Asks for the number of `things`, a plural."""
    noun = things
    if number == 1:
        noun = things[:-2] if things.endswith("crosses") else things[:-1]
    verb = "is" if number == 1 else "are"
    return Turn(
        question=ask(rng, "count", things=things),
        answer=f"There {verb} {number} {noun}.",
        expected=(str(number),),
        category="count",
    )
