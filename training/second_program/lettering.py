"""Printed text in Pillow's own font, and the category `read`.

Knows how to set a line of text with smooth edges: drawn at four times its size, turned a little, and
averaged down.
"""

from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from training.sample import Turn
from training.second_program.ground import Ground, Pixels, draw_ground_for, draw_size, paint_ground
from training.second_program.palette import RGB, hsv_to_rgb, stands_out
from training.second_program.picture import blend, to_image
from training.second_program.questions import pick
from training.second_program.words import draw_text

MIN_FONT_PX = 20
_ZOOM = 4


@dataclass(frozen=True, kw_only=True)
class Print:
    """A picture of one line of text: its font size in pixels, its centre, its tilt in degrees."""

    text: str
    width: int
    height: int
    ground: Ground
    plate: RGB | None
    ink: RGB
    font_px: int
    weight: int
    tilt: float
    x: float
    y: float


def set_text(text: str, font_px: int, *, weight: int = 0, tilt: float = 0.0) -> Pixels:
    """The text's coverage, `[height, width]` of 0..1, cropped to its ink.

    `weight` thickens strokes by that many quarter pixels on every side; `tilt` turns by degrees counter-
    clockwise.
    """
    font = ImageFont.load_default(font_px * _ZOOM)
    left, top, right, bottom = font.getbbox(text, stroke_width=weight)
    ink = Image.new("L", (int(right - left) + 2 * _ZOOM, int(bottom - top) + 2 * _ZOOM))
    ImageDraw.Draw(ink).text((_ZOOM - left, _ZOOM - top), text, fill=255, font=font, stroke_width=weight)
    if tilt:
        ink = ink.rotate(tilt, resample=Image.Resampling.BICUBIC, expand=True)
    ink = ink.crop(ink.getbbox())
    size = (max(1, round(ink.width / _ZOOM)), max(1, round(ink.height / _ZOOM)))
    return np.asarray(ink.resize(size, Image.Resampling.BOX), dtype=np.float32) / np.float32(255)


def _draw_ink(rng: np.random.Generator) -> RGB:
    """Any colour: letters need contrast, not a name."""
    return hsv_to_rgb(rng.uniform(0, 360), rng.choice([0.0, rng.uniform(0.3, 1.0)]), rng.choice([0.05, 0.5, 0.8, 1.0]))


def draw_print(rng: np.random.Generator) -> Print:
    """A text that fits its picture, of font size 20 pixels at least, and stands out on what is behind it."""
    text = draw_text(rng)
    while True:
        width, height = draw_size(rng)
        tilt = float(rng.uniform(-5, 5)) if rng.random() < 0.3 else 0.0
        weight = int(rng.choice([0, 0, 1, 3]))
        unit = set_text(text, 100, weight=weight, tilt=tilt)
        largest = int(min((width - 16) / unit.shape[1], (height - 16) / unit.shape[0], 1.1) * 100)
        if largest < MIN_FONT_PX:
            continue
        font_px = int(rng.integers(MIN_FONT_PX, largest + 1))
        ink = _draw_ink(rng)
        plate = None
        if rng.random() < 0.25:
            plate = hsv_to_rgb(rng.uniform(0, 360), rng.uniform(0, 0.9), rng.uniform(0.1, 1.0))
            if not stands_out(ink, (plate,)):
                continue
        ground = draw_ground_for(rng, (plate or ink,))
        if ground is None:
            continue
        text_height, text_width = set_text(text, font_px, weight=weight, tilt=tilt).shape
        if text_width + 12 > width or text_height + 12 > height:
            continue
        x = width / 2 if rng.random() < 0.4 else rng.uniform(text_width / 2 + 6, width - text_width / 2 - 6)
        y = height / 2 if rng.random() < 0.4 else rng.uniform(text_height / 2 + 6, height - text_height / 2 - 6)
        return Print(
            text=text,
            width=width,
            height=height,
            ground=ground,
            plate=plate,
            ink=ink,
            font_px=font_px,
            weight=weight,
            tilt=tilt,
            x=float(x),
            y=float(y),
        )


def paint_print(printed: Print) -> Image.Image:
    """The picture, RGB."""
    pixels = paint_ground(printed.ground, printed.width, printed.height)
    letters = set_text(printed.text, printed.font_px, weight=printed.weight, tilt=printed.tilt)
    height, width = letters.shape
    left, top = int(printed.x - width / 2), int(printed.y - height / 2)
    if printed.plate is not None:
        above, before = min(top, 10 + printed.font_px // 4), min(left, 10 + printed.font_px // 4)
        below = min(printed.height - top - height, above)
        behind = min(printed.width - left - width, before)
        plate = np.ones((above + height + below, before + width + behind), dtype=np.float32)
        blend(pixels, plate, printed.plate, left - before, top - above)
    blend(pixels, letters, printed.ink, left, top)
    return to_image(pixels)


def draw_read(rng: np.random.Generator) -> tuple[Print, Turn]:
    """A printed word, number or string, asked for letter by letter."""
    printed = draw_print(rng)
    noun = "number" if printed.text.isdecimal() else "word" if printed.text.isalpha() else "text"
    phrasings = (
        "What does it say?",
        "What is written here?",
        "What does the picture say?",
        "Read the {noun}.",
        "Which {noun} is printed in the image?",
        "What {noun} do you see?",
        "Please read out the {noun} in this picture.",
        "What text is in the image?",
    )
    question = pick(rng, phrasings, noun=noun)
    turn = Turn(
        question=question,
        answer=f"It says {printed.text}.",
        expected=(printed.text.lower(),),
        category="read",
    )
    return printed, turn
