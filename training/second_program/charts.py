"""Bar charts: two to six upright bars from zero, each with its label below and perhaps its value above.

Knows what keeps a chart easy: whole values, all different, the tallest and the shortest clearly so.
"""

from dataclasses import dataclass

import numpy as np
from PIL import Image

from training.sample import COLOURS, Turn
from training.second_program.ground import MAX_SIDE, Ground, Pixels, draw_ground_for, paint_ground
from training.second_program.lettering import set_text
from training.second_program.palette import RGB, draw_shade, stands_out, to_lab
from training.second_program.picture import blend, to_image
from training.second_program.questions import pick

# Letters that are words by themselves ("a", "i") would be found in answers that do not name them.
_LABEL_SETS = (
    tuple("BCDEFG"),
    tuple("KLMNPQ"),
    tuple("UVWXYZ"),
    tuple("PQRSTU"),
    ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat"),
    ("Jan", "Feb", "Mar", "Apr", "May", "Jun"),
    ("tea", "milk", "rice", "egg", "fish", "corn"),
    ("cat", "dog", "cow", "hen", "fox", "bee"),
)
_FONT_PX = 20
# Pixels: letters with room around them.
_TEXT_BAND = 30
_DARK, _LIGHT = (20, 20, 25), (240, 240, 235)


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Bars from left to right; `slot` and `bar_width` are pixels."""

    width: int
    height: int
    ground: Ground
    labels: tuple[str, ...]
    values: tuple[int, ...]
    fills: tuple[RGB, ...]
    bar_width: int
    shows_values: bool
    shows_lines: bool

    @property
    def ink(self) -> RGB:
        """The colour of axis and letters: the one of dark and light that is farther from the ground."""
        return _DARK if to_lab(self.ground.ends[0])[0] > 50 else _LIGHT


def _draw_values(rng: np.random.Generator, num_bars: int) -> tuple[int, ...]:
    """Different whole numbers; the ends keep at least an eighth of the tallest from their neighbours."""
    top = int(rng.choice([9, 9, 20, 60]))
    while True:
        values = rng.choice(np.arange(1, top + 1), size=num_bars, replace=False)
        order = np.sort(values)
        gap = max(order[-1] / 8, 1)
        if order[-1] - order[-2] >= gap and order[1] - order[0] >= gap:
            return tuple(int(value) for value in values)


def draw_chart_picture(rng: np.random.Generator, *, shows_values: bool) -> Chart:
    """A chart whose every label and bar can be told from its neighbours."""
    num_bars = int(rng.integers(2, 7))
    labels = _LABEL_SETS[rng.integers(len(_LABEL_SETS))]
    start = int(rng.integers(0, 6 - num_bars + 1))
    is_word = len(labels[0]) > 1
    if is_word and rng.random() < 0.5:
        labels = tuple(labels[i] for i in rng.permutation(6))
    slot_min = 56 if is_word else 36
    width = int(rng.integers(min(MAX_SIDE, max(160, num_bars * slot_min + 24)), MAX_SIDE + 1))
    height = int(rng.integers(max(180, width * 2 // 5), min(MAX_SIDE, width * 2) + 1))
    while True:
        num_fills = 1 if rng.random() < 0.5 else num_bars
        fills = tuple(draw_shade(rng, COLOURS[i]) for i in rng.permutation(len(COLOURS))[:num_fills])
        ground = draw_ground_for(rng, fills)
        ink_fits = ground is not None and (stands_out(_DARK, ground.ends) or stands_out(_LIGHT, ground.ends))
        if ground is None or not ink_fits:
            continue
        chart = Chart(
            width=width,
            height=height,
            ground=ground,
            labels=labels[start : start + num_bars],
            values=_draw_values(rng, num_bars),
            fills=fills * num_bars if num_fills == 1 else fills,
            bar_width=int((width - 24) / num_bars * rng.uniform(0.45, 0.8)),
            shows_values=shows_values,
            shows_lines=bool(rng.random() < 0.3),
        )
        if stands_out(chart.ink, ground.ends):
            return chart


def bar_boxes(chart: Chart) -> list[tuple[int, int, int, int]]:
    """Left, top, width and height of each bar in pixels.

    Heights are proportional to values, to half a pixel.
    """
    base, slot = chart.height - _TEXT_BAND - 4, (chart.width - 24) / len(chart.values)
    room = base - (_TEXT_BAND if chart.shows_values else 12)
    boxes = []
    for i, value in enumerate(chart.values):
        bar_height = max(2, round(room * value / max(chart.values)))
        boxes.append(
            (
                round(12 + slot * (i + 0.5) - chart.bar_width / 2),
                base - bar_height,
                chart.bar_width,
                bar_height,
            )
        )
    return boxes


def paint_chart(chart: Chart) -> Image.Image:
    """The picture, RGB."""
    pixels = paint_ground(chart.ground, chart.width, chart.height)
    base = chart.height - _TEXT_BAND - 4
    line = np.ones((1, chart.width - 16), dtype=np.float32)
    if chart.shows_lines:
        for y in range(base - 30, 10, -30):
            blend(pixels, line * np.float32(0.2), chart.ink, 8, y)
    for box, fill, label, value in zip(bar_boxes(chart), chart.fills, chart.labels, chart.values, strict=True):
        left, top, width, height = box
        blend(pixels, np.ones((height, width), dtype=np.float32), fill, left, top)
        _put_text(pixels, label, chart.ink, left + width / 2, base + 4, hangs=True)
        if chart.shows_values:
            _put_text(pixels, str(value), chart.ink, left + width / 2, top - 5, hangs=False)
    blend(pixels, np.repeat(line, 2, axis=0), chart.ink, 8, base)
    return to_image(pixels)


def _put_text(pixels: Pixels, text: str, ink: RGB, middle: float, y: float, *, hangs: bool) -> None:
    letters = set_text(text, _FONT_PX, weight=1)
    height, width = letters.shape
    top = int(y) + 3 if hangs else int(y) - height
    left = min(max(0, round(middle - width / 2)), pixels.shape[1] - width)
    blend(pixels, letters, ink, left, top)


def ask_tallest(rng: np.random.Generator, category: str, chart: Chart) -> Turn:
    """The label of the tallest bar."""
    phrasings = (
        "Which bar is the tallest?",
        "Which label has the highest bar?",
        "What is the label of the tallest bar?",
        "Which bar goes up the most?",
        "Name the biggest bar in the chart.",
    )
    label = chart.labels[chart.values.index(max(chart.values))]
    answer = f"The tallest bar is {label}."
    return Turn(question=pick(rng, phrasings), answer=answer, expected=(label.lower(),), category=category)


def ask_shortest(rng: np.random.Generator, category: str, chart: Chart) -> Turn:
    """The label of the shortest bar."""
    phrasings = (
        "Which bar is the shortest?",
        "Which label has the lowest bar?",
        "What is the label of the shortest bar?",
        "Name the smallest bar in the chart.",
    )
    label = chart.labels[chart.values.index(min(chart.values))]
    answer = f"The shortest bar is {label}."
    return Turn(question=pick(rng, phrasings), answer=answer, expected=(label.lower(),), category=category)


def ask_value(rng: np.random.Generator, category: str, chart: Chart) -> Turn:
    """The value of one bar; the chart must print values."""
    assert chart.shows_values
    phrasings = (
        "What is the value of {label}?",
        "What value does the bar {label} have?",
        "How much is {label} in this chart?",
        "What number belongs to {label}?",
        "Give me the value of the bar labelled {label}.",
    )
    i = int(rng.integers(len(chart.values)))
    label, value = chart.labels[i], chart.values[i]
    question = pick(rng, phrasings, label=label)
    answer = f"The value of {label} is {value}."
    return Turn(question=question, answer=answer, expected=(str(value),), category=category)


def ask_num_bars(rng: np.random.Generator, category: str, chart: Chart) -> Turn:
    """How many bars there are."""
    phrasings = (
        "How many bars are there?",
        "How many bars does the chart have?",
        "Count the bars.",
        "What is the number of bars in this chart?",
    )
    count = len(chart.values)
    answer = f"The chart has {count} bars."
    return Turn(question=pick(rng, phrasings), answer=answer, expected=(str(count),), category=category)


CHART_QUESTIONS = (ask_tallest, ask_shortest, ask_value, ask_num_bars)


def draw_chart(rng: np.random.Generator) -> tuple[Chart, Turn]:
    """A chart and one of four questions about it."""
    ask = CHART_QUESTIONS[rng.integers(len(CHART_QUESTIONS))]
    chart = draw_chart_picture(rng, shows_values=ask is ask_value or bool(rng.random() < 0.5))
    return chart, ask(rng, "chart", chart)
