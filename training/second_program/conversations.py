"""Two turns about the same picture: the category `second_turn`.

Knows which questions follow one another; the second may lean on the first ("and what colour is it?").
"""

from dataclasses import replace

import numpy as np
from PIL import Image

from training.sample import COLOURS, PLACES, SHAPES, Turn
from training.second_program.charts import CHART_QUESTIONS, draw_chart_picture, paint_chart
from training.second_program.picture import Scene, paint_scene
from training.second_program.questions import ask_colour, ask_count, ask_place, ask_shape, pick
from training.second_program.scenes import choose, other_colours, other_shapes, place_figures, retry

_CATEGORY = "second_turn"


def draw_placed_scene(rng: np.random.Generator) -> tuple[Scene, tuple[str, ...]]:
    """One to three figures that differ in shape, colour and place, with their places in the same order."""
    num_figures = int(rng.integers(1, 4))
    shape, colour = choose(rng, SHAPES), choose(rng, COLOURS)
    places = [PLACES[i] for i in rng.permutation(len(PLACES))[:num_figures]]

    def attempt() -> Scene | None:
        shapes = [shape, *other_shapes(rng, shape, num_figures - 1)]
        colours = [colour, *other_colours(rng, colour, num_figures - 1)]
        return place_figures(rng, list(zip(shapes, colours, strict=True)), places)

    return retry(attempt), tuple(places)


def _about_one(rng: np.random.Generator, scene: Scene, places: tuple[str, ...]) -> list[Turn]:
    """Both turns ask about one figure; the second may call it "it"."""
    i = int(rng.integers(len(scene.figures)))
    shape, colour, is_alone = scene.figures[i].shape, scene.figures[i].colour, len(scene.figures) == 1
    turn_colour = ask_colour(rng, _CATEGORY, shape=shape, colour=colour, is_alone=is_alone)
    turn_shape = ask_shape(rng, _CATEGORY, shape=shape, colour=colour, is_alone=is_alone)
    turn_place = ask_place(rng, _CATEGORY, shape=shape, place=places[i], is_alone=is_alone)
    its_colour = (
        "And what colour is it?",
        "What colour is it?",
        "And its colour?",
        "Which colour does it have?",
    )
    its_place = (
        "And where is it?",
        "Where is it?",
        "Where in the picture is it?",
        "In which part of the image is it?",
    )
    if rng.random() < 0.4:
        # A second question that stands on its own.
        follow_ups = {"colour": turn_colour, "place": turn_place}
    else:
        follow_ups = {
            "colour": replace(turn_colour, question=pick(rng, its_colour)),
            "place": replace(turn_place, question=pick(rng, its_place)),
        }
    match rng.choice(["shape, place", "colour, place", "place, colour"]):
        case "shape, place":
            return [turn_shape, follow_ups["place"]]
        case "colour, place":
            return [turn_colour, follow_ups["place"]]
        case _:
            return [turn_place, follow_ups["colour"]]


def _about_all(rng: np.random.Generator, scene: Scene) -> list[Turn]:
    """First how many there are, then the shape or colour of one, or the other way round."""
    figure, is_alone = scene.figures[rng.integers(len(scene.figures))], len(scene.figures) == 1
    count = ask_count(rng, _CATEGORY, things="shapes", count=len(scene.figures))
    ask = ask_shape if rng.random() < 0.5 else ask_colour
    turns = [count, ask(rng, _CATEGORY, shape=figure.shape, colour=figure.colour, is_alone=is_alone)]
    return turns if rng.random() < 0.5 else turns[::-1]


def draw_conversation(rng: np.random.Generator) -> tuple[Image.Image, list[Turn]]:
    """A picture of figures or a chart, and two different questions about it."""
    if rng.random() < 0.25:
        chart = draw_chart_picture(rng, shows_values=True)
        chosen = rng.permutation(len(CHART_QUESTIONS))[:2]
        return paint_chart(chart), [CHART_QUESTIONS[i](rng, _CATEGORY, chart) for i in chosen]
    scene, places = draw_placed_scene(rng)
    turns = _about_one(rng, scene, places) if rng.random() < 0.65 else _about_all(rng, scene)
    return paint_scene(scene)[0], turns
