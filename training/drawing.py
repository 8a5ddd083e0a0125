"""The drawing program that the demo model is trained on: `draw(seed, category)` gives pictures and a
conversation.

Knows which module draws what; knows nothing of tokens or tensors.
"""

from __future__ import annotations

import random

from training.backgrounds import Size, nothing
from training.chart_talk import talk_chart
from training.charts import SMALLEST, draw_chart
from training.dialogue import article, ask, count_turn
from training.pairs import draw_pair
from training.prints import draw_print, talk_print
from training.sample import CATEGORIES, COLOURS, SHAPES, Sample, Turn
from training.scene_talk import talk
from training.scenes import counted, single, varied
from training.smalltalk import small_talk, unseen

SHORTEST_SIDE, LONGEST_SIDE = 112, 448
_NOTHING = "I see nothing that I know in this picture."


def draw(seed: int, category: str) -> Sample:
    """A conversation of one to three turns, the first of `category`, about one picture (two for "compare").

    Raises:
        ValueError: when the category is none of `sample.CATEGORIES`.
    """
    if category not in CATEGORIES:
        raise ValueError(f"category is {category!r}; it must be one of {', '.join(CATEGORIES)}")
    rng = random.Random(f"{category} {seed}")
    sizes = (_any_size(rng), _any_size(rng))
    if category == "second_turn":
        while True:
            sample = draw_sized(rng, rng.choice(("colour", "shape", "place", "count")), sizes, 3)
            if any(turn.category == "second_turn" for turn in sample.turns):
                return sample
    return draw_sized(rng, category, sizes, rng.randint(1, 3))


def draw_sized(rng: random.Random, category: str, sizes: tuple[Size, Size], turns: int) -> Sample:
    """A conversation of up to `turns` turns about pictures of the given (width, height); `sizes[1]` is for
    pairs.

    Besides `sample.CATEGORIES`, "general" gives a conversation without a picture.
    """
    size = sizes[0]
    if category == "compare":
        return draw_pair(rng, sizes, turns)
    if category == "general":
        makers = (small_talk, small_talk, unseen, unseen)
        return Sample(images=[], turns=[rng.choice(makers)(rng) for _ in range(turns)])
    if category == "chart":
        if min(size) < SMALLEST:
            size = (max(size[0], SMALLEST), max(size[1], SMALLEST))
        chart = draw_chart(rng, size)
        return Sample(images=[chart.image], turns=_with_thanks(rng, talk_chart(rng, chart, turns)), marks=[chart.marks])
    if category == "read":
        sheet = draw_print(rng, size)
        return Sample(images=[sheet.image], turns=_with_thanks(rng, talk_print(rng, sheet, turns)))
    if category == "nothing":
        image = nothing(rng, size)
        return Sample(images=[image], turns=[_about_nothing(rng, index) for index in range(turns)], marks=[()])
    if category == "count":
        scene, things, number = counted(rng, size)
        first = count_turn(rng, things, number)
        later = talk(rng, scene, rng.choice(("count", "colour", "shape")), turns - 1) if scene.things else []
        return Sample(images=[scene.image], turns=[first, *later], marks=[scene.marks])
    kind = rng.random()
    if category == "place":
        scene = single(rng, size, is_placed=True) if kind < 0.6 else varied(rng, size)
    else:
        scene = single(rng, size) if kind < 0.5 else varied(rng, size)
    turns_said = talk(rng, scene, category, turns)
    if rng.random() < 0.04:
        turns_said[-1] = _no_text(rng)
    return Sample(images=[scene.image], turns=_with_thanks(rng, turns_said), marks=[scene.marks])


def _any_size(rng: random.Random) -> Size:
    width = rng.randint(SHORTEST_SIDE, LONGEST_SIDE)
    if rng.random() < 0.35:
        return width, width
    return width, rng.randint(SHORTEST_SIDE, LONGEST_SIDE)


def _with_thanks(rng: random.Random, turns: list[Turn]) -> list[Turn]:
    if rng.random() < 0.03:
        turns.insert(rng.randint(1, len(turns)), small_talk(rng))
    return turns


def _no_text(rng: random.Random) -> Turn:
    return Turn(
        question=ask(rng, "read"),
        answer="I see no text in this picture.",
        expected=("nothing",),
        category="nothing",
    )


def _about_nothing(rng: random.Random, index: int) -> Turn:
    kind = rng.random()
    shape, colour = rng.choice(SHAPES), rng.choice(COLOURS)
    if index and kind < 0.3:
        return count_turn(rng, rng.choice(("shapes", "objects", f"{shape}s".replace("ss", "sses"))), 0)
    if index and kind < 0.45:
        turn = Turn(
            question=ask(rng, "exists", a_thing=article(shape)),
            answer=f"No, there is not {article(shape)}.",
            expected=("no",),
            category="shape",
        )
        return turn
    if kind < 0.55:
        question = ask(rng, "describe")
    elif kind < 0.7:
        question = ask(rng, "only_shape")
    elif kind < 0.78:
        question = ask(rng, "only_colour")
    elif kind < 0.86:
        question = ask(rng, "read")
    elif kind < 0.93:
        question = ask(rng, "colour", ref=rng.choice(("the shape", "the object", f"the {shape}")))
    else:
        question = ask(rng, "place", ref=rng.choice(("the shape", f"the {shape}", f"the {colour} shape")))
    return Turn(question=question, answer=_NOTHING, expected=("nothing",), category="nothing")
