"""Figures on a ground, and how they become pixels.

Knows how to put a figure down with smooth edges; knows no questions and chooses no place. Coverage is
computed by testing nine points of each pixel against the figure's region; labels tell tests which pixel
belongs to which figure.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

from training.second_program.ground import Ground, Pixels, paint_ground
from training.second_program.palette import RGB
from training.second_program.shapes import Reals, contains

_POINTS_A_SIDE = 3

# "rimmed" has a thin darker edge; "hollow" is a thick line with the ground inside.
Style = Literal["solid", "rimmed", "hollow"]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One shape of one colour: centre and radius (of the circle around it) in pixels, turn in radians."""

    shape: str
    colour: str
    rgb: RGB
    x: float
    y: float
    radius: float
    turn: float = 0.0
    proportion: float = 0.5
    style: Style = "solid"


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Figures that do not touch, on a ground."""

    width: int
    height: int
    ground: Ground
    figures: tuple[Figure, ...]


def _region(figure: Figure, x: Reals, y: Reals) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Which points the figure covers, and which of them its rim covers."""
    u: Reals
    v: Reals
    right, up = (x - figure.x) / figure.radius, (figure.y - y) / figure.radius
    u = right * math.cos(figure.turn) + up * math.sin(figure.turn)
    v = up * math.cos(figure.turn) - right * math.sin(figure.turn)
    whole = contains(figure.shape, figure.proportion, u, v)
    if figure.style == "solid":
        return whole, np.zeros_like(whole)
    shrink = 0.6 if figure.style == "hollow" else 0.88
    u, v = u / np.float32(shrink), v / np.float32(shrink)
    inner = contains(figure.shape, figure.proportion, u, v)
    return (whole & ~inner, np.zeros_like(whole)) if figure.style == "hollow" else (whole, whole & ~inner)


def blend(pixels: Pixels, alpha: Pixels, rgb: RGB, left: int, top: int) -> None:
    """Lays a colour over part of the picture in place.

    Alpha is `[height, width]` of 0..1 and must lie inside.
    """
    height, width = alpha.shape
    part = pixels[top : top + height, left : left + width]
    part += alpha[..., None] * (np.asarray(rgb, dtype=np.float32) - part)


def _share(points: npt.NDArray[np.bool_]) -> Pixels:
    """The share of each pixel's points that are set."""
    n = _POINTS_A_SIDE
    height, width = points.shape[0] // n, points.shape[1] // n
    rows = points.view(np.uint8).reshape(height, n, width * n).sum(axis=1, dtype=np.uint8)
    counts: npt.NDArray[np.uint8] = rows.reshape(height, width, n).sum(axis=2, dtype=np.uint8)
    return counts * np.float32(1 / (n * n))


def paint_scene(scene: Scene) -> tuple[Image.Image, npt.NDArray[np.uint8]]:
    """The picture, and labels `[height, width]`: 0 for the ground, else the figure's index plus one.

    A figure's label covers the pixels that its own colour fills for the most part, rim included.
    """
    pixels = paint_ground(scene.ground, scene.width, scene.height)
    labels = np.zeros((scene.height, scene.width), dtype=np.uint8)
    for index, figure in enumerate(scene.figures, start=1):
        left, right = max(0, int(figure.x - figure.radius) - 1), int(figure.x + figure.radius) + 2
        top, bottom = max(0, int(figure.y - figure.radius) - 1), int(figure.y + figure.radius) + 2
        width, height = min(right, scene.width) - left, min(bottom, scene.height) - top
        n = _POINTS_A_SIDE
        y = np.linspace(top, top + height, height * n, endpoint=False, dtype=np.float32)[:, None]
        x = np.linspace(left, left + width, width * n, endpoint=False, dtype=np.float32)[None, :]
        half = np.float32(0.5 / n)
        covered, rim = _region(figure, x + half, y + half)
        alpha = _share(covered)
        blend(pixels, alpha, figure.rgb, left, top)
        if figure.style == "rimmed":
            edge = tuple(round(channel * 0.35) for channel in figure.rgb)
            blend(pixels, _share(rim), (edge[0], edge[1], edge[2]), left, top)
        labels[top : top + height, left : left + width][alpha > 0.5] = index
    return to_image(pixels), labels


def to_image(pixels: Pixels) -> Image.Image:
    """An RGB picture of `[height, width, 3]` floats, rounded and clipped to 0..255."""
    return Image.fromarray(np.clip(np.rint(pixels), 0, 255).astype(np.uint8))
