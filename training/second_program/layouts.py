"""Where figures go: spots that neither touch nor leave the picture.

Knows room and distance alone: no shapes, colours or questions. A spot is (x, y, radius) in pixels, y
downwards.
"""

import math

import numpy as np

from training.sample import PLACES

Spot = tuple[float, float, float]

# Pixels. Smaller figures can be counted but hardly named: who asks for names asks for a larger radius.
MIN_RADIUS = 12.0
MAX_RADIUS = 110.0


def spot_in_place(rng: np.random.Generator, width: int, height: int, place: str) -> Spot:
    """A spot wholly inside the place's ninth of the picture."""
    row, column = divmod(PLACES.index(place), 3)
    cell_width, cell_height = width / 3, height / 3
    room = min(cell_width, cell_height) / 2 - 1
    radius = min(MAX_RADIUS, room * rng.uniform(0.72, 1.0))
    x = rng.uniform(column * cell_width + radius, (column + 1) * cell_width - radius)
    y = rng.uniform(row * cell_height + radius, (row + 1) * cell_height - radius)
    if place == "center":
        # "Center" is where the middle is, so it keeps nearer to it than its ninth demands.
        x, y = (x + width / 2) / 2, (y + height / 2) / 2
    return x, y, radius


def _cut(rng: np.random.Generator, box: tuple[float, float, float, float], parts: int) -> list[Spot]:
    """Cuts the box across its longer side until every part is one, then puts a spot in each part."""
    left, top, right, bottom = box
    width, height = right - left, bottom - top
    if parts == 1:
        room = min(width, height) / 2 - 2
        radius = min(MAX_RADIUS, room * rng.uniform(0.6, 0.95))
        if radius <= 0:
            return [(left, top, 0.0)]
        return [
            (
                rng.uniform(left + radius + 2, right - radius - 2),
                rng.uniform(top + radius + 2, bottom - radius - 2),
                radius,
            )
        ]
    first = parts // 2 if rng.random() < 0.5 else parts - parts // 2
    share = first / parts + rng.uniform(-0.04, 0.04)
    if width >= height:
        middle = left + width * share
        return _cut(rng, (left, top, middle, bottom), first) + _cut(rng, (middle, top, right, bottom), parts - first)
    middle = top + height * share
    return _cut(rng, (left, top, right, middle), first) + _cut(rng, (left, middle, right, bottom), parts - first)


def _scatter(rng: np.random.Generator, width: int, height: int, num_spots: int) -> list[Spot]:
    """Drops spots at random and takes those with room around them; may give fewer than asked."""
    ideal = math.sqrt(width * height / max(num_spots, 1)) / 2
    largest = min(MAX_RADIUS, ideal * 0.8, min(width, height) / 2 - 2)
    spots: list[Spot] = []
    for attempt in range(num_spots * 30):
        if len(spots) == num_spots:
            break
        radius = max(MIN_RADIUS, largest * rng.uniform(0.55, 1.0) * (1 - attempt / (num_spots * 60)))
        if 2 * radius + 4 > min(width, height):
            break
        x, y = rng.uniform(radius + 2, width - radius - 2), rng.uniform(radius + 2, height - radius - 2)
        if all(math.hypot(x - x_, y - y_) > radius + radius_ + 4 for x_, y_, radius_ in spots):
            spots.append((x, y, radius))
    return spots


def _line(rng: np.random.Generator, width: int, height: int, num_spots: int) -> list[Spot]:
    """Equal spots in a row or, in a tall picture, a column."""
    along, across = max(width, height), min(width, height)
    step = along / num_spots
    radius = min(MAX_RADIUS, min(step, across) / 2 * rng.uniform(0.6, 0.9) - 1)
    level = rng.uniform(radius + 2, across - radius - 2)
    ends = [(step * (i + 0.5), level, radius) for i in range(num_spots)]
    return ends if width >= height else [(y, x, r) for x, y, r in ends]


def draw_spots(
    rng: np.random.Generator, width: int, height: int, num_spots: int, *, min_radius: float = MIN_RADIUS
) -> list[Spot] | None:
    """`num_spots` spots in one of three layouts, in random order; none where the layout found no room."""
    if num_spots == 0:
        return []
    match rng.choice(["cut", "scatter", "line"], p=[0.4, 0.45, 0.15]):
        case "cut":
            spots = _cut(rng, (0.0, 0.0, float(width), float(height)), num_spots)
        case "scatter":
            spots = _scatter(rng, width, height, num_spots)
        case _:
            spots = _line(rng, width, height, num_spots)
    if len(spots) < num_spots or min(radius for _, _, radius in spots) < min_radius:
        return None
    return [spots[i] for i in rng.permutation(num_spots)]
