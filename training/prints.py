"""Pictures of printed words and numbers, and conversations about them. Knows nothing of charts or pairs of
pictures.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from PIL import Image, ImageDraw

from training.backgrounds import Size, background, finished
from training.dialogue import ask, at, in_words, say
from training.lettering import any_text, text_mask
from training.palette import Rgb, any_colour, contrasting, distance, paper
from training.sample import COLOURS, SHAPES, Turn
from training.scenes import place_of
from training.shapes import any_style, outline, put_shape

SMALLEST_TEXT = 20  # font size in pixels


@dataclass(frozen=True, kw_only=True)
class Printed:
    text: str
    colour: str | None  # None for a tone without a plain name
    place: str | None


@dataclass(frozen=True, kw_only=True)
class Sheet:
    image: Image.Image
    prints: tuple[Printed, ...]
    shape: str | None  # one shape beside the text, now and then


def draw_print(rng: random.Random, size: Size, *, text: str | None = None, is_single: bool = False) -> Sheet:
    """A word or number, sometimes two one above the other, on a label, framed, underlined, or beside a shape.

    `text` is what the first says, where it is given; `is_single` asks for one text and nothing beside it.
    """
    width, height = size
    image, papers = background(rng, size)
    is_double = not is_single and height >= 140 and rng.random() < 0.3
    shape = None
    if not is_single and not is_double and height >= 160 and rng.random() < 0.12:
        shape = rng.choice(SHAPES)
        is_double = True
    bands = [(0, height // 2), (height // 2, height)] if is_double else [(0, height)]
    prints: list[Printed] = []
    shape_band = rng.randrange(2) if shape else None
    longest = 8
    for index, (top, bottom) in enumerate(bands):
        if index == shape_band and shape is not None:
            radius = (bottom - top) * rng.uniform(0.2, 0.42)
            tone = contrasting(rng, rng.choice(COLOURS), papers) or _ink(rng, papers)[0]
            style = any_style(rng)
            x = rng.uniform(radius, width - radius) if radius * 2 < width else width / 2
            put_shape(
                rng,
                image,
                outline(rng, shape, style.turn),
                (x, (top + bottom) / 2),
                radius,
                tone,
                style,
                papers[0],
            )
            continue
        text = text if text is not None and not prints else any_text(rng, longest)
        mask = _fitted(rng, text, width - 6, bottom - top - 4)
        while mask is None:
            text = text[:-1].rstrip(".") or "7"
            mask = _fitted(rng, text, width - 6, bottom - top - 4)
        free_x, free_y = width - mask.width, bottom - top - mask.height
        x = free_x // 2 if rng.random() < 0.4 else rng.randint(1, max(1, free_x - 1))
        y = top + (free_y // 2 if rng.random() < 0.4 else rng.randint(1, max(1, free_y - 1)))
        around = papers
        if len(bands) == 1 and rng.random() < 0.36:
            around = [_label(rng, image, (x, y, x + mask.width, y + mask.height))]
        ink, name = _ink(rng, around)
        if rng.random() < 0.06:
            image.paste((0, 0, 0) if sum(ink) > 380 else (255, 255, 255), (x + 2, y + 2), mask)
        image.paste(ink, (x, y), mask)
        if rng.random() < 0.08:
            line = y + mask.height + rng.randint(2, 5)
            ImageDraw.Draw(image).line((x, line, x + mask.width, line), fill=ink, width=rng.randint(1, 3))
        if rng.random() < 0.06:
            gap = rng.randint(4, 9)
            frame = (x - gap, y - gap, x + mask.width + gap, y + mask.height + gap)
            ImageDraw.Draw(image).rectangle(frame, outline=ink, width=rng.randint(1, 3))
        place = place_of((x + mask.width / 2, y + mask.height / 2), size)
        prints.append(Printed(text=text, colour=name, place=place))
    return Sheet(image=finished(rng, image), prints=tuple(prints), shape=shape)


def talk_print(rng: random.Random, sheet: Sheet, turns: int) -> list[Turn]:
    """`turns` questions about the text, the first of them to read it."""
    said: list[Turn] = []
    if len(sheet.prints) == 2:
        order = [0, 1] if rng.random() < 0.5 else [1, 0]
        for index in order:
            where = in_words(rng, ("top", "bottom")[index])
            noun = (
                "number" if sheet.prints[index].text.isdecimal() and rng.random() < 0.5 else "[word|text|line|writing]"
            )
            said.append(
                _reading(
                    say(
                        rng,
                        (
                            f"What does the {noun} {{where}} say?",
                            f"[What|Which] {noun} is {{where}}?",
                            f"[Read|Please read] the {noun} {{where}}.",
                            "What is [written|printed] {where}?",
                            f"What does the {('[top|upper|first]', '[bottom|lower|second]')[index]} {noun} say?",
                            f"What is the {('[top|upper]', '[bottom|lower]')[index]} {noun}?",
                        ),
                        ("what is [written|printed] {where}", f"what the {noun} {{where}} says"),
                        where=where,
                    ),
                    sheet.prints[index].text,
                )
            )
    else:
        text = sheet.prints[0].text
        is_number = text.replace(".", "").isdecimal()
        said.append(_reading(ask(rng, "read_number" if is_number and rng.random() < 0.55 else "read"), text))
    only = sheet.prints[0] if len(sheet.prints) == 1 else None
    while len(said) < turns:
        kind = rng.random()
        if only and only.colour and kind < 0.45:
            question = ask(
                rng,
                "colour",
                ref="the [text|word|writing|print|letters]"
                if not only.text.isdecimal()
                else "the [text|number|digits]",
            )
            turn = Turn(
                question=question,
                answer=f"The text is {only.colour}.",
                expected=(only.colour,),
                category="colour",
            )
        elif only and only.place and kind < 0.7:
            question = ask(
                rng,
                "place",
                ref="the [text|word|writing]" if not only.text.isdecimal() else "the [text|number]",
            )
            turn = Turn(
                question=question,
                answer=f"The text is {at(only.place)}.",
                expected=(only.place,),
                category="place",
            )
        elif only and kind < 0.85:
            turn = Turn(
                question=ask(rng, "describe"),
                answer=f"I see the text {only.text.upper()}.",
                expected=(),
                category="general",
            )
        else:
            break
        said.append(turn)
    return said[:turns]


def _reading(question: str, text: str) -> Turn:
    return Turn(question=question, answer=f"It says {text.upper()}.", expected=(text,), category="read")


def _fitted(rng: random.Random, text: str, width: int, height: int) -> Image.Image | None:
    """The text's mask at a size that fits, most often near the smallest, or None where none fits."""
    room = min(height * 0.8, width / (0.62 * len(text)), 120)
    largest = max(SMALLEST_TEXT, room)
    size = SMALLEST_TEXT + (largest - SMALLEST_TEXT) * rng.random() ** 1.5
    for _ in range(4):
        mask = text_mask(rng, text, round(size))
        if mask.width <= width and mask.height <= height:
            return mask
        size = max(SMALLEST_TEXT, size * 0.8)
    mask = text_mask(rng, text, SMALLEST_TEXT, is_plain=True)
    return mask if mask.width <= width and mask.height <= height else None


def _ink(rng: random.Random, papers: list[Rgb]) -> tuple[Rgb, str | None]:
    """A tone that reads well on `papers`, and its plain name where it has one."""
    if rng.random() < 0.3:
        for tone, name in (((0, 0, 0), "black"), ((255, 255, 255), "white")):
            if all(distance(tone, other) > 300 for other in papers):
                return tone, name
    for _ in range(8):
        name = rng.choice(COLOURS)
        found = contrasting(rng, name, papers, least=220)
        if found is not None:
            return found, name
    if rng.random() < 0.5:
        for _ in range(20):
            tone = any_colour(rng)
            if all(distance(tone, other) > 230 for other in papers):
                return tone, None
    return max(
        (((0, 0, 0), "black"), ((255, 255, 255), "white")),
        key=lambda pair: min(distance(pair[0], other) for other in papers),
    )


def _label(rng: random.Random, image: Image.Image, box: tuple[int, int, int, int]) -> Rgb:
    """Puts a plain sign behind the text's box and returns its colour."""
    tone = paper(rng)
    left, top, right, bottom = box
    gap_x, gap_y = rng.randint(4, 14), rng.randint(3, 12)
    frame = (left - gap_x, top - gap_y, right + gap_x, bottom + gap_y)
    draw = ImageDraw.Draw(image)
    rim = any_colour(rng) if rng.random() < 0.4 else None
    kind = rng.random()
    if kind < 0.5:
        draw.rectangle(frame, fill=tone, outline=rim, width=rng.randint(1, 4))
    elif kind < 0.85:
        draw.rounded_rectangle(frame, rng.randint(4, 14), fill=tone, outline=rim, width=rng.randint(1, 4))
    else:
        grow_x, grow_y = (right - left) // 4, (bottom - top) // 2
        draw.ellipse(
            (frame[0] - grow_x, frame[1] - grow_y, frame[2] + grow_x, frame[3] + grow_y),
            fill=tone,
            outline=rim,
        )
    return tone
