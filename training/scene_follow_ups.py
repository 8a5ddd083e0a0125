"""Questions about a scene that only the turn before explains: "And where is it?"."""

from __future__ import annotations

import random
from collections.abc import Callable

from training.dialogue import article, at, count_turn, plural, say
from training.naming import called, is_only
from training.sample import Turn
from training.scenes import Scene, Thing


def follow_ups_of(rng: random.Random, scene: Scene, before: Turn) -> list[Callable[[], Turn | None]]:
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
    if thing.name in said and is_only(scene, colour=thing.colour, shape=thing.shape):
        return True
    by_shape = said.startswith(f"the {thing.shape} ") and is_only(scene, shape=thing.shape)
    by_colour = said.startswith(f"the {thing.colour} shape") and is_only(scene, colour=thing.colour)
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
    if is_only(scene, shape=other.shape):
        ref, subject = called(rng, other.shape), other.shape
    elif is_only(scene, colour=other.colour) and before.category != "colour":
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
