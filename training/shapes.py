"""Outlines of the named shapes, and how one is put on a picture. Knows nothing of questions or layout."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFilter

from training.palette import Rgb, distance, scaled

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Style:
    """How shapes of one picture are drawn: drawing programs keep to one style within a picture."""

    finish: str  # "filled", "outline" or "bordered"
    oversampling: int  # 1 draws hard edges
    is_shaded: bool
    has_shadow: bool
    turn: float  # 0 upright, 1 freely rotated


def any_style(rng: random.Random) -> Style:
    kind = rng.random()
    return Style(
        finish="filled" if kind < 0.64 else "outline" if kind < 0.8 else "bordered",
        oversampling=rng.choice((1, 1, 2, 3)),
        is_shaded=rng.random() < 0.1,
        has_shadow=rng.random() < 0.1,
        turn=rng.choice((0.0, 0.0, 0.3, 1.0)),
    )


def outline(rng: random.Random, name: str, turn: float) -> list[Point]:
    """The shape's corners, within about the unit circle; y grows downwards. `turn` 0..1 says how freely it
    rotates.
    """
    free = rng.uniform(-180, 180)
    tilt = rng.uniform(-1, 1) * turn
    if name == "circle":
        return _ring(48)
    if name == "ellipse":
        flat = rng.uniform(0.4, 0.7)
        points = [(x, y * flat) for x, y in _ring(48)]
        return _rotated(points, rng.choice((0, 0, 90)) + (free if turn == 1 else tilt * 30))
    if name == "square":
        return _rotated([(-0.82, -0.82), (0.82, -0.82), (0.82, 0.82), (-0.82, 0.82)], tilt * 20)
    if name == "rectangle":
        flat = rng.uniform(0.38, 0.68)
        points = [(-0.95, -0.95 * flat), (0.95, -0.95 * flat), (0.95, 0.95 * flat), (-0.95, 0.95 * flat)]
        return _rotated(points, rng.choice((0, 0, 90)) + (free if turn == 1 else tilt * 20))
    if name == "triangle":
        kind = rng.random()
        if kind < 0.6:
            points = [(0.0, -1.0), (0.87, 0.5), (-0.87, 0.5)]
        elif kind < 0.9:
            wide, high = rng.uniform(0.6, 1.0), rng.uniform(0.7, 1.0)
            points = [
                (rng.choice((0.0, 0.0, -wide, wide, rng.uniform(-0.5, 0.5))), -high),
                (wide, 0.75),
                (-wide, 0.75),
            ]
        else:
            points = [(0.0, 1.0), (0.87, -0.5), (-0.87, -0.5)]
        return _rotated(points, free if turn == 1 else tilt * 60)
    if name == "diamond":
        flat = rng.uniform(0.55, 1.0)
        points = [(0.0, -1.0), (flat, 0.0), (0.0, 1.0), (-flat, 0.0)]
        return _rotated(points, (90 if rng.random() < 0.15 else 0) + tilt * 10)
    if name == "star":
        inner = rng.choice((0.38, 0.4, 0.45, 0.5, rng.uniform(0.34, 0.55)))
        spikes = 5 if rng.random() < 0.85 else rng.choice((4, 6))
        points = []
        for corner in range(2 * spikes):
            radius = 1.0 if corner % 2 == 0 else inner
            angle = math.pi * corner / spikes - math.pi / 2
            points.append((radius * math.cos(angle), radius * math.sin(angle)))
        return _rotated(points, free if turn == 1 else tilt * 40)
    if name in ("hexagon", "pentagon"):
        corners = 6 if name == "hexagon" else 5
        start = rng.choice((0.0, 0.0, 180.0 / corners))
        return _rotated(_ring(corners), start - 90 + (free if turn == 1 else tilt * 40))
    if name == "cross":
        arm = rng.uniform(0.2, 0.42)
        corners_of_arms: list[tuple[float, float]] = [
            (-arm, -1),
            (arm, -1),
            (arm, -arm),
            (1, -arm),
            (1, arm),
            (arm, arm),
            (arm, 1),
            (-arm, 1),
            (-arm, arm),
        ]
        points = [*corners_of_arms, (-1, arm), (-1, -arm), (-arm, -arm)]
        return _rotated([(x * 0.95, y * 0.95) for x, y in points], 45 if rng.random() < 0.12 else tilt * 25)
    if name == "heart":
        return _rotated(_heart(rng), tilt * 30)
    assert name == "arrow"
    shaft, head, start = rng.uniform(0.14, 0.34), rng.uniform(0.5, 0.85), rng.uniform(-0.15, 0.4)
    points = [
        (-1, -shaft),
        (start, -shaft),
        (start, -head),
        (1, 0),
        (start, head),
        (start, shaft),
        (-1, shaft),
    ]
    return _rotated(points, rng.choice((0, 0, 90, 180, 270)) + (free if turn == 1 else tilt * 30))


def put_shape(
    rng: random.Random,
    image: Image.Image,
    points: list[Point],
    center: Point,
    radius: float,
    colour: Rgb,
    style: Style,
    paper: Rgb,
) -> None:
    """Draws the outline `points`, scaled to `radius` pixels about `center`, on `image` in place."""
    over = style.oversampling
    border = 0.0
    if style.finish == "outline":
        border = max(2.5, radius * rng.uniform(0.1, 0.26))
    elif style.finish == "bordered":
        border = max(1.0, radius * rng.uniform(0.04, 0.12))
    half = int(radius + border / 2 + 3)
    left, top = round(center[0]) - half, round(center[1]) - half
    extent = 2 * half * over
    corners = [((center[0] - left + x * radius) * over, (center[1] - top + y * radius) * over) for x, y in points]
    body = Image.new("L", (extent, extent))
    line = None
    if style.finish != "outline":
        ImageDraw.Draw(body).polygon(corners, fill=255)
    if border:
        line = body if style.finish == "outline" else Image.new("L", (extent, extent))
        closed = [*corners, corners[0], corners[1]]
        ImageDraw.Draw(line).line(closed, fill=255, width=max(1, round(border * over)), joint="curve")
    if over > 1:
        body = body.reduce(over)
        line = line.reduce(over) if line is not None else None
    if style.has_shadow:
        shadow = body.filter(ImageFilter.GaussianBlur(rng.choice((0.6, 2, 3)))).point(lambda level: level * 4 // 10)
        reach = max(2, round(radius * rng.uniform(0.05, 0.14)))
        image.paste((0, 0, 0), (left + reach, top + reach), shadow)
    if style.is_shaded:
        ramp = Image.linear_gradient("L").resize(body.size)
        fill = Image.composite(
            Image.new("RGB", body.size, scaled(colour, 0.88)),
            Image.new("RGB", body.size, scaled(colour, 1.1)),
            ramp,
        )
        image.paste(fill, (left, top), body)
    else:
        image.paste(colour, (left, top), body)
    if style.finish == "bordered" and line is not None:
        image.paste(_border_colour(rng, colour, paper), (left, top), line)


def _border_colour(rng: random.Random, colour: Rgb, paper: Rgb) -> Rgb:
    choices = [(0, 0, 0), (0, 0, 0), (40, 40, 40), (255, 255, 255), scaled(colour, 0.6)]
    fitting = [choice for choice in choices if distance(choice, colour) > 90]
    return rng.choice(fitting or [(0, 0, 0)])


def _ring(corners: int) -> list[Point]:
    return [(math.cos(2 * math.pi * i / corners), math.sin(2 * math.pi * i / corners)) for i in range(corners)]


def _heart(rng: random.Random) -> list[Point]:
    if rng.random() < 0.4:  # two round lobes over a wedge
        depth = rng.uniform(0.85, 1.0)
        left = [(-0.48 + 0.5 * math.cos(a), -0.4 + 0.5 * math.sin(a)) for a in _angles(170, 360, 14)]
        right = [(0.48 + 0.5 * math.cos(a), -0.4 + 0.5 * math.sin(a)) for a in _angles(180, 370, 14)]
        return [*left, *right, (0.0, depth)]
    points = []
    for step in range(40):
        angle = 2 * math.pi * step / 40
        x = math.sin(angle) ** 3
        y = (13 * math.cos(angle) - 5 * math.cos(2 * angle) - 2 * math.cos(3 * angle) - math.cos(4 * angle)) / 16
        points.append((x * 0.98, -y))
    return points


def _angles(start: float, end: float, count: int) -> list[float]:
    return [math.radians(start + (end - start) * i / (count - 1)) for i in range(count)]


def _rotated(points: list[Point], degrees: float) -> list[Point]:
    if degrees == 0:
        return points
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return [(x * cos - y * sin, x * sin + y * cos) for x, y in points]
