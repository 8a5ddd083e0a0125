"""The twelve shapes as regions of the plane: a point is inside or not.

Knows geometry alone: no pixels, colours or places. Coordinates are `u` to the right and `v` upwards; every
shape fits the unit circle around the origin. `proportion` of 0..1 picks one of the forms that still bear
the same name.
"""

import math

import numpy as np
import numpy.typing as npt

from training.sample import SHAPES

Reals = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]

# Within a group people may disagree about a name (a square is a rectangle), so one picture holds one of
# each at most.
LOOKALIKES: tuple[frozenset[str], ...] = (
    frozenset({"circle", "ellipse"}),
    frozenset({"square", "rectangle", "diamond"}),
    frozenset({"pentagon", "hexagon"}),
)

# Turns in degrees: (one of these, plus or minus this much) under which the shape keeps its name.
_TURNS: dict[str, tuple[tuple[int, ...], int]] = {
    "circle": ((0,), 180),
    "square": ((0,), 9),
    "triangle": ((0, 0, 180), 18),
    "rectangle": ((0, 90), 10),
    "star": ((0,), 30),
    "ellipse": ((0, 90), 15),
    "diamond": ((0,), 6),
    "hexagon": ((0, 30), 6),
    "pentagon": ((0,), 10),
    "cross": ((0,), 8),
    "heart": ((0,), 14),
    "arrow": ((0, 90, 180, 270), 14),
}


def lookalikes(shape: str) -> frozenset[str]:
    """The shape itself with those it must not share a picture with."""
    return next((group for group in LOOKALIKES if shape in group), frozenset({shape}))


def draw_turn(rng: np.random.Generator, shape: str) -> float:
    """A rotation in radians, counter-clockwise, under which the shape is still called by its name."""
    around, spread = _TURNS[shape]
    return math.radians(around[rng.integers(len(around))] + rng.uniform(-spread, spread))


def _inside_polygon(corners: list[tuple[float, float]], u: Reals, v: Reals) -> Mask:
    """Even-odd rule: a ray to the right crosses the border an odd number of times."""
    inside = np.zeros(u.shape, dtype=np.bool_)
    for (u0, v0), (u1, v1) in zip(corners, corners[1:] + corners[:1], strict=True):
        if v0 == v1:
            continue
        crosses = (v0 > v) != (v1 > v)
        inside ^= crosses & (u < u0 + (v - v0) * (u1 - u0) / (v1 - v0))
    return inside


def _ring(num_corners: int, radii: tuple[float, ...] = (1.0,)) -> list[tuple[float, float]]:
    """Corners at equal angles from the top, their distances from the origin taken from `radii` in turn."""
    angles = [math.pi / 2 + 2 * math.pi * i / num_corners for i in range(num_corners)]
    return [
        (radii[i % len(radii)] * math.cos(angle), radii[i % len(radii)] * math.sin(angle))
        for i, angle in enumerate(angles)
    ]


def contains(shape: str, proportion: float, u: Reals, v: Reals) -> Mask:
    """Which points lie in the shape. An unknown shape is a `ValueError`."""
    match shape:
        case "circle":
            return u * u + v * v <= 1
        case "ellipse":
            stretched = v / (0.48 + 0.1 * proportion)
            return u * u + stretched * stretched <= 1
        case "square":
            return np.maximum(abs(u), abs(v)) <= math.sqrt(0.5)
        case "rectangle":
            angle = math.atan(0.38 + 0.17 * proportion)
            return (abs(u) <= math.cos(angle)) & (abs(v) <= math.sin(angle))
        case "diamond":
            return abs(u) / (0.6 + 0.1 * proportion) + abs(v) <= 1
        case "triangle":
            half_base = 0.78 + 0.12 * proportion
            return _inside_polygon([(0, 1), (half_base, -0.42), (-half_base, -0.42)], u, v)
        case "pentagon":
            return _inside_polygon(_ring(5), u, v)
        case "hexagon":
            return _inside_polygon(_ring(6), u, v)
        case "star":
            return _inside_polygon(_ring(10, (1.0, 0.38 + 0.08 * proportion)), u, v)
        case "cross":
            arm = 0.24 + 0.08 * proportion
            return (np.minimum(abs(u), abs(v)) <= arm) & (np.maximum(abs(u), abs(v)) <= 0.94)
        case "heart":
            # The sextic heart curve, moved and scaled into the unit circle.
            x, y = 1.34 * u, 1.32 * v + 0.12
            xx, yy = x * x, y * y
            rest: Reals = xx + yy - 1
            is_inside: Mask = rest * rest * rest <= xx * yy * y
            return is_inside
        case "arrow":
            shaft, neck = 0.16 + 0.06 * proportion, 0.12 - 0.1 * proportion
            head = [(1.0, 0.0), (neck, 0.66), (neck, shaft)]
            below = [(u_, -v_) for u_, v_ in reversed(head[1:])]
            return _inside_polygon([*head, (-0.95, shaft), (-0.95, -shaft), *below], u, v)
    raise ValueError(f"{shape!r} is no shape of this program; it draws {', '.join(SHAPES)}")
