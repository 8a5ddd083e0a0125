"""Backgrounds: flat, graded or noisy, light, dark or between, as float pixels.

Knows what stands out on it, and nothing of what will be drawn there. Pixels are `[height, width, 3]`
float32 of 0..255.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

from training.second_program.palette import RGB, hsv_to_rgb, stands_out

Pixels = npt.NDArray[np.float32]

MIN_SIDE = 112
MAX_SIDE = 448


@dataclass(frozen=True, kw_only=True)
class Ground:
    """A background to be.

    Its colours lie between the two ends, give or take `grain` (a standard deviation).
    """

    texture: str
    ends: tuple[RGB, RGB]
    grain: float
    seed: int


def draw_size(rng: np.random.Generator, *, min_side: int = MIN_SIDE, max_aspect: float = 3.0) -> tuple[int, int]:
    """Width and height in pixels, `min_side`..448 each, the longer at most `max_aspect` times the shorter."""
    short = int(rng.integers(min_side, MAX_SIDE + 1))
    if rng.random() < 0.3:
        return short, short
    long = int(rng.integers(short, min(MAX_SIDE, int(short * max_aspect)) + 1))
    return (long, short) if rng.random() < 0.5 else (short, long)


def draw_ground(rng: np.random.Generator) -> Ground:
    """Any background of the program."""
    hue = rng.uniform(0, 360)
    match rng.choice(["light", "dark", "middle"], p=[0.5, 0.3, 0.2]):
        case "light":
            saturation, value = rng.uniform(0, 0.16), rng.uniform(0.87, 1.0)
        case "dark":
            saturation, value = rng.uniform(0, 0.55), rng.uniform(0.04, 0.24)
        case _:
            saturation, value = rng.uniform(0.03, 0.28), rng.uniform(0.35, 0.75)
    start = hsv_to_rgb(hue, saturation, value)
    texture = str(rng.choice(["flat", "slope", "glow", "grain", "clouds"], p=[0.3, 0.2, 0.1, 0.2, 0.2]))
    if texture in ("flat", "grain"):
        end = start
    else:
        end = hsv_to_rgb(
            hue + rng.uniform(-40, 40),
            saturation * rng.uniform(0.4, 1.4),
            min(1.0, value * rng.uniform(0.78, 1.2)),
        )
    grain = float(rng.uniform(4, 13)) if texture == "grain" else float(rng.choice([0.0, 0.0, 2.5]))
    return Ground(texture=texture, ends=(start, end), grain=grain, seed=int(rng.integers(2**32)))


def draw_ground_for(rng: np.random.Generator, colours: tuple[RGB, ...]) -> Ground | None:
    """A background on which all the colours stand out; none where forty tries find none."""
    for _ in range(40):
        ground = draw_ground(rng)
        if all(stands_out(colour, ground.ends) for colour in colours):
            return ground
    return None


def soft_noise(rng: np.random.Generator, width: int, height: int, cell: int) -> Pixels:
    """Smooth noise of 0..1, `[height, width]`, its bumps about `cell` pixels wide."""
    grid = rng.random((height // cell + 3, width // cell + 3), dtype=np.float32)
    smooth = Image.fromarray(grid).resize((width, height), Image.Resampling.BICUBIC)
    return np.clip(np.asarray(smooth, dtype=np.float32), 0, 1)


def paint_ground(ground: Ground, width: int, height: int) -> Pixels:
    """The background's pixels, the same for the same ground and size."""
    rng = np.random.default_rng(ground.seed)
    start, end = (np.asarray(colour, dtype=np.float32) for colour in ground.ends)
    y = np.arange(height, dtype=np.float32)[:, None] / np.float32(height)
    x = np.arange(width, dtype=np.float32)[None, :] / np.float32(width)
    share: Pixels | None
    match ground.texture:
        case "slope":
            angle = rng.uniform(0, 2 * np.pi)
            share = x * np.float32(np.cos(angle)) + y * np.float32(np.sin(angle))
            share = (share - share.min()) / (share.max() - share.min())
        case "glow":
            around = rng.uniform(0.2, 0.8, 2)
            share = np.hypot(x - np.float32(around[0]), y - np.float32(around[1]))
            share /= share.max()
        case "clouds":
            share = soft_noise(rng, width, height, int(rng.integers(12, 60)))
        case _:
            share = None
    pixels: Pixels = np.empty((height, width, 3), dtype=np.float32)
    pixels[:] = start if share is None else start + (end - start) * share[..., None]
    if ground.grain:
        pixels += rng.standard_normal((height, width, 1), dtype=np.float32) * np.float32(ground.grain)
    return pixels
