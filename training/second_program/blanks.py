"""Pictures of nothing: a bare background, coarse or fine noise, scribbles, blurred patches.

Knows how to draw what nobody has a name for; whatever it draws must look like no shape, letter or chart.
"""

import numpy as np
from PIL import Image, ImageDraw

from training.second_program.ground import Pixels, draw_ground, draw_size, paint_ground, soft_noise
from training.second_program.palette import hsv_to_rgb
from training.second_program.picture import blend, to_image

_ZOOM = 3


def _scribble(rng: np.random.Generator, width: int, height: int) -> Pixels:
    """The coverage of one smooth wandering line, `[height, width]` of 0..1."""
    steps = int(rng.integers(80, 240))
    # A walk whose heading wanders. A steady bend would close into something like a circle.
    heading = np.cumsum(rng.normal(0, 0.4, steps))
    path = np.cumsum(np.stack([np.cos(heading), np.sin(heading)], axis=1), axis=0)
    path = (path - path.min(axis=0)) / np.maximum(np.ptp(path, axis=0), 1e-6)
    low, high = rng.uniform(0.02, 0.3, 2), rng.uniform(0.7, 0.98, 2)
    points = (low + path * (high - low)) * (width * _ZOOM, height * _ZOOM)
    ink = Image.new("L", (width * _ZOOM, height * _ZOOM))
    line_width = int(rng.integers(1, 4)) * _ZOOM
    ImageDraw.Draw(ink).line([(float(x), float(y)) for x, y in points], fill=255, width=line_width, joint="curve")
    return np.asarray(ink.resize((width, height), Image.Resampling.BOX), dtype=np.float32) / np.float32(255)


def draw_blank(rng: np.random.Generator) -> Image.Image:
    """A picture that shows nothing nameable, RGB."""
    width, height = draw_size(rng)
    pixels = paint_ground(draw_ground(rng), width, height)
    match rng.choice(["bare", "static", "patches", "scribbles"], p=[0.4, 0.2, 0.15, 0.25]):
        case "static":
            channels = int(rng.choice([1, 3]))
            cell = int(rng.choice([1, 1, 2, 4]))
            grid = rng.uniform(0, 255, (height // cell + 1, width // cell + 1, channels)).astype(np.float32)
            noise = grid.repeat(cell, axis=0).repeat(cell, axis=1)[:height, :width]
            share = np.float32(rng.uniform(0.4, 1.0))
            pixels = pixels * (1 - share) + noise * share
        case "patches":
            for _ in range(int(rng.integers(2, 4))):
                alpha = soft_noise(rng, width, height, int(rng.integers(20, 70)))
                blend(
                    pixels,
                    alpha,
                    hsv_to_rgb(rng.uniform(0, 360), rng.uniform(0.1, 0.8), rng.uniform(0.2, 1)),
                    0,
                    0,
                )
        case "scribbles":
            for _ in range(int(rng.integers(2, 5))):
                colour = hsv_to_rgb(rng.uniform(0, 360), rng.uniform(0, 1), rng.uniform(0.1, 1))
                blend(pixels, _scribble(rng, width, height), colour, 0, 0)
        case _:
            pass
    return to_image(pixels)
