"""Conversations about a picture of coloured shapes. Draws nothing."""

from __future__ import annotations

import random
from collections.abc import Callable

from training.dialogue import article, ask, at, in_words, plural, say
from training.sample import COLOURS, SHAPES, Turn
from training.scenes import Scene, Thing, any_thing


def count_turn(rng: random.Random, things: str, number: int) -> Turn:
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


def talk(rng: random.Random, scene: Scene, first: str, turns: int) -> list[Turn]:
    """`turns` questions about the scene, the first of category `first`; later ones may lean on it."""
    said: list[Turn] = []
    makers: dict[str, list[Callable[[], Turn | None]]] = {
        "colour": [lambda: _colour(rng, scene)] * 3
        + [lambda: _colour_claim(rng, scene), lambda: _place_colour(rng, scene)],
        "shape": [lambda: _shape(rng, scene)] * 3 + [lambda: _exists(rng, scene), lambda: _at_place(rng, scene)],
        "place": [lambda: _place(rng, scene)],
        "count": [lambda: _count(rng, scene)],
        "relation": [lambda: _relation(rng, scene), lambda: _largest(rng, scene)],
        "general": [lambda: describe(rng, scene)],
    }
    follow_ups: list[Callable[[], Turn | None]] = []
    for index in range(turns):
        turn = None
        for attempt in range(6):
            if index == 0 and attempt < 4:
                kind = first
            elif follow_ups and rng.random() < 0.55:
                kind = "follow"
            else:
                kind = rng.choice(
                    ("colour", "shape", "place", "count", "relation", "general", "colour", "shape", "place")
                )
            turn = rng.choice(follow_ups)() if kind == "follow" else rng.choice(makers[kind])()
            if turn is not None and all(turn.question != earlier.question for earlier in said):
                break
        if turn is None:
            turn = describe(rng, scene)
        said.append(turn)
        follow_ups = _follow_ups(rng, scene, turn)
    return said


def describe(rng: random.Random, scene: Scene) -> Turn:
    """What is in the picture: up to three things by name from left to right, more by their number."""
    things = sorted(scene.things, key=lambda thing: thing.center[0])
    names = [article(thing.name) for thing in things]
    if not names:
        answer = "I see nothing that I know in this picture."
    elif len(names) == 1:
        where = f" {at(things[0].place)}" if things[0].place else ""
        answer = f"I see {names[0]}{where}."
    elif len(names) <= 3:
        answer = f"I see {', '.join(names[:-1])} and {names[-1]}."
    elif len({thing.name for thing in things}) == 1:
        answer = f"I see {len(names)} {things[0].colour} {plural(things[0].shape)}."
    else:
        answer = f"I see {len(names)} shapes."
    return Turn(question=ask(rng, "describe"), answer=answer, expected=(), category="general")


def _pick(rng: random.Random, scene: Scene, *, by: str) -> tuple[Thing, str, str] | None:
    """A thing, a phrase that means it alone without saying what is asked, and the subject of its answer."""
    if not scene.things:
        return None
    thing = rng.choice(scene.things)
    noun = rng.choice(("shape", "shape", "object", "figure", "thing", "one", "item"))
    if len(scene.things) == 1 and rng.random() < 0.6:
        # a colour question may still name the shape, and the other way round
        return (
            thing,
            rng.choice((f"the {noun if noun != 'one' else 'shape'}", "this", "it", "the shape", "this shape")),
            "It",
        )
    if by == "colour" and _is_only(scene, shape=thing.shape):
        return thing, f"the {_called(rng, thing.shape)}", f"The {thing.shape}"
    if by == "shape" and _is_only(scene, colour=thing.colour):
        return thing, f"the {_hue(rng, thing.colour)} {noun}", f"The {thing.colour} shape"
    if by == "place":
        if _is_only(scene, shape=thing.shape) and rng.random() < 0.6:
            return thing, f"the {_called(rng, thing.shape)}", f"The {thing.shape}"
        if _is_only(scene, colour=thing.colour) and rng.random() < 0.4:
            return thing, f"the {_hue(rng, thing.colour)} {noun}", f"The {thing.colour} shape"
        if _is_only(scene, colour=thing.colour, shape=thing.shape):
            return thing, f"the {_hue(rng, thing.colour)} {_called(rng, thing.shape)}", f"The {thing.name}"
    return None


def _called(rng: random.Random, shape: str) -> str:
    if shape == "ellipse" and rng.random() < 0.5:
        return "oval"
    if rng.random() < 0.04:
        return {"cross": "plus sign", "diamond": "rhombus", "circle": "disc"}.get(shape, shape)
    return shape


def _hue(rng: random.Random, colour: str) -> str:
    return "grey" if colour == "gray" and rng.random() < 0.5 else colour


def _is_only(scene: Scene, *, colour: str | None = None, shape: str | None = None) -> bool:
    return (
        sum(
            (colour is None or thing.colour == colour) and (shape is None or thing.shape == shape)
            for thing in scene.things
        )
        == 1
    )


def _colour(rng: random.Random, scene: Scene) -> Turn | None:
    picked = _pick(rng, scene, by="colour")
    if picked is None:
        return None
    thing, ref, subject = picked
    if subject == "It" and rng.random() < 0.35:
        question = ask(rng, "only_colour")
    else:
        question = ask(rng, "colour", ref=ref)
    return Turn(question=question, answer=f"{subject} is {thing.colour}.", expected=(thing.colour,), category="colour")


def _colour_claim(rng: random.Random, scene: Scene) -> Turn | None:
    picked = _pick(rng, scene, by="colour")
    if picked is None:
        return None
    thing, ref, subject = picked
    claim = thing.colour if rng.random() < 0.5 else rng.choice(COLOURS)
    word = "Yes" if claim == thing.colour else "No"
    return Turn(
        question=ask(rng, "is_it", ref=ref, claim=_hue(rng, claim)),
        answer=f"{word}, {'it' if subject == 'It' else subject.lower()} is {thing.colour}.",
        expected=(word.lower(),),
        category="colour",
    )


def _place_colour(rng: random.Random, scene: Scene) -> Turn | None:
    thing = _placed(rng, scene)
    if thing is None or thing.place is None:
        return None
    question = ask(rng, "colour_at_place", at=in_words(rng, thing.place))
    return Turn(question=question, answer=f"It is {thing.colour}.", expected=(thing.colour,), category="colour")


def _shape(rng: random.Random, scene: Scene) -> Turn | None:
    picked = _pick(rng, scene, by="shape")
    if picked is None:
        return None
    thing, ref, subject = picked
    if subject == "It" and rng.random() < 0.6:
        question = ask(rng, "only_shape")
    else:
        question = ask(rng, "shape", ref=ref)
    return Turn(
        question=question,
        answer=f"{subject} is {article(thing.shape)}.",
        expected=(thing.shape,),
        category="shape",
    )


def _exists(rng: random.Random, scene: Scene) -> Turn | None:
    shape, colour = rng.choice(SHAPES), rng.choice(COLOURS)
    if scene.things and rng.random() < 0.65:
        thing = rng.choice(scene.things)
        shape, colour = thing.shape, rng.choice((thing.colour, thing.colour, colour))
    has_colour = rng.random() < 0.5
    is_there = any(thing.shape == shape and (not has_colour or thing.colour == colour) for thing in scene.things)
    name = f"{colour} {shape}" if has_colour else shape
    asked = f"{_hue(rng, colour)} {_called(rng, shape)}" if has_colour else _called(rng, shape)
    return Turn(
        question=ask(rng, "exists", a_thing=article(asked)),
        answer=f"{'Yes, there is' if is_there else 'No, there is not'} {article(name)}.",
        expected=("yes" if is_there else "no",),
        category="shape",
    )


def _placed(rng: random.Random, scene: Scene) -> Thing | None:
    """A thing alone in its ninth, where no other is near enough to be meant."""
    fitting = [
        thing
        for thing in scene.things
        if thing.place and sum(other.place == thing.place or other.place is None for other in scene.things) == 1
    ]
    return rng.choice(fitting) if fitting else None


def _at_place(rng: random.Random, scene: Scene) -> Turn | None:
    thing = _placed(rng, scene)
    if thing is None or thing.place is None:
        return None
    return Turn(
        question=ask(rng, "at_place", at=in_words(rng, thing.place)),
        answer=f"It is {article(thing.name)}.",
        expected=(thing.shape,),
        category="shape",
    )


def _place(rng: random.Random, scene: Scene) -> Turn | None:
    picked = _pick(rng, scene, by="place")
    if picked is None or picked[0].place is None:
        return None
    thing, ref, subject = picked
    assert thing.place is not None
    question = ask(rng, "place", ref=ref)
    return Turn(
        question=question,
        answer=f"{subject} is {at(thing.place)}.",
        expected=(thing.place,),
        category="place",
    )


def _count(rng: random.Random, scene: Scene) -> Turn | None:
    kind = rng.random()
    if kind < 0.4 or not scene.things:
        return count_turn(rng, any_thing(rng), len(scene.things))
    thing = rng.choice(scene.things)
    if kind < 0.7:
        shape = thing.shape if rng.random() < 0.75 else rng.choice(SHAPES)
        return count_turn(rng, plural(shape), sum(other.shape == shape for other in scene.things))
    colour = thing.colour if rng.random() < 0.8 else rng.choice(COLOURS)
    return count_turn(rng, f"{colour} {any_thing(rng)}", sum(other.colour == colour for other in scene.things))


def _relation(rng: random.Random, scene: Scene) -> Turn | None:
    """What lies beside another thing, where there are just two."""
    if len(scene.things) != 2:
        return None
    one, other = rng.sample(scene.things, 2)
    if one.shape == other.shape:
        return None
    across, down = other.center[0] - one.center[0], other.center[1] - one.center[1]
    reach = one.radius + other.radius
    if abs(across) > reach and abs(across) > 1.5 * abs(down):
        side = rng.choice(
            ("right of", "to the right of", "on the right of") if across > 0 else ("left of", "to the left of")
        )
    elif abs(down) > reach and abs(down) > 1.5 * abs(across):
        side = rng.choice(("below", "under", "beneath") if down > 0 else ("above", "over"))
    else:
        return None
    question = say(
        rng,
        (
            "[What|Which shape] is {side} the {one}?",
            "[What|Which] [shape|object] [lies|is placed] {side} the {one}?",
        ),
        ("[what|which shape] is {side} the {one}",),
        side=side,
        one=one.shape,
    )
    return Turn(question=question, answer=f"It is {article(other.name)}.", expected=(other.shape,), category="shape")


def _largest(rng: random.Random, scene: Scene) -> Turn | None:
    things = sorted(scene.things, key=lambda thing: thing.radius)
    if len(things) < 2:
        return None
    if things[-1].radius > 1.3 * things[-2].radius:
        thing, word = things[-1], rng.choice(("largest", "biggest"))
    elif things[0].radius < 0.75 * things[1].radius:
        thing, word = things[0], "smallest"
    else:
        return None
    if rng.random() < 0.5:
        question = say(
            rng,
            (
                "[What|Which] colo[u|]r is the {word} [shape|object|one|figure]?",
                "What is the colo[u|]r of the {word} [shape|one]?",
            ),
            word=word,
        )
        return Turn(question=question, answer=f"It is {thing.colour}.", expected=(thing.colour,), category="colour")
    question = say(
        rng,
        ("[What|Which] [shape|object|one|figure] is the {word}?", "What is the {word} [shape|object]?"),
        word=word,
    )
    return Turn(question=question, answer=f"It is {article(thing.shape)}.", expected=(thing.shape,), category="shape")


def _follow_ups(rng: random.Random, scene: Scene, before: Turn) -> list[Callable[[], Turn | None]]:
    """Questions that only the turn before explains ("And where is it?")."""
    meant = [
        thing
        for thing in scene.things
        if len(scene.things) == 1 or (before.category in ("colour", "place", "shape") and _names(scene, before, thing))
    ]
    made: list[Callable[[], Turn | None]] = []
    if len(meant) == 1:
        made += [lambda: _about_it(rng, meant[0])] * 3
    others = [thing for thing in scene.things if thing not in meant]
    if others and before.category in ("colour", "place") and before.answer and before.answer.startswith("The "):
        made += [lambda: _and_the_other(rng, scene, before, rng.choice(others))] * 2
    if before.category == "count":
        made.append(lambda: _and_how_many(rng, scene))
    return made


def _names(scene: Scene, before: Turn, thing: Thing) -> bool:
    """Whether the answer before named just this thing."""
    said = (before.answer or "").lower()
    if said.startswith(("yes", "no")):
        return False
    if thing.name in said and _is_only(scene, colour=thing.colour, shape=thing.shape):
        return True
    by_shape = said.startswith(f"the {thing.shape} ") and _is_only(scene, shape=thing.shape)
    by_colour = said.startswith(f"the {thing.colour} shape") and _is_only(scene, colour=thing.colour)
    return by_shape or by_colour


_AND = "[And |And |So |OK, and |Okay, |Now, |Thanks. |Good. |Right. |Then ]"


def _about_it(rng: random.Random, thing: Thing) -> Turn | None:
    kind = rng.randrange(3)
    if kind == 0:
        question = say(
            rng,
            (
                f"{_AND}[what|which] colo[u|]r is [it|that|that one|that shape]?",
                f"{_AND}what is its colo[u|]r?",
                "And its colo[u|]r?",
                "[What|Which] colo[u|]r is [it|that|that one]?",
                "[What|Which] colo[u|]r does it have?",
                "What is its colo[u|]r?",
                "What about [its|the] colo[u|]r?",
                f"{_AND}what about the colo[u|]r?",
            ),
        )
        return Turn(
            question=question,
            answer=f"It is {thing.colour}.",
            expected=(thing.colour,),
            category="second_turn",
        )
    if kind == 1:
        question = say(
            rng,
            (
                f"{_AND}[what|which] shape is [it|that|that one]?",
                "And its shape?",
                f"{_AND}what is its shape?",
                "What shape does it have?",
                "What is its shape?",
                "[What|Which] shape is [it|that]?",
                "What about [its|the] shape?",
                f"{_AND}what [kind|sort] of shape is it?",
            ),
        )
        return Turn(
            question=question,
            answer=f"It is {article(thing.shape)}.",
            expected=(thing.shape,),
            category="second_turn",
        )
    if thing.place is None:
        return None
    question = say(
        rng,
        (
            f"{_AND}where is [it|that|that one][| located| placed]?",
            "And its [position|location|place]?",
            "Where is [it|that]?",
            "Where [in|on] the [picture|image] is it?",
            "[In|On] which part of the [picture|image] is it?",
            "What is its [position|location]?",
            "Where can I [find|see] it?",
            f"{_AND}where [do you see|can I find] it?",
        ),
    )
    return Turn(question=question, answer=f"It is {at(thing.place)}.", expected=(thing.place,), category="second_turn")


def _and_the_other(rng: random.Random, scene: Scene, before: Turn, other: Thing) -> Turn | None:
    """The question before, asked of another thing by its name alone."""
    if _is_only(scene, shape=other.shape):
        ref, subject = _called(rng, other.shape), other.shape
    elif _is_only(scene, colour=other.colour) and before.category != "colour":
        ref, subject = f"{other.colour} one", f"{other.colour} shape"
    else:
        return None
    if before.category == "colour":
        answer, expected = f"The {subject} is {other.colour}.", other.colour
    else:
        if other.place is None:
            return None
        answer, expected = f"The {subject} is {at(other.place)}.", other.place
    question = say(
        rng,
        (
            "[And|And what about|What about|How about|And how about|Now|Then] the {ref}?",
            "The {ref}?",
            "And the {ref}?",
            "And that of the {ref}?",
        ),
        ref=ref,
    )
    return Turn(question=question, answer=answer, expected=(expected,), category="second_turn")


def _and_how_many(rng: random.Random, scene: Scene) -> Turn | None:
    if not scene.things:
        return None
    thing = rng.choice(scene.things)
    if rng.random() < 0.5:
        things, number = f"{thing.colour} shapes", sum(other.colour == thing.colour for other in scene.things)
        ref = rng.choice((f"{thing.colour} ones", f"{thing.colour} shapes"))
    else:
        things, number = plural(thing.shape), sum(other.shape == thing.shape for other in scene.things)
        ref = things
    turn = count_turn(rng, things, number)
    question = say(
        rng,
        (
            "[And how many|How many] [of them are|are] {ref}?",
            "[And|What about|How about] [the|] {ref}?",
            "How many {ref}?",
        ),
        ref=ref,
    )
    return Turn(question=question, answer=turn.answer, expected=turn.expected, category="second_turn")
