"""Named colours in many shades, and which of them can be told apart. Knows nothing of shapes or pictures."""

from __future__ import annotations

import random

from training.sample import COLOURS

Rgb = tuple[int, int, int]

# Shades that most people give this one name; those between two names are left out on purpose.
SHADES: dict[str, tuple[Rgb, ...]] = {
    "red": (
        (255, 0, 0),
        (220, 20, 50),
        (205, 30, 30),
        (230, 57, 53),
        (214, 39, 40),
        (190, 15, 20),
        (235, 64, 52),
    ),
    "orange": ((255, 165, 0), (255, 140, 0), (255, 127, 14), (245, 124, 0), (243, 150, 18), (240, 120, 25)),
    "yellow": ((255, 255, 0), (255, 235, 59), (241, 205, 15), (255, 215, 0), (250, 225, 50), (255, 240, 100)),
    "green": (
        (0, 128, 0),
        (0, 200, 0),
        (0, 255, 0),
        (34, 139, 34),
        (46, 204, 113),
        (76, 175, 80),
        (44, 160, 44),
        (60, 180, 75),
        (0, 100, 20),
    ),
    "blue": (
        (0, 0, 255),
        (30, 120, 255),
        (31, 119, 180),
        (52, 152, 219),
        (33, 130, 243),
        (65, 105, 225),
        (10, 20, 150),
        (70, 130, 190),
        (100, 170, 240),
    ),
    "purple": (
        (128, 0, 128),
        (155, 89, 182),
        (148, 103, 189),
        (156, 39, 176),
        (138, 43, 226),
        (106, 13, 173),
        (145, 30, 180),
        (90, 10, 140),
    ),
    "pink": (
        (255, 192, 203),
        (255, 105, 180),
        (255, 130, 170),
        (244, 143, 177),
        (227, 119, 194),
        (240, 98, 146),
        (255, 60, 160),
    ),
    "brown": (
        (139, 69, 19),
        (150, 75, 40),
        (121, 85, 72),
        (140, 86, 75),
        (101, 67, 33),
        (150, 90, 40),
        (92, 51, 23),
    ),
    "black": ((0, 0, 0), (15, 15, 15), (33, 33, 33), (10, 10, 20)),
    "white": ((255, 255, 255), (248, 248, 248), (252, 252, 248), (240, 243, 245)),
    "gray": (
        (128, 128, 128),
        (150, 150, 150),
        (110, 110, 110),
        (169, 169, 169),
        (140, 144, 150),
        (100, 100, 100),
    ),
}


def shade(rng: random.Random, name: str) -> Rgb:
    """A shade of the named colour: one of its anchors, a little brighter or darker, each channel a little
    off.
    """
    red, green, blue = rng.choice(SHADES[name])
    spread = 3 if name in ("black", "white", "gray") else 9
    gain = rng.uniform(0.93, 1.06)
    if name in ("gray", "white", "black"):
        gain = rng.uniform(0.97, 1.03)
    return (
        _clip(red * gain + rng.randint(-spread, spread)),
        _clip(green * gain + rng.randint(-spread, spread)),
        _clip(blue * gain + rng.randint(-spread, spread)),
    )


def distance(one: Rgb, other: Rgb) -> float:
    """How different two colours look, 0 to about 765: weighted by the mean red, as
    https://www.compuphase.com/cmetric.htm.
    """
    mean_red = (one[0] + other[0]) / 2
    red, green, blue = one[0] - other[0], one[1] - other[1], one[2] - other[2]
    squared = (2 + mean_red / 256) * red * red + 4 * green * green + (2 + (255 - mean_red) / 256) * blue * blue
    return float(squared**0.5)


def any_colour(rng: random.Random) -> Rgb:
    return rng.randrange(256), rng.randrange(256), rng.randrange(256)


def paper(rng: random.Random) -> Rgb:
    """A background colour: mostly light, often dark, sometimes strong."""
    kind = rng.random()
    if kind < 0.25:
        return (255, 255, 255)
    if kind < 0.55:
        level = rng.randint(190, 255)
        return tuple(_clip(level + rng.randint(-25, 25)) for _ in range(3))  # type: ignore[return-value]
    if kind < 0.75:
        level = rng.randint(0, 70)
        return tuple(_clip(level + rng.randint(-25, 25)) for _ in range(3))  # type: ignore[return-value]
    if kind < 0.87:
        return shade(rng, rng.choice(COLOURS))
    return any_colour(rng)


def contrasting(rng: random.Random, name: str, others: list[Rgb], least: float = 150) -> Rgb | None:
    """A shade of `name` that stands out from all of `others`, or None when a few tries find none."""
    for _ in range(5):
        colour = shade(rng, name)
        if all(distance(colour, other) >= least for other in others):
            return colour
    return None


def scaled(colour: Rgb, gain: float) -> Rgb:
    return _clip(colour[0] * gain), _clip(colour[1] * gain), _clip(colour[2] * gain)


def _clip(value: float) -> int:
    return max(0, min(255, round(value)))
