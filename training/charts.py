"""Simple bar charts. Knows nothing of conversations about them."""

from __future__ import annotations

import random
from dataclasses import dataclass

from PIL import Image, ImageDraw

from training.backgrounds import Size, background, finished
from training.lettering import any_text, cased, typeface
from training.palette import Rgb, any_colour, contrasting, distance, scaled, shade
from training.sample import COLOURS, Mark
from training.vocabulary import BAR_NAMES, WORDS

SMALLEST = 140  # pixels a side, under which bars and their names do not fit
SMALLEST_TEXT = 20  # font size in pixels of names and figures


@dataclass(frozen=True, kw_only=True)
class Bar:
    label: str | None
    colour: str
    value: int


@dataclass(frozen=True, kw_only=True)
class Chart:
    image: Image.Image
    bars: tuple[Bar, ...]
    is_upright: bool
    has_values: bool  # printed, or to be read from the axis
    has_colours: bool  # every bar has a colour of its own
    marks: tuple[Mark, ...]  # at every bar, its name and its printed value


def draw_chart(rng: random.Random, size: Size) -> Chart:
    """A chart of two to six bars at `size` (width, height), each side at least `SMALLEST`."""
    width, height = size
    is_upright = rng.random() < 0.75
    span = width if is_upright else height
    number = min(rng.choice((2, 3, 3, 4, 4, 5, 5, 6)), max(2, span // 38))
    has_colours = rng.random() < 0.5
    has_labels = rng.random() < (0.8 if has_colours else 1.0)
    labels, font_size = _labels(rng, number, span, size, is_upright) if has_labels else ([None] * number, SMALLEST_TEXT)
    kind = rng.random()
    has_printed = kind < 0.7 or kind > 0.9
    has_ticks = 0.6 < kind < 0.94
    step, values, top = _values(rng, number, is_on_ticks=not has_printed)
    names = rng.sample(COLOURS, number) if has_colours else [rng.choice(COLOURS)] * number

    if rng.random() < 0.7:
        paper: Rgb = (255, 255, 255) if rng.random() < 0.6 else scaled((255, 250, 245), rng.uniform(0.9, 1))
        if rng.random() < 0.15:
            paper = scaled((60, 65, 75), rng.uniform(0.3, 1))
        image, papers = Image.new("RGB", size, paper), [paper]
    else:
        image, papers = background(rng, size)
    ink: Rgb = (0, 0, 0) if distance((0, 0, 0), papers[0]) > 330 else (255, 255, 255)
    if rng.random() < 0.3:
        ink = next(
            (colour for colour in (any_colour(rng) for _ in range(20)) if distance(colour, papers[0]) > 300),
            ink,
        )
    tones = {name: contrasting(rng, name, papers) for name in names}
    names = [name if tones[name] is not None else "" for name in names]
    spare = [name for name in COLOURS if name not in names]
    rng.shuffle(spare)
    for index, name in enumerate(names):
        if not name:
            fitting = next((other for other in spare if contrasting(rng, other, papers)), "green")
            names[index] = fitting
            if has_colours and fitting in spare:
                spare.remove(fitting)
            tones[fitting] = contrasting(rng, fitting, papers) or shade(rng, fitting)
    if not has_colours:
        names = [names[0]] * number
    bars = tuple(
        Bar(label=label, colour=name, value=value) for label, name, value in zip(labels, names, values, strict=True)
    )
    spots = _paint(rng, image, bars, tones, ink, font_size, step, top, is_upright, has_printed, has_ticks)
    return Chart(
        image=finished(rng, image),
        bars=bars,
        is_upright=is_upright,
        has_values=has_printed or has_ticks,
        has_colours=has_colours,
        marks=tuple(
            Mark(
                center=(x / width, y / height),
                colour=bar.colour,
                label=bar.label,
                value=bar.value if has_printed or has_ticks else None,
            )
            for bar, around in zip(bars, spots, strict=True)
            for x, y in around
        ),
    )


def _labels(rng: random.Random, number: int, span: int, size: Size, is_upright: bool) -> tuple[list[str], int]:
    """Names of the bars and the font size at which they fit."""
    for attempt in range(6):
        kind = rng.random()
        if attempt == 5 or kind < 0.3:
            family = list("ABCDEF")[:number] if rng.random() < 0.6 else rng.sample("ABCDEFGHIJKLMNOPQRSTUVWXYZ", number)
        elif kind < 0.75:
            pool = rng.choice([names for names in BAR_NAMES if len(names) >= number])
            if rng.random() < 0.5:
                start = rng.randint(0, len(pool) - number)
                family = list(pool[start : start + number])
            else:
                family = rng.sample(pool, number)
        elif kind < 0.9:
            family = [word.capitalize() for word in rng.sample(WORDS, number)]
        else:
            family = [any_text(rng, 5) for _ in range(number)]
        if kind >= 0.3 and rng.random() < 0.25:
            style = rng.choice((str.upper, str.lower))
            family = [style(name) for name in family]
        if len({name.lower() for name in family}) < number:
            continue
        largest = rng.randint(SMALLEST_TEXT, 28)
        room = span * 0.82 / number if is_upright else size[0] * 0.3
        for font_size in range(largest, SMALLEST_TEXT - 1, -1):
            if max(typeface(font_size).getlength(name) for name in family) <= room and (
                is_upright or font_size * 1.3 < span * 0.8 / number
            ):
                return list(family), font_size
    return list("ABCDEF")[:number], SMALLEST_TEXT


def _values(rng: random.Random, number: int, *, is_on_ticks: bool) -> tuple[int, list[int], int]:
    """The axis' step, the bars' values, and the axis' end. `is_on_ticks`: values are to be read from the axis."""
    step = rng.choice((1, 1, 1, 1, 2, 2, 5, 10, 10, 20))
    ticks = rng.randint(4, 10) if step == 1 else rng.randint(4, 6)
    top = step * ticks
    if step == 1 or is_on_ticks or rng.random() < 0.5:
        choices = [step * i for i in range(1, ticks + 1)]
    else:
        choices = list(range(max(1, step // 2), top + 1, max(1, step // 2)))
    if not is_on_ticks and rng.random() < 0.2:
        choices = list(range(1, top + 1))
    if len(choices) >= number and rng.random() < 0.8:
        values = rng.sample(choices, number)
    else:
        values = [rng.choice(choices) for _ in range(number)]
    if rng.random() < 0.4:
        top = max(values) + (0 if rng.random() < 0.5 else step)
        top = -(-top // step) * step
    return step, values, top


def _paint(
    rng: random.Random,
    image: Image.Image,
    bars: tuple[Bar, ...],
    tones: dict[str, Rgb | None],
    ink: Rgb,
    font_size: int,
    step: int,
    top: int,
    is_upright: bool,
    has_printed: bool,
    has_ticks: bool,
) -> list[list[tuple[float, float]]]:
    """Draws everything; for each bar where its middle, its name and its printed value are."""
    spots: list[list[tuple[float, float]]] = []
    width, height = image.size
    draw = ImageDraw.Draw(image)
    names = typeface(font_size)
    figures = typeface(max(SMALLEST_TEXT, round(font_size * rng.uniform(0.75, 1.1))))
    has_labels = bars[0].label is not None
    label_room = (
        font_size * 1.35 if is_upright else max(names.getlength(bar.label or "") for bar in bars) + 7
    ) * has_labels
    figure_width = figures.getlength(str(top)) + 6
    edge = rng.randint(4, 12)
    title_room = 0
    if rng.random() < 0.12 and height > 180:
        title = typeface(rng.randint(14, 20))
        text = cased(rng, rng.choice(WORDS))
        draw.text((width / 2, edge), text, fill=ink, font=title, anchor="mt")
        title_room = 22
    # In pixels, not all of them whole: texts are measured to parts of one.
    left: float
    right: float
    ground: float
    ceiling: float
    if is_upright:
        left = edge + (figure_width if has_ticks else 0)
        right = width - edge
        ground = height - edge - label_room
        ceiling = edge + title_room + (figures.size * 1.2 if has_printed else 4)
        pitch, length = (right - left) / len(bars), ground - ceiling
    else:
        left = edge + label_room
        right = width - edge - (figure_width if has_printed else 4)
        ground = height - edge - (figures.size * 1.3 if has_ticks else 0)
        ceiling = edge + title_room
        pitch, length = (ground - ceiling) / len(bars), right - left
    if has_ticks:
        grid = scaled(ink, 1) if rng.random() < 0.2 else _between(ink, image.getpixel((1, 1)))  # type: ignore[arg-type]
        has_grid = rng.random() < 0.6
        needed = figures.size * 1.1 if is_upright else figures.getlength(str(top)) + 5
        every = step
        while length * every / top < needed and every < top:
            every += step
        for value in range(0, top + 1, every):
            along = length * value / top
            if is_upright:
                if has_grid:
                    draw.line((left, ground - along, right, ground - along), fill=grid)
                else:
                    draw.line((left - 3, ground - along, left, ground - along), fill=ink)
                draw.text((left - 5, ground - along), str(value), fill=ink, font=figures, anchor="rm")
            else:
                if has_grid:
                    draw.line((left + along, ceiling, left + along, ground), fill=grid)
                draw.text((left + along, ground + 3), str(value), fill=ink, font=figures, anchor="mt")
    share = rng.uniform(0.45, 0.9)
    rim = ink if rng.random() < 0.25 else None
    is_inside = has_printed and rng.random() < 0.15
    for index, bar in enumerate(bars):
        tone = tones[bar.colour]
        assert tone is not None
        start = pitch * (index + (1 - share) / 2)
        along = max(2.0, length * bar.value / top)
        middle = pitch * (index + 0.5)
        figure = str(bar.value)
        if is_upright:
            draw.rectangle((left + start, ground - along, left + start + pitch * share, ground), fill=tone, outline=rim)
            around = [(left + middle, ground - along / 2)]
            if bar.label is not None:
                draw.text((left + middle, ground + 3), bar.label, fill=ink, font=names, anchor="mt")
                around.append((left + middle, ground + 3 + font_size / 2))
            if has_printed and is_inside and along > figures.size * 1.6:
                draw.text((left + middle, ground - along + 4), figure, fill=_on(tone), font=figures, anchor="mt")
                around.append((left + middle, ground - along + 4 + figures.size / 2))
            elif has_printed:
                draw.text((left + middle, ground - along - 3), figure, fill=ink, font=figures, anchor="mb")
                around.append((left + middle, ground - along - 3 - figures.size / 2))
        else:
            draw.rectangle(
                (left, ceiling + start, left + along, ceiling + start + pitch * share), fill=tone, outline=rim
            )
            around = [(left + along / 2, ceiling + middle)]
            if bar.label is not None:
                draw.text((left - 4, ceiling + middle), bar.label, fill=ink, font=names, anchor="rm")
                around.append((left - 4 - names.getlength(bar.label) / 2, ceiling + middle))
            if has_printed:
                draw.text((left + along + 4, ceiling + middle), figure, fill=ink, font=figures, anchor="lm")
                around.append((left + along + 4 + figures.getlength(figure) / 2, ceiling + middle))
        spots.append(around)
    thickness = rng.choice((0, 1, 1, 2, 3))
    if thickness:
        if is_upright:
            draw.line((left, ground, right, ground), fill=ink, width=thickness)
        if not is_upright or rng.random() < 0.6 or has_ticks:
            draw.line((left, ceiling, left, ground), fill=ink, width=thickness)
        if not is_upright and has_ticks:
            draw.line((left, ground, right, ground), fill=ink, width=thickness)
    return spots


def _between(one: Rgb, other: Rgb) -> Rgb:
    return (one[0] + 3 * other[0]) // 4, (one[1] + 3 * other[1]) // 4, (one[2] + 3 * other[2]) // 4


def _on(tone: Rgb) -> Rgb:
    return (0, 0, 0) if distance(tone, (0, 0, 0)) > 380 else (255, 255, 255)
