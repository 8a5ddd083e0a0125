"""How a question means one thing of a scene, by its shape or its colour. Words no questions."""

from __future__ import annotations

import random

from training.scenes import Scene, Thing


def pick(rng: random.Random, scene: Scene, *, by: str) -> tuple[Thing, str, str] | None:
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
    if by == "colour" and is_only(scene, shape=thing.shape):
        return thing, f"the {called(rng, thing.shape)}", f"The {thing.shape}"
    if by == "shape" and is_only(scene, colour=thing.colour):
        return thing, f"the {hue(rng, thing.colour)} {noun}", f"The {thing.colour} shape"
    if by == "place":
        if is_only(scene, shape=thing.shape) and rng.random() < 0.6:
            return thing, f"the {called(rng, thing.shape)}", f"The {thing.shape}"
        if is_only(scene, colour=thing.colour) and rng.random() < 0.4:
            return thing, f"the {hue(rng, thing.colour)} {noun}", f"The {thing.colour} shape"
        if is_only(scene, colour=thing.colour, shape=thing.shape):
            return thing, f"the {hue(rng, thing.colour)} {called(rng, thing.shape)}", f"The {thing.name}"
    return None


def called(rng: random.Random, shape: str) -> str:
    """The shape, or another of its names."""
    if shape == "ellipse" and rng.random() < 0.5:
        return "oval"
    if rng.random() < 0.04:
        return {"cross": "plus sign", "diamond": "rhombus", "circle": "disc"}.get(shape, shape)
    return shape


def hue(rng: random.Random, colour: str) -> str:
    """The colour, in one of its spellings."""
    return "grey" if colour == "gray" and rng.random() < 0.5 else colour


def is_only(scene: Scene, *, colour: str | None = None, shape: str | None = None) -> bool:
    """Whether just one thing has this colour and shape; None: any."""
    return (
        sum(
            (colour is None or thing.colour == colour) and (shape is None or thing.shape == shape)
            for thing in scene.things
        )
        == 1
    )
