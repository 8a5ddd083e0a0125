"""The second drawing program draws what it says it draws: checked on pixels, by methods of the tests' own."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from training.sample import CATEGORIES, COLOURS, NOTHING, PLACES, SHAPES, Sample, Turn, is_right
from training.second_program import draw, generator
from training.second_program.charts import bar_boxes, draw_chart, paint_chart
from training.second_program.conversations import draw_placed_scene
from training.second_program.lettering import draw_read, paint_print, set_text
from training.second_program.pairs import draw_compare
from training.second_program.palette import draw_shade
from training.second_program.picture import Scene, paint_scene
from training.second_program.scenes import draw_colour, draw_count, draw_place, draw_shape
from training.second_program.shapes import contains, lookalikes
from training.second_program.words import draw_text

NUM_SEEDS = 200

# One well-known shade or two of each name, from the colour keywords of CSS.
KEYWORD_COLOURS = {
    "red": [(220, 20, 60), (255, 0, 0), (178, 34, 34)],
    "orange": [(255, 165, 0), (255, 140, 0)],
    "yellow": [(255, 255, 0), (255, 215, 0)],
    "green": [(0, 128, 0), (34, 139, 34), (50, 205, 50)],
    "blue": [(0, 0, 255), (65, 105, 225), (30, 144, 255)],
    "purple": [(128, 0, 128), (138, 43, 226), (153, 50, 204)],
    "pink": [(255, 192, 203), (255, 105, 180)],
    "brown": [(139, 69, 19), (92, 51, 20)],
    "black": [(0, 0, 0)],
    "white": [(255, 255, 255)],
    "gray": [(128, 128, 128)],
}


def nearest_name(pixel: npt.ArrayLike) -> str:
    """By plain distance of RGB."""

    def distance(name: str) -> float:
        return min(float(np.linalg.norm(np.subtract(pixel, rgb))) for rgb in KEYWORD_COLOURS[name])

    return min(COLOURS, key=distance)


def count_islands(mask: npt.NDArray[np.bool_]) -> int:
    """Connected regions of set pixels (8 neighbours), by flooding one after the other."""
    left = {(int(row), int(column)) for row, column in np.argwhere(mask)}
    count = 0
    while left:
        count += 1
        frontier = [left.pop()]
        while frontier:
            row, column = frontier.pop()
            for near in [(row + i, column + j) for i in (-1, 0, 1) for j in (-1, 0, 1)]:
                if near in left:
                    left.remove(near)
                    frontier.append(near)
    return count


def pixels_of(sample: Sample) -> list[bytes]:
    return [image.tobytes() for image in sample.images]


def median_pixel(picture: npt.NDArray[np.uint8], labels: npt.NDArray[np.uint8], index: int) -> list[float]:
    """The median colour of a figure's pixels: rims and blended edges are the smaller part of every figure."""
    return [float(np.median(channel)) for channel in picture[labels == index].T]


@pytest.mark.parametrize("category", CATEGORIES)
def test_every_seed_draws_a_sound_sample(category: str) -> None:
    for seed in range(NUM_SEEDS):
        sample = draw(seed, category)
        assert len(sample.images) == (2 if category == "compare" else 1)
        assert len(sample.turns) == (2 if category == "second_turn" else 1)
        for image in sample.images:
            assert image.mode == "RGB"
            assert 112 <= min(image.size) <= max(image.size) <= 448
            assert max(image.size) <= 3 * min(image.size)
        for turn in sample.turns:
            assert turn.category == category
            assert turn.answer is not None
            assert is_right(turn.answer, turn.expected), (seed, turn)
            assert "{" not in turn.question
            assert len(turn.question) > 8
        assert sample.turns[0] != sample.turns[-1] or len(sample.turns) == 1


@pytest.mark.parametrize("category", CATEGORIES)
def test_same_seed_draws_the_same_and_another_seed_another(category: str) -> None:
    for seed in range(5):
        one, again, other = draw(seed, category), draw(seed, category), draw(seed + 1000, category)
        assert one.turns == again.turns
        assert pixels_of(one) == pixels_of(again)
        assert pixels_of(one) != pixels_of(other)


def test_unknown_category_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'sculpture' is no category"):
        draw(0, "sculpture")


@pytest.mark.parametrize(
    ("category", "words"),
    [
        ("colour", set(COLOURS)),
        ("shape", set(SHAPES)),
        ("place", set(PLACES)),
        ("count", {str(count) for count in range(10)}),
        ("nothing", {NOTHING}),
        ("compare", {"yes", "no", "first", "second"}),
    ],
)
def test_expected_words_are_canonical_and_all_of_them_occur(category: str, words: set[str]) -> None:
    drawers: dict[str, Callable[[np.random.Generator], tuple[object, Turn]]] = {
        "colour": draw_colour,
        "shape": draw_shape,
        "place": draw_place,
        "count": draw_count,
        "compare": draw_compare,
    }
    seen: set[str] = set()
    for seed in range(NUM_SEEDS if category != "nothing" else 5):
        if category in drawers:
            turn = drawers[category](generator(seed, category))[1]
        else:
            turn = draw(seed, category).turns[0]
        seen.update(turn.expected)
    assert seen == words


def test_shades_bear_the_name_that_a_plain_check_gives_them() -> None:
    rng = np.random.default_rng(1)
    for name in COLOURS:
        for _ in range(200):
            shade = draw_shade(rng, name)
            assert nearest_name(shade) == name, (name, shade)


def test_pixels_of_a_figure_have_the_colour_that_is_asked() -> None:
    for seed in range(60):
        scene, turn = draw_colour(generator(seed, "colour"))
        image, labels = paint_scene(scene)
        assert nearest_name(median_pixel(np.asarray(image), labels, 1)) == turn.expected[0]


def test_figures_differ_from_what_is_behind_them() -> None:
    for seed in range(40):
        scene, _ = draw_count(generator(seed, "count"))
        image, labels = paint_scene(scene)
        picture = np.asarray(image)
        for index in range(1, len(scene.figures) + 1):
            figure_pixel = median_pixel(picture, labels, index)
            ground_pixel = median_pixel(picture, labels, 0)
            assert np.abs(np.subtract(figure_pixel, ground_pixel)).max() > 30


def things_in(scene: Scene, turn_question: str) -> int:
    """Islands of the figures that the question means, counted on a mask of their pixels."""
    _, labels = paint_scene(scene)
    words = turn_question.lower().replace("crosses", "cross").replace("?", " ").replace(".", " ").split()
    names = {word.removesuffix("s") if word.removesuffix("s") in SHAPES else word for word in words}
    shapes, colours = names & set(SHAPES), names & set(COLOURS)
    meant = [
        index
        for index, figure in enumerate(scene.figures, start=1)
        if (not shapes or figure.shape in shapes) and (not colours or figure.colour in colours)
    ]
    return count_islands(np.isin(labels, meant)) if meant else 0


def test_counts_equal_the_islands_of_pixels() -> None:
    for seed in range(50):
        scene, turn = draw_count(generator(seed, "count"))
        assert str(things_in(scene, turn.question)) == turn.expected[0], (seed, turn)


def test_the_picture_with_more_shapes_has_more_islands() -> None:
    checked = 0
    for seed in range(40):
        scenes, turn = draw_compare(generator(seed, "compare"))
        if "more" in turn.question.lower():
            counts = [count_islands(paint_scene(scene)[1] > 0) for scene in scenes]
            assert turn.expected == (("first",) if counts[0] > counts[1] else ("second",))
            assert counts[0] != counts[1]
            checked += 1
    assert checked > 3


def test_pairs_bear_out_their_answers() -> None:
    for seed in range(NUM_SEEDS):
        scenes, turn = draw_compare(generator(seed, "compare"))
        question = turn.question.lower()
        shapes = [{figure.shape for figure in scene.figures} for scene in scenes]
        if "colour" in question or "color" in question:
            colours = {figure.colour for scene in scenes for figure in scene.figures}
            assert turn.expected == ("yes" if len(colours) == 1 else "no",)
        elif "more" not in question:
            asked = next(shape for shape in SHAPES if shape in question)
            has = [asked in names for names in shapes]
            is_choice = turn.expected[0] in ("first", "second")
            assert turn.expected == (
                ("first" if has[0] else "second",) if is_choice else ("yes" if all(has) else "no",)
            )
            assert sum(has) == 1 or not is_choice
            # What resembles the asked shape would make the answer a matter of opinion.
            assert not any((lookalikes(asked) - {asked}) & names for names in shapes)


@pytest.mark.parametrize("drawer", [draw_colour, draw_shape, draw_place], ids=lambda drawer: drawer.__name__)
def test_asked_figure_is_the_only_one_of_its_kind(
    drawer: Callable[[np.random.Generator], tuple[Scene, Turn]],
) -> None:
    for seed in range(NUM_SEEDS):
        scene, turn = drawer(generator(seed, "any"))
        asked = scene.figures[0]
        if drawer is draw_shape:
            assert [figure.colour for figure in scene.figures].count(asked.colour) == 1
            assert turn.expected == (asked.shape,)
        for other in scene.figures[1:]:
            assert other.shape not in lookalikes(asked.shape)


def place_of(labels: npt.NDArray[np.uint8], index: int) -> str:
    """The ninth of the picture that holds every pixel of the figure."""
    rows, columns = np.nonzero(labels == index)
    row_third, column_third = labels.shape[0] / 3, labels.shape[1] / 3
    row, column = int(rows.mean() // row_third), int(columns.mean() // column_third)
    assert row * row_third - 1 <= rows.min() <= rows.max() <= (row + 1) * row_third + 1
    assert column * column_third - 1 <= columns.min() <= columns.max() <= (column + 1) * column_third + 1
    return PLACES[3 * row + column]


def test_figures_lie_wholly_in_the_place_that_is_asked() -> None:
    for seed in range(60):
        scene, turn = draw_place(generator(seed, "place"))
        assert place_of(paint_scene(scene)[1], 1) == turn.expected[0]
        placed, places = draw_placed_scene(generator(seed, "placed"))
        labels = paint_scene(placed)[1]
        assert [place_of(labels, i + 1) for i in range(len(places))] == list(places)


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_fit_the_unit_circle_and_nearly_fill_it(shape: str) -> None:
    axis = np.linspace(-1.5, 1.5, 301, dtype=np.float32)
    u, v = np.meshgrid(axis, axis)
    for proportion in (0.0, 0.5, 1.0):
        inside = contains(shape, proportion, u, v)
        reach = np.hypot(u, v)[inside].max()
        assert 0.93 <= reach <= 1.02
        assert count_islands(inside) == 1


def test_unknown_shape_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'blob' is no shape"):
        contains("blob", 0.5, np.zeros(1, dtype=np.float32), np.zeros(1, dtype=np.float32))


def test_bars_are_as_tall_on_the_picture_as_their_values_say() -> None:
    for seed in range(60):
        chart, turn = draw_chart(generator(seed, "chart"))
        picture = np.asarray(paint_chart(chart)).astype(int)
        heights = []
        for (left, top, width, height), fill in zip(bar_boxes(chart), chart.fills, strict=True):
            column = picture[:, left + width // 2]
            heights.append(int((np.abs(column - fill).max(axis=1) <= 1).sum()))
            assert abs(heights[-1] - height) <= 2, (seed, top)
        order = np.argsort(chart.values)
        assert heights[order[-1]] == max(heights)
        assert heights[order[0]] == min(heights)
        question = turn.question.lower()
        if "many bars" in question or "number of bars" in question or "count" in question:
            assert turn.expected == (str(len(heights)),)
        elif any(word in question for word in ("tallest", "highest", "most", "biggest")):
            assert turn.expected == (chart.labels[order[-1]].lower(),)
        elif any(word in question for word in ("shortest", "lowest", "smallest")):
            assert turn.expected == (chart.labels[order[0]].lower(),)
        else:
            assert chart.shows_values
            words = question.rstrip("?.").split()
            label = next(name for name in chart.labels if name.lower() in words)
            assert turn.expected == (str(chart.values[chart.labels.index(label)]),)


def test_letters_are_large_enough_whole_and_in_contrast() -> None:
    for seed in range(60):
        printed, turn = draw_read(generator(seed, "read"))
        assert printed.font_px >= 20
        assert 1 <= len(printed.text) <= 8
        assert turn.expected == (printed.text.lower(),)
        letters = set_text(printed.text, printed.font_px, weight=printed.weight, tilt=printed.tilt)
        height, width = letters.shape
        left, top = int(printed.x - width / 2), int(printed.y - height / 2)
        assert 0 <= left <= printed.width - width
        assert 0 <= top <= printed.height - height
        part = np.asarray(paint_print(printed)).astype(int)[top : top + height, left : left + width]
        inked, bare = part[letters > 0.9], part[letters == 0]
        assert np.abs(np.median(inked, axis=0) - printed.ink).max() <= 20
        assert np.abs(np.median(inked, axis=0) - np.median(bare, axis=0)).max() > 30


def test_texts_are_words_numbers_and_strings_that_answer_no_other_question() -> None:
    rng = np.random.default_rng(2)
    texts = [draw_text(rng) for _ in range(2000)]
    assert all(1 <= len(text) <= 8 and text.isascii() and text.isalnum() for text in texts)
    assert any(text.isupper() for text in texts)
    assert any(text.islower() for text in texts)
    assert 0.2 < np.mean([text.isdecimal() for text in texts]) < 0.35
    taken = {*COLOURS, *SHAPES, *PLACES, "yes", "no", "first", "second", NOTHING}
    assert not taken & {text.lower() for text in texts}
