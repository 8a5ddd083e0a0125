"""Words to print and how they are printed, in Pillow's own font. Knows nothing of questions or layout."""

from __future__ import annotations

import functools
import random

from PIL import Image, ImageDraw, ImageFont

from training.vocabulary import WORDS

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_CONSONANTS, _VOWELS = "bcdfghjklmnpqrstvwxyz", "aeiou"


@functools.lru_cache(maxsize=128)
def typeface(size: int) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont), "Pillow was built without FreeType"
    return font


def any_text(rng: random.Random, longest: int = 8) -> str:
    """A word or number of up to `longest` characters, as printed: words, random letters, numbers, codes."""
    kind = rng.random()
    if kind < 0.42:
        return cased(rng, rng.choice([word for word in rng.choices(WORDS, k=6) if len(word) <= longest] or ["cat"]))
    length = min(longest, rng.choice((1, 1, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8)))
    if kind < 0.52:
        start = rng.randrange(2)
        return cased(rng, "".join(rng.choice((_CONSONANTS, _VOWELS)[(start + i) % 2]) for i in range(length)))
    if kind < 0.66:
        return cased(rng, "".join(rng.choice(_LETTERS) for _ in range(length)))
    if kind < 0.95:
        if length > 3 and rng.random() < 0.12:
            digits = "".join(rng.choice("0123456789") for _ in range(length - 1))
            point = rng.randint(1, length - 2)
            return digits[:point] + "." + digits[point:]
        return rng.choice("123456789") + "".join(rng.choice("0123456789") for _ in range(length - 1))
    letters = rng.randint(1, max(1, length - 1))
    text = "".join(rng.choice("ABCDEFGHJKLMNPRTUVWXYZ") for _ in range(letters))
    return text + "".join(rng.choice("23456789") for _ in range(max(1, length - letters)))


def cased(rng: random.Random, word: str) -> str:
    return rng.choice((word.upper(), word.upper(), word.lower(), word.lower(), word.capitalize()))


def text_mask(rng: random.Random, text: str, size: int, *, is_plain: bool = False) -> Image.Image:
    """The text as a mask ("L"), cropped to its ink; `size` is the font's in pixels. Now and then bold, wide
    or slanted.
    """
    font = typeface(size)
    bold = 0 if is_plain else rng.choice((0, 0, 0, 0, 1, 1, max(1, size // 22)))
    gap = 0 if is_plain or rng.random() < 0.85 else rng.randint(1, max(2, size // 6))
    left, top, right, bottom = font.getbbox(text, stroke_width=bold)
    mask = Image.new("L", (int(right - left) + 4 + gap * len(text), int(bottom - top) + 4))
    draw = ImageDraw.Draw(mask)
    if rng.random() < 0.05:
        draw.fontmode = "1"
    if gap:
        x = 2.0 - left
        for character in text:
            draw.text((x, 2 - top), character, fill=255, font=font, stroke_width=bold)
            x += font.getlength(character) + gap
    else:
        draw.text((2 - left, 2 - top), text, fill=255, font=font, stroke_width=bold)
    if not is_plain:
        mask = _bent(rng, mask)
    return mask.crop(mask.getbbox() or (0, 0, 1, 1))


def _bent(rng: random.Random, mask: Image.Image) -> Image.Image:
    kind = rng.random()
    width, height = mask.size
    if kind < 0.14:
        mask = mask.resize((max(1, round(width * rng.uniform(0.85, 1.3))), height), Image.Resampling.BILINEAR)
    elif kind < 0.22:
        slant = rng.uniform(-0.1, 0.3)
        grown = width + round(abs(slant) * height)
        start = -slant * height if slant > 0 else 0.0
        mask = mask.transform(
            (grown, height), Image.Transform.AFFINE, (1, slant, start, 0, 1, 0), Image.Resampling.BILINEAR
        )
    elif kind < 0.36:
        mask = mask.rotate(rng.uniform(-9, 9), Image.Resampling.BICUBIC, expand=True)
    return mask
