"""The second drawing program: draws samples to evaluate the demo model on, never to train it.

Written independently of the program that draws the training pictures: it shares with it the vocabulary and
scoring of `training.sample` and nothing else. Draws with NumPy (regions tested at nine points a pixel)
and Pillow's own font.
"""

import zlib

import numpy as np

from training.sample import CATEGORIES, Sample
from training.second_program.blanks import draw_blank
from training.second_program.charts import draw_chart, paint_chart
from training.second_program.conversations import draw_conversation
from training.second_program.lettering import draw_read, paint_print
from training.second_program.pairs import draw_compare
from training.second_program.picture import paint_scene
from training.second_program.questions import ask_nothing
from training.second_program.scenes import draw_colour, draw_count, draw_place, draw_shape

__all__ = ["CATEGORIES", "draw", "generator"]

_SCENE_DRAWERS = {"colour": draw_colour, "shape": draw_shape, "place": draw_place, "count": draw_count}


def generator(seed: int, category: str) -> np.random.Generator:
    """The source of all chance in one sample: streams of different seeds or categories are independent."""
    return np.random.default_rng([seed, zlib.crc32(category.encode())])


def draw(seed: int, category: str) -> Sample:
    """The sample of that seed (>= 0) and category, always the same.

    Pictures are RGB, 112..448 pixels a side, at most three times as long as wide. An unknown category is a
    `ValueError`.
    """
    rng = generator(seed, category)
    match category:
        case "colour" | "shape" | "place" | "count":
            scene, turn = _SCENE_DRAWERS[category](rng)
            return Sample(images=[paint_scene(scene)[0]], turns=[turn])
        case "compare":
            scenes, turn = draw_compare(rng)
            return Sample(images=[paint_scene(scene)[0] for scene in scenes], turns=[turn])
        case "read":
            printed, turn = draw_read(rng)
            return Sample(images=[paint_print(printed)], turns=[turn])
        case "chart":
            chart, turn = draw_chart(rng)
            return Sample(images=[paint_chart(chart)], turns=[turn])
        case "second_turn":
            image, turns = draw_conversation(rng)
            return Sample(images=[image], turns=turns)
        case "nothing":
            return Sample(images=[draw_blank(rng)], turns=[ask_nothing(rng, category)])
    raise ValueError(f"{category!r} is no category; the second program draws {', '.join(CATEGORIES)}")
