"""Colours by their English names: draws shades of each and tells how far apart two colours look.

Knows nothing of shapes or pictures. Colours are (red, green, blue) integers of 0..255.
"""

import colorsys
import math

import numpy as np

RGB = tuple[int, int, int]

# Hue in degrees, saturation and value in 0..1: boxes small enough that a person gives every shade in one
# the same name.
_SHADES: dict[str, tuple[tuple[float, float], tuple[float, float], tuple[float, float]]] = {
    "red": ((354, 363), (0.85, 1.0), (0.75, 0.95)),
    "orange": ((25, 33), (0.9, 1.0), (0.94, 1.0)),
    "yellow": ((51, 57), (0.8, 1.0), (0.94, 1.0)),
    "green": ((112, 142), (0.6, 1.0), (0.5, 0.78)),
    "blue": ((212, 231), (0.75, 1.0), (0.76, 0.98)),
    "purple": ((273, 288), (0.6, 0.88), (0.52, 0.74)),
    "pink": ((328, 345), (0.32, 0.52), (0.96, 1.0)),
    "brown": ((21, 29), (0.62, 0.8), (0.36, 0.5)),
    "black": ((0, 360), (0.0, 0.1), (0.0, 0.09)),
    "white": ((0, 360), (0.0, 0.02), (0.97, 1.0)),
    "gray": ((0, 360), (0.0, 0.04), (0.45, 0.6)),
}

# X, Y and Z as weights of linear red, green and blue, each with its value for white.
_XYZ_ROWS = (
    ((0.4124, 0.3576, 0.1805), 0.9505),
    ((0.2126, 0.7152, 0.0722), 1.0),
    ((0.0193, 0.1192, 0.9505), 1.089),
)

# Below these a person may overlook a figure on its ground: found by eye on contact sheets.
MIN_COLOUR_DISTANCE = 40.0
MIN_LIGHTNESS_DISTANCE = 16.0


def hsv_to_rgb(hue_degrees: float, saturation: float, value: float) -> RGB:
    """The 8-bit colour at a hue in degrees (any turn), and a saturation and value of 0..1."""
    red, green, blue = colorsys.hsv_to_rgb((hue_degrees % 360) / 360, saturation, value)
    return round(red * 255), round(green * 255), round(blue * 255)


def draw_shade(rng: np.random.Generator, name: str) -> RGB:
    """A typical shade of the named colour. An unknown name is a `KeyError`."""
    hue, saturation, value = (rng.uniform(low, high) for low, high in _SHADES[name])
    return hsv_to_rgb(hue, saturation, value)


def to_lab(colour: RGB) -> tuple[float, float, float]:
    """CIE L*a*b* (D65) of an sRGB colour: L* is 0..100. Source: IEC 61966-2-1 and CIE 15."""
    linear = [
        channel / 255 / 12.92 if channel <= 0.04045 * 255 else ((channel / 255 + 0.055) / 1.055) ** 2.4
        for channel in colour
    ]
    f = []
    for weights, white in _XYZ_ROWS:
        share = sum(weight * channel for weight, channel in zip(weights, linear, strict=True)) / white
        f.append(share ** (1 / 3) if share > 216 / 24389 else (24389 / 27 * share + 16) / 116)
    return 116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])


def colour_distance(one: RGB, other: RGB) -> float:
    """Euclidean distance in L*a*b* (CIE 1976): about 2 is just visible, black to white is 100."""
    return math.dist(to_lab(one), to_lab(other))


def stands_out(colour: RGB, grounds: tuple[RGB, ...]) -> bool:
    """Whether a person sees the colour at once on every one of the ground's colours."""
    return all(
        colour_distance(colour, ground) >= MIN_COLOUR_DISTANCE
        and abs(to_lab(colour)[0] - to_lab(ground)[0]) >= MIN_LIGHTNESS_DISTANCE
        for ground in grounds
    )
