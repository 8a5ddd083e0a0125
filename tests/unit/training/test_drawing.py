"""The drawing program: repeatable, within its sizes, and its own answers count as right."""

import random

import pytest

from training.chart_talk import talk_chart
from training.charts import draw_chart
from training.drawing import draw, draw_sized
from training.sample import CATEGORIES, is_right
from training.scenes import place_of


@pytest.mark.parametrize("category", CATEGORIES)
def test_the_same_seed_draws_the_same_sample(category: str) -> None:
    one, other = draw(7, category), draw(7, category)
    assert one.turns == other.turns
    assert [image.tobytes() for image in one.images] == [image.tobytes() for image in other.images]


@pytest.mark.parametrize("category", CATEGORIES)
def test_every_answer_is_right_by_its_own_keywords(category: str) -> None:
    categories = set()
    for seed in range(40):
        sample = draw(seed, category)
        assert len(sample.images) == (2 if category == "compare" else 1)
        for image in sample.images:
            assert image.mode == "RGB"
            assert min(image.size) >= 112
            assert max(image.size) <= 448
        for turn in sample.turns:
            assert turn.answer is not None
            assert is_right(turn.answer, turn.expected), turn
            assert "[" not in turn.question
            assert "{" not in turn.question
            categories.add(turn.category)
    assert category in categories


def test_an_unknown_category_is_refused() -> None:
    with pytest.raises(ValueError, match="category is 'sound'"):
        draw(1, "sound")


def test_a_conversation_may_lack_a_picture() -> None:
    sample = draw_sized(random.Random(1), "general", ((112, 112), (112, 112)), 2)
    assert sample.images == []
    assert len(sample.turns) == 2


def test_a_chart_asks_only_what_it_shows() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        chart = draw_chart(rng, (240, 200))
        for turn in talk_chart(rng, chart, 4):
            if turn.answer is not None and turn.answer.startswith("Its value"):
                assert chart.has_values


@pytest.mark.parametrize(
    ("center", "place"),
    [
        ((10, 10), "top left"),
        ((60, 40), "center"),
        ((110, 60), "bottom right"),
        ((40, 40), None),
        ((60, 5), "top"),
    ],
)
def test_places_are_ninths_with_nothing_near_their_borders(center: tuple[float, float], place: str | None) -> None:
    assert place_of(center, (120, 80)) == place
