"""Conversations about a picture of coloured shapes. Draws nothing."""

from __future__ import annotations

import random
from collections.abc import Callable

from training.dialogue import article, ask, at, count_turn, in_words, plural, say
from training.naming import called, hue, pick
from training.sample import COLOURS, SHAPES, Turn
from training.scene_follow_ups import follow_ups_of
from training.scenes import Scene, Thing, any_thing


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
        follow_ups = follow_ups_of(rng, scene, turn)
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


def _colour(rng: random.Random, scene: Scene) -> Turn | None:
    picked = pick(rng, scene, by="colour")
    if picked is None:
        return None
    thing, ref, subject = picked
    if subject == "It" and rng.random() < 0.35:
        question = ask(rng, "only_colour")
    else:
        question = ask(rng, "colour", ref=ref)
    return Turn(question=question, answer=f"{subject} is {thing.colour}.", expected=(thing.colour,), category="colour")


def _colour_claim(rng: random.Random, scene: Scene) -> Turn | None:
    picked = pick(rng, scene, by="colour")
    if picked is None:
        return None
    thing, ref, subject = picked
    claim = thing.colour if rng.random() < 0.5 else rng.choice(COLOURS)
    word = "Yes" if claim == thing.colour else "No"
    return Turn(
        question=ask(rng, "is_it", ref=ref, claim=hue(rng, claim)),
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
    picked = pick(rng, scene, by="shape")
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
    asked = f"{hue(rng, colour)} {called(rng, shape)}" if has_colour else called(rng, shape)
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
    picked = pick(rng, scene, by="place")
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
