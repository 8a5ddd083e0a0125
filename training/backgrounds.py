"""Backgrounds, finishing effects and pictures of nothing. Knows nothing of questions."""

from __future__ import annotations

import io
import random

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter

from training.palette import Rgb, any_colour, distance, paper, scaled

Size = tuple[int, int]


def background(rng: random.Random, size: Size) -> tuple[Image.Image, list[Rgb]]:
    """An RGB picture of `size` (width, height), and the colours that things on it must stand out from."""
    base = paper(rng)
    kind = rng.random()
    if kind < 0.62:
        return Image.new("RGB", size, base), [base]
    if kind < 0.77:
        other = scaled(base, rng.uniform(0.7, 1.3)) if rng.random() < 0.7 else _near(rng, base)
        return gradient(rng, size, base, other), [base, other]
    if kind < 0.86:
        return grain(rng, Image.new("RGB", size, base), rng.randint(4, 45)), [base]
    return _texture(rng, size, base)


def gradient(rng: random.Random, size: Size, first: Rgb, second: Rgb) -> Image.Image:
    """From one colour to another: down, across, or outwards."""
    ramp = Image.radial_gradient("L") if rng.random() < 0.25 else Image.linear_gradient("L")
    if rng.random() < 0.5:
        ramp = ramp.transpose(Image.Transpose.ROTATE_90)
    if rng.random() < 0.3:
        ramp = ramp.rotate(45, Image.Resampling.BILINEAR).crop((40, 40, 216, 216))
    mask = ramp.resize(size, Image.Resampling.BILINEAR)
    return Image.composite(Image.new("RGB", size, first), Image.new("RGB", size, second), mask)


def grain(rng: random.Random, image: Image.Image, strength: int) -> Image.Image:
    """Adds noise of up to +-`strength` levels, fine or coarse, coloured or gray."""
    width, height = image.size
    coarse = rng.choice((1, 1, 1, 2, 4, 8))
    shape = (height // coarse + 1, width // coarse + 1, 3 if rng.random() < 0.5 else 1)
    noise = np.random.default_rng(rng.getrandbits(32)).integers(-strength, strength + 1, shape, dtype=np.int16)
    if coarse > 1:
        noise = noise.repeat(coarse, 0).repeat(coarse, 1)
    pixels = np.asarray(image).astype(np.int16) + noise[:height, :width]
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def finished(rng: random.Random, image: Image.Image) -> Image.Image:
    """Sometimes blurs, adds grain or JPEG artefacts, or changes the contrast, always mildly."""
    kind = rng.random()
    if kind < 0.07:
        image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.4, 1.0)))
    elif kind < 0.14:
        image = grain(rng, image, rng.randint(3, 20))
    elif kind < 0.26:
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=rng.randint(40, 95))
        image = Image.open(buffer).convert("RGB")
    elif kind < 0.30:
        image = ImageEnhance.Contrast(image).enhance(rng.uniform(0.85, 1.1))
    elif kind < 0.34:
        image = ImageEnhance.Brightness(image).enhance(rng.uniform(0.88, 1.08))
    return image


def nothing(rng: random.Random, size: Size) -> Image.Image:
    """A picture with nothing to name: blank, graded, noise, blotches, scribble, or stripes."""
    kind = rng.random()
    if kind < 0.2:
        return Image.new("RGB", size, paper(rng) if rng.random() < 0.6 else any_colour(rng))
    if kind < 0.4:
        return gradient(rng, size, any_colour(rng), any_colour(rng))
    if kind < 0.62:
        return _noise(rng, size)
    if kind < 0.9:
        return _scribble(rng, size)
    return _texture(rng, size, paper(rng))[0]


def _noise(rng: random.Random, size: Size) -> Image.Image:
    generator = np.random.default_rng(rng.getrandbits(32))
    coarse = rng.choice((1, 1, 1, 2, 4, 9, 24))
    small = (size[1] // coarse + 1, size[0] // coarse + 1, rng.choice((1, 3)))
    if rng.random() < 0.35:
        pixels = np.clip(generator.normal(rng.randint(60, 200), rng.randint(20, 80), small), 0, 255).astype(np.uint8)
    elif rng.random() < 0.2:
        pixels = (generator.random(small) < rng.uniform(0.05, 0.5)).astype(np.uint8) * 255
    else:
        low = rng.randint(0, 120)
        pixels = generator.integers(low, rng.randint(low + 60, 256), small, dtype=np.uint8)
    image = Image.fromarray(np.broadcast_to(pixels, (*small[:2], 3)).copy())
    how = rng.choice((Image.Resampling.NEAREST, Image.Resampling.BILINEAR))
    return image.resize((small[1] * coarse, small[0] * coarse), how).crop((0, 0, *size))


def _scribble(rng: random.Random, size: Size) -> Image.Image:
    image, _ = background(rng, size)
    draw = ImageDraw.Draw(image)
    for _ in range(rng.choice((1, 1, 2, 3, 6))):
        x, y = rng.uniform(0, size[0]), rng.uniform(0, size[1])
        points = [(x, y)]
        step = rng.uniform(0.08, 0.5)
        for _ in range(rng.randint(5, 40)):
            x = min(size[0], max(0.0, x + rng.uniform(-step, step) * size[0]))
            y = min(size[1], max(0.0, y + rng.uniform(-step, step) * size[1]))
            points.append((x, y))
        draw.line(
            points,
            fill=any_colour(rng),
            width=rng.choice((1, 2, 2, 3, 4, 6)),
            joint=rng.choice((None, "curve")),
        )
    return image


def _texture(rng: random.Random, size: Size, base: Rgb) -> tuple[Image.Image, list[Rgb]]:
    """Stripes, checks, dots or a ruled sheet, in two near colours."""
    other = scaled(base, rng.choice((0.8, 0.87, 0.93, 1.08, 1.15))) if max(base) > 60 else _near(rng, base)
    image = Image.new("RGB", size, base)
    draw = ImageDraw.Draw(image)
    width, height = size
    step = rng.randint(6, 40)
    kind = rng.randrange(5)
    if kind == 0:
        for x in range(0, width, 2 * step):
            draw.rectangle((x, 0, x + step - 1, height), fill=other)
    elif kind == 1:
        for y in range(0, height, 2 * step):
            draw.rectangle((0, y, width, y + step - 1), fill=other)
    elif kind == 2:
        for row, y in enumerate(range(0, height, step)):
            for x in range(step * (row % 2), width, 2 * step):
                draw.rectangle((x, y, x + step - 1, y + step - 1), fill=other)
    elif kind == 3:
        for x in range(0, width, step):
            draw.line((x, 0, x, height), fill=other)
        for y in range(0, height, step):
            draw.line((0, y, width, y), fill=other)
    else:
        slant = rng.randint(-height, height)
        for x in range(-height, width + height, 2 * step):
            draw.line((x, 0, x + slant, height), fill=other, width=max(1, step // 2))
    return image, [base, other]


def _near(rng: random.Random, base: Rgb) -> Rgb:
    for _ in range(20):
        other = any_colour(rng)
        if distance(base, other) < 150:
            return other
    return base
