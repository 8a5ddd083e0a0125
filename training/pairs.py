"""Questions about two pictures sent together. Draws nothing itself: it asks the modules that do."""

from __future__ import annotations

import random
from collections.abc import Callable

from training.backgrounds import Size, nothing
from training.dialogue import article, ask, at, plural, say
from training.lettering import cased
from training.prints import draw_print
from training.sample import COLOURS, SHAPES, Sample, Turn
from training.scenes import Scene, several, single, varied

_BOTH = "[picture|image|photo|drawing]"
_NTH = (
    (
        "[the first|the first|the first|the 1st] [picture|image|image|photo|drawing|one]",
        "[picture|image|photo] [1|one|1|A]",
    ),
    (
        "[the second|the second|the second|the 2nd] [picture|image|image|photo|drawing|one]",
        "[picture|image|photo] [2|two|2|B]",
    ),
)
_ORDINALS = ("first", "second")


def draw_pair(rng: random.Random, sizes: tuple[Size, Size], turns: int) -> Sample:
    """Two pictures of `sizes`, and `turns` questions that compare them or ask about one of them."""
    kind = rng.random()
    if kind < 0.5:
        return _singles(rng, sizes, turns)
    if kind < 0.78:
        return _counts(rng, sizes, turns)
    if kind < 0.88:
        return _words(rng, sizes, turns)
    return _mixed(rng, sizes, turns)


def _nth(rng: random.Random, index: int) -> str:
    return _NTH[index][0] if rng.random() < 0.75 else _NTH[index][1]


def _turn(question: str, answer: str, *expected: str) -> Turn:
    return Turn(question=question, answer=answer, expected=expected, category="compare")


def _yes_or_no(question: str, is_so: bool) -> Turn:
    return _turn(question, "Yes, they are." if is_so else "No, they are not.", "yes" if is_so else "no")


def _chosen(rng: random.Random, makers: list[Callable[[], Turn | None]], turns: int) -> list[Turn]:
    said: list[Turn] = []
    for _ in range(5 * turns):
        turn = rng.choice(makers)()
        if turn is not None and all(turn.question != earlier.question for earlier in said):
            said.append(turn)
            if len(said) == turns:
                break
    return said


def _singles(rng: random.Random, sizes: tuple[Size, Size], turns: int) -> Sample:
    """One shape in each picture, often alike in colour or shape."""
    colours, shapes = rng.sample(COLOURS, 2), rng.sample(SHAPES, 2)
    if rng.random() < 0.5:
        colours[1] = colours[0]
    if rng.random() < 0.5:
        shapes[1] = shapes[0]
    scenes = []
    for colour, shape, size in zip(colours, shapes, sizes, strict=True):
        if rng.random() < 0.4:
            scenes.append(several(rng, size, [(colour, shape)]))
        else:
            scenes.append(single(rng, size, kind=(colour, shape)))
    things = [scene.things[0] for scene in scenes]

    def same_colour() -> Turn:
        question = say(
            rng,
            (
                "[Are|Do] the [two |]shapes [of|have] the same colo[u|]r?".replace("[of|have]", "have").replace(
                    "[Are|Do]", "Do"
                ),
                "Are the [two |][shapes|objects|figures|things] the same colo[u|]r?",
                f"[Do|Are] both [shapes|objects|{_BOTH}s] [have|show] the same colo[u|]r?".replace("[Do|Are]", "Do"),
                f"Is the colo[u|]r the same in both {_BOTH}s?",
                f"Do the [two |]{_BOTH}s [show|have] [shapes|objects] of the same colo[u|]r?",
                "Are they the same colo[u|]r?",
                "Is the shape in {one} the same colo[u|]r as the [shape|one] in {other}?",
                "Do the colo[u|]rs match?",
                "Same colo[u|]r?",
            ),
            ("if [both|the two] shapes [have|are] the same colo[u|]r",),
            one=_nth(rng, 0),
            other=_nth(rng, 1),
        )
        return _yes_or_no(question, colours[0] == colours[1])

    def same_shape() -> Turn:
        question = say(
            rng,
            (
                "Are the [two |][shapes|objects|figures] the same[| shape| kind of shape]?",
                f"Do [both|the two|the] {_BOTH}s show the same [kind of |]shape?",
                f"Is the shape the same in both {_BOTH}s?",
                f"Is [it|there] the same [kind of |]shape in both {_BOTH}s?",
                f"Do the [two |]{_BOTH}s [show|contain] the same shape?",
                "Are they the same shape?",
                "Is the shape in {one} the same as [the shape|the one|that] in {other}?",
                "Do the shapes match?",
                "Same shape?",
            ),
            ("[if|whether] [both|the two] {pics} show the same shape",),
            one=_nth(rng, 0),
            other=_nth(rng, 1),
            pics="[pictures|images]",
        )
        if "the same?" in question.lower() and "shape in" not in question.lower() and colours[0] != colours[1]:
            return same_colour()
        return _yes_or_no(question, shapes[0] == shapes[1])

    def both_are() -> Turn:
        by_colour = rng.random() < 0.5
        name = rng.choice(colours if by_colour else shapes)
        noun = f"{name} [shape|object]" if by_colour else name
        question = say(
            rng,
            (
                f"Do both {_BOTH}s [show|contain|have] {{a_thing}}?",
                f"Is there {{a_thing}} in both {_BOTH}s?",
                "Are both [shapes|objects|of them] {claim}?",
            ),
            a_thing=f"{article(name).split()[0]} {noun}",
            claim=name if by_colour else plural(name),
        )
        return _yes_or_no(question, (colours if by_colour else shapes) == [name, name])

    def which() -> Turn | None:
        by_colour = rng.random() < 0.5
        names = colours if by_colour else shapes
        if names[0] == names[1]:
            return None
        index = rng.randrange(2)
        noun = f"{names[index]} [shape|object|figure|one]" if by_colour else names[index]
        return _which(rng, f"[the|{article(names[index]).split()[0]}] {noun}", index)

    def attribute() -> Turn:
        index = rng.randrange(2)
        thing, where = things[index], f"in {_nth(rng, index)}"
        if rng.random() < 0.5:
            question = say(
                rng,
                (
                    "[What|Which] colo[u|]r is the [shape|object|figure|{shape}] {where}?",
                    "What is the colo[u|]r of the [shape|object|{shape}] {where}?",
                    "[What|Which] colo[u|]r do you see {where}?",
                    "[What|Which] colo[u|]r does the [shape|{shape}] {where} have?",
                    "{Where}, what colo[u|]r is the [shape|{shape}]?",
                ),
                ("what colo[u|]r the [shape|{shape}] {where} is",),
                where=where,
                Where=where.capitalize(),
                shape=thing.shape,
            )
            return _turn(question, f"It is {thing.colour}.", thing.colour)
        question = say(
            rng,
            (
                "[What|Which] shape is {where}?",
                "[What|Which] shape [do you see|is shown] {where}?",
                "What is {where}?",
                "What is the shape {where}?",
                "{Where}, what shape [is it|do you see|is shown]?",
                "[What|Which] shape does {nth} [show|contain]?",
            ),
            ("[what|which] shape is [shown |]{where}", "what is {where}"),
            where=where,
            Where=where.capitalize(),
            nth=where.removeprefix("in "),
        )
        return _turn(question, f"It is {article(thing.shape)}.", thing.shape)

    def bigger() -> Turn | None:
        share = [thing.radius / min(size) for thing, size in zip(things, sizes, strict=True)]
        pixels = [thing.radius for thing in things]
        index = 0 if pixels[0] > pixels[1] else 1
        if pixels[index] < 1.35 * pixels[1 - index] or share[index] < 1.35 * share[1 - index]:
            return None
        is_big = rng.random() < 0.65
        words = "[larger|bigger]" if is_big else "smaller"
        index = index if is_big else 1 - index
        question = say(
            rng,
            (
                f"[Which|What] {_BOTH} [shows|has|contains] the {{words}} [shape|object]?",
                "[In which|Which] [picture|image] [is the shape|has the shape that is] {words}?".replace(
                    "[In which|Which]", "In which"
                ).replace("[is the shape|has the shape that is]", "is the shape"),
                "Which [shape|object|one] is {words}[|, the first or the second]?",
            ),
            words=words,
        )
        return _turn(question, f"The {_ORDINALS[index]} picture.", _ORDINALS[index])

    def place() -> Turn | None:
        index = rng.randrange(2)
        name = things[index].place
        if name is None:
            return None
        question = ask(rng, "place", ref=f"the [shape|object|{things[index].shape}] in {_nth(rng, index)}")
        return _turn(question, f"It is {at(name)}.", name)

    makers: list[Callable[[], Turn | None]] = [
        same_colour,
        same_colour,
        same_shape,
        same_shape,
        both_are,
        which,
        which,
    ]
    makers += [attribute, attribute, attribute, bigger, bigger, place, lambda: _described(rng, scenes)]
    return Sample(
        images=[scene.image for scene in scenes],
        turns=_chosen(rng, makers, turns),
        marks=[scene.marks for scene in scenes],
    )


def _which(rng: random.Random, what: str, index: int) -> Turn:
    question = say(
        rng,
        (
            f"[Which|Which|What] {_BOTH} [shows|shows|has|contains|includes] {{what}}?",
            f"[In|On] which {_BOTH} [is|do you see|can you see|is there] {{what}}?",
            f"Which of the [two |]{_BOTH}s [shows|has|contains] {{what}}?",
            f"Is {{what}} in the first or [in |]the second {_BOTH}?",
            "Which one [shows|has|contains] {what}[|, the first or the second]?",
            "Where is {what}, in the first or the second picture?",
        ),
        (f"which {_BOTH} [shows|has|contains] {{what}}", f"in which {_BOTH} {{what}} is"),
        what=what,
    )
    return _turn(question, f"The {_ORDINALS[index]} picture.", _ORDINALS[index])


def _described(rng: random.Random, scenes: list[Scene]) -> Turn:
    names = [article(scene.things[0].name) for scene in scenes]
    question = say(
        rng,
        (
            "[Describe|Please describe] [the|these|both] [two |][pictures|images].",
            "What do the [two |][pictures|images] show?",
            "What do you see[| in these pictures]?",
        ),
    )
    return Turn(
        question=question,
        answer=f"The first picture shows {names[0]}, the second {names[1]}.",
        expected=(),
        category="general",
    )


def _counts(rng: random.Random, sizes: tuple[Size, Size], turns: int) -> Sample:
    """A few like shapes in each picture."""
    shape, colours = rng.choice(SHAPES), [rng.choice(COLOURS), rng.choice(COLOURS)]
    is_alike = rng.random() < 0.6
    numbers = [rng.randint(1, 7), rng.randint(1, 7)] if rng.random() < 0.8 else [rng.randint(1, 6)] * 2
    scenes = []
    for index in range(2):
        kinds = [
            (
                colours[0] if is_alike else rng.choice(COLOURS),
                shape if is_alike or rng.random() < 0.2 else rng.choice(SHAPES),
            )
            for _ in range(numbers[index])
        ]
        scenes.append(several(rng, sizes[index], kinds))
    any_noun = rng.choice(("shapes", "shapes", "objects", "figures", "things", "items"))
    noun = plural(shape) if is_alike and rng.random() < 0.6 else any_noun

    def more() -> Turn | None:
        if numbers[0] == numbers[1]:
            return None
        is_more = rng.random() < 0.65
        index = 0 if (numbers[0] > numbers[1]) == is_more else 1
        question = say(
            rng,
            (
                f"[Which|Which|What] {_BOTH} [has|shows|contains] {{words}} {{noun}}?",
                f"[In|On] which {_BOTH} are there {{words}} {{noun}}?",
                f"Which of the [two |]{_BOTH}s [has|shows|contains] {{words}} {{noun}}?",
                "Where are there {words} {noun}, in the first or [in |]the second [picture|image]?",
                "Which one has {words} {noun}?",
                f"Are there {{words}} {{noun}} in the first or in the second {_BOTH}?",
            ),
            (f"which {_BOTH} [has|shows] {{words}} {{noun}}",),
            words="[more|more|the most]" if is_more else "[fewer|fewer|less|the fewest]",
            noun=noun,
        )
        return _turn(question, f"The {_ORDINALS[index]} picture.", _ORDINALS[index])

    def number() -> Turn:
        index = rng.randrange(2)
        question = say(
            rng,
            (
                "How many {noun} are [there |]in {nth}?",
                "How many {noun} does {nth} [show|have|contain]?",
                "How many {noun} [do|can] you see in {nth}?",
                "Count the {noun} in {nth}.",
                "What is the number of {noun} in {nth}?",
            ),
            ("how many {noun} [there are|are] in {nth}",),
            noun=noun,
            nth=_nth(rng, index),
        )
        return _turn(question, f"There {'is' if numbers[index] == 1 else 'are'} {numbers[index]}.", str(numbers[index]))

    def total() -> Turn:
        question = say(
            rng,
            (
                "How many {noun} are there in [total|all]?",
                f"How many {{noun}} are there in both {_BOTH}s [together|combined]?",
                f"How many {{noun}} do [the two|both] {_BOTH}s show [together|in total]?",
            ),
            noun=noun,
        )
        return _turn(question, f"There are {sum(numbers)} in all.", str(sum(numbers)))

    def same_number() -> Turn:
        question = say(
            rng,
            (
                f"Do [both|the two] {_BOTH}s [show|have|contain] [the same number of|as many|equally many] {{noun}}?",
                f"Are there [equally many|as many|the same number of] {{noun}} in both {_BOTH}s?",
                f"Is the number of {{noun}} the same[| in both {_BOTH}s]?",
            ),
            noun=noun,
        )
        return _yes_or_no(question, numbers[0] == numbers[1])

    def compared() -> Turn:
        index = rng.randrange(2)
        is_more = rng.random() < 0.6
        question = say(
            rng,
            (
                "Are there {words} {noun} in {one} than in {other}?",
                "Does {one} [have|show|contain] {words} {noun} than {other}?",
            ),
            words="more" if is_more else "fewer",
            noun=noun,
            one=_nth(rng, index),
            other=_nth(rng, 1 - index),
        )
        mine, theirs = numbers[index], numbers[1 - index]
        return _yes_or_no(question, mine > theirs if is_more else mine < theirs)

    makers: list[Callable[[], Turn | None]] = [more, more, more, number, number, total, same_number, compared]
    return Sample(
        images=[scene.image for scene in scenes],
        turns=_chosen(rng, makers, turns),
        marks=[scene.marks for scene in scenes],
    )


def _words(rng: random.Random, sizes: tuple[Size, Size], turns: int) -> Sample:
    """A printed word or number in each picture."""
    sheets = [draw_print(rng, size, text=None, is_single=True) for size in sizes]
    if rng.random() < 0.35:
        text = sheets[0].prints[0].text
        if len(text) <= 5:
            sheets[1] = draw_print(rng, sizes[1], text=cased(rng, text), is_single=True)
    texts = [sheet.prints[0].text for sheet in sheets]

    def read() -> Turn:
        index = rng.randrange(2)
        question = say(
            rng,
            (
                "What does {nth} say?",
                "What does the [text|word] in {nth} say?",
                "What is [written|printed|the word|the text] in {nth}?",
                "[Read|Please read] the [text|word] in {nth}.",
                "[What|Which] [word|text] [is|do you see] in {nth}?",
            ),
            ("what is [written|printed] in {nth}",),
            nth=_nth(rng, index),
        )
        return _turn(question, f"It says {texts[index].upper()}.", texts[index])

    def same() -> Turn:
        question = say(
            rng,
            (
                f"Do [both|the two|the] {_BOTH}s [show|say|have] the same [word|text]?",
                "Is it the same [word|text] in both [pictures|images]?",
                "Are the [two |][words|texts] the same?",
                "Do they say the same[| thing]?",
            ),
        )
        return _yes_or_no(question, texts[0].lower() == texts[1].lower())

    return Sample(images=[sheet.image for sheet in sheets], turns=_chosen(rng, [read, read, same], turns))


def _mixed(rng: random.Random, sizes: tuple[Size, Size], turns: int) -> Sample:
    """Shapes in one picture, and text, nothing or other shapes in the other."""
    index = rng.randrange(2)
    scene = single(rng, sizes[index]) if rng.random() < 0.5 else varied(rng, sizes[index])
    kind = rng.choice(("text", "nothing", "scene"))
    makers: list[Callable[[], Turn | None]] = []
    shown = {(thing.colour, thing.shape) for thing in scene.things}
    if kind == "text":
        sheet = draw_print(rng, sizes[1 - index], text=None, is_single=True)
        other = sheet.image
        makers.append(lambda: _which(rng, "[text|a word|some text|writing|a printed word]", 1 - index))
        text = sheet.prints[0].text
        makers.append(lambda: _turn(ask(rng, "read"), f"It says {text.upper()}.", text))
    elif kind == "nothing":
        other = nothing(rng, sizes[1 - index])
        makers.append(lambda: _which(rng, "[nothing|no shape|no shapes]", 1 - index))
    else:
        second = varied(rng, sizes[1 - index])
        other = second.image
        both = {thing.shape for thing in scene.things} & {thing.shape for thing in second.things}
        theirs = [thing for thing in second.things if thing.shape not in both]
        if theirs:
            thing = rng.choice(theirs)
            makers.append(lambda: _which(rng, f"[the|{article(thing.shape).split()[0]}] {thing.shape}", 1 - index))
        scene = Scene(image=scene.image, things=tuple(thing for thing in scene.things if thing.shape not in both))
    if scene.things and shown:
        mine = rng.choice(scene.things)
        makers.append(lambda: _which(rng, f"[the|{article(mine.shape).split()[0]}] {mine.shape}", index))
        if sum(thing.shape == mine.shape for thing in scene.things) == 1:
            makers.append(
                lambda: _turn(
                    ask(rng, "colour", ref=f"the {mine.shape}"),
                    f"The {mine.shape} is {mine.colour}.",
                    mine.colour,
                )
            )
    images = [scene.image, other] if index == 0 else [other, scene.image]
    if not makers:
        return _singles(rng, sizes, turns)
    return Sample(images=images, turns=_chosen(rng, makers, turns))
