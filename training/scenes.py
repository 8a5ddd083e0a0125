"""Pictures of coloured shapes. Knows nothing of text, charts or conversations."""

from __future__ import annotations

import random
from dataclasses import dataclass

from PIL import Image

from training.backgrounds import Size, background, finished
from training.dialogue import plural
from training.palette import contrasting
from training.sample import COLOURS, PLACES, SHAPES, Mark
from training.shapes import Style, any_style, outline, put_shape

# Pixels: from which a thing is told from the background, and one shape from another.
_SEEN_RADIUS, _NAMED_RADIUS = 11.0, 14.0
# Too alike to be told apart where ten small things must all be named right.
_ALIKE = (
    *({"pentagon", "hexagon"}, {"circle", "hexagon"}, {"circle", "ellipse"}, {"rectangle", "ellipse"}),
    *({"square", "rectangle"}, {"square", "diamond"}),
    *({"red", "orange"}, {"red", "brown"}, {"red", "pink"}, {"orange", "yellow"}, {"orange", "brown"}),
    *({"pink", "purple"}, {"blue", "purple"}, {"black", "gray"}, {"gray", "white"}, {"black", "brown"}),
)


def _unlike(names: tuple[str, ...], name: str) -> list[str]:
    """Those of the names that nobody takes for `name`."""
    return [other for other in names if other != name and {other, name} not in _ALIKE]


@dataclass(frozen=True, kw_only=True)
class Thing:
    """A shape on a picture; center and radius in pixels of that picture."""

    colour: str
    shape: str
    center: tuple[float, float]
    radius: float
    place: str | None  # None where two names would do

    @property
    def name(self) -> str:
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True, kw_only=True)
class Scene:
    image: Image.Image
    things: tuple[Thing, ...]

    @property
    def marks(self) -> list[Mark]:
        width, height = self.image.size
        return [
            Mark(
                center=(thing.center[0] / width, thing.center[1] / height),
                shape=thing.shape,
                colour=thing.colour,
                alike=(
                    sum(other.colour == thing.colour for other in self.things),
                    sum(other.shape == thing.shape for other in self.things),
                    sum(other.name == thing.name for other in self.things),
                ),
            )
            for thing in self.things
        ]


def place_of(center: tuple[float, float], size: Size) -> str | None:
    """The name of the ninth of the picture that `center` is in; None near a border between two ninths."""
    names = []
    for position, extent in zip(center, size, strict=True):
        share = position / extent * 3
        if abs(share - 1) < 0.1 or abs(share - 2) < 0.1:
            return None
        names.append(int(min(2, share)))
    return PLACES[names[1] * 3 + names[0]]


def single(rng: random.Random, size: Size, *, is_placed: bool = False, kind: tuple[str, str] | None = None) -> Scene:
    """One shape: anywhere, or in the middle; small to nearly filling the picture."""
    least = min(size)
    if is_placed or rng.random() < 0.5:
        column, row = rng.randrange(3), rng.randrange(3)
        radius = max(10.0, least * rng.uniform(0.08, 0.19))
        center = tuple(
            min(extent - radius - 1, max(radius + 1, extent * (part + rng.uniform(0.16, 0.84)) / 3))
            for part, extent in ((column, size[0]), (row, size[1]))
        )
    else:
        radius = least * rng.uniform(0.12, 0.48)
        center = tuple(rng.uniform(radius, extent - radius) if rng.random() < 0.6 else extent / 2 for extent in size)
    kinds = [kind or (rng.choice(COLOURS), rng.choice(SHAPES))]
    return _drawn(rng, size, kinds, [(center[0], center[1], radius)])


def several(rng: random.Random, size: Size, kinds: list[tuple[str, str]], *, least: float = _SEEN_RADIUS) -> Scene:
    """A scene of the given (colour, shape) kinds, none touching: strewn, in a row, or on a grid.

    `least` is the smallest radius in pixels.
    """
    return _drawn(rng, size, kinds, _layout(rng, size, len(kinds), least))


def varied(rng: random.Random, size: Size) -> Scene:
    """Two to five things that differ in colour and shape."""
    number = rng.choice((2, 2, 3, 3, 3, 4, 5))
    kinds = list(zip(rng.sample(COLOURS, number), rng.sample(SHAPES, number), strict=True))
    if rng.random() < 0.25:  # two of one colour or one shape
        kinds[1] = (kinds[0][0], kinds[1][1]) if rng.random() < 0.5 else (kinds[1][0], kinds[0][1])
    return several(rng, size, kinds)


def counted(rng: random.Random, size: Size) -> tuple[Scene, str, int]:
    """A scene to count in, what to count ("red circles"), and how many there are, 0 to 9."""
    number = rng.choice((0, 1, 1, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 5, 6, 6, 6, 7, 7, 8, 8, 9, 9))
    colour, shape = rng.choice(COLOURS), rng.choice(SHAPES)
    is_tight = size[0] * size[1] < (3.3 * _NAMED_RADIUS) ** 2 * (number + 1)
    kind = rng.random() * (0.37 if is_tight else 1.0)
    if kind < 0.27:  # all alike, or of one shape in many colours
        colours = [colour] * number if rng.random() < 0.65 else [rng.choice(COLOURS) for _ in range(number)]
        scene = several(rng, size, [(one, shape) for one in colours])
        things = any_thing(rng) if rng.random() < 0.35 else plural(shape)
        return scene, things, number
    if kind < 0.37:  # a mixture, all counted
        scene = several(rng, size, [(rng.choice(COLOURS), rng.choice(SHAPES)) for _ in range(number)])
        return scene, any_thing(rng), number
    room = max(number + 1, int(size[0] * size[1] / (3.3 * _NAMED_RADIUS) ** 2))
    others = rng.randint(1, max(1, min(6, 10 - number, room - number)))
    other_shapes, other_colours = _unlike(SHAPES, shape), _unlike(COLOURS, colour)
    if kind < 0.6:  # by shape
        one_colour = rng.random() < 0.3
        other = rng.choice(other_shapes)
        kinds = [(colour if one_colour else rng.choice(COLOURS), shape) for _ in range(number)]
        kinds += [
            (colour if one_colour else rng.choice(COLOURS), rng.choice((other, rng.choice(other_shapes))))
            for _ in range(others)
        ]
        return several(rng, size, kinds, least=_NAMED_RADIUS), plural(shape), number
    if kind < 0.8:  # by colour
        other = rng.choice(other_colours)
        kinds = [(colour, rng.choice(SHAPES)) for _ in range(number)]
        kinds += [(rng.choice((other, rng.choice(other_colours))), rng.choice(SHAPES)) for _ in range(others)]
        return several(rng, size, kinds), f"{colour} {any_thing(rng)}", number
    kinds = [(colour, shape)] * number  # by both
    for _ in range(others):
        kinds.append((colour, rng.choice(other_shapes)) if rng.random() < 0.5 else (rng.choice(other_colours), shape))
    return several(rng, size, kinds, least=_NAMED_RADIUS), f"{colour} {plural(shape)}", number


def any_thing(rng: random.Random) -> str:
    return rng.choice(("shapes", "shapes", "objects", "figures", "things", "items", "symbols"))


def _layout(rng: random.Random, size: Size, number: int, least: float) -> list[tuple[float, float, float]]:
    """Centers and radii (x, y, r) of `number` things that keep apart and inside the picture; r of at least `least`,
    or as large as there is room for."""
    if number == 0:
        return []
    return (_on_grid(rng, size, number, least) if rng.random() < 0.45 else None) or _strewn(rng, size, number, least)


def _on_grid(rng: random.Random, size: Size, number: int, least: float) -> list[tuple[float, float, float]] | None:
    """In rows and columns, more or less; None where the cells of the chosen grid are too small."""
    width, height = size
    columns = 3 if rng.random() < 0.5 and number > 2 else rng.randint(1, number)
    columns = max(1, min(number, round(columns * (1.0 if width > 0.6 * height else 0.6))))
    rows = -(-number // columns)
    if rng.random() < 0.3:
        rows, columns = max(rows, 3), max(columns, 3)
    cell = min(width / columns, height / rows)
    if cell * 0.28 < least:
        return None
    cells = [(column, row) for row in range(rows) for column in range(columns)]
    chosen = cells[:number] if rng.random() < 0.5 else rng.sample(cells, number)
    share = rng.uniform(0.28, 0.44)
    jitter = max(0.0, 0.47 - share) * rng.random()
    spots = []
    for column, row in chosen:
        radius = max(least, cell * share * (rng.uniform(0.7, 1.0) if rng.random() < 0.5 else 1.0))
        x = (column + 0.5) * width / columns + rng.uniform(-jitter, jitter) * width / columns
        y = (row + 0.5) * height / rows + rng.uniform(-jitter, jitter) * height / rows
        spots.append((x, y, radius))
    return spots


def _strewn(rng: random.Random, size: Size, number: int, least: float) -> list[tuple[float, float, float]]:
    """Anywhere, none touching; begun again, a little smaller, until all have found a place."""
    width, height = size
    area = (width * height / number) ** 0.5
    largest = min(min(size) * 0.4, area * rng.uniform(0.22, 0.42))
    is_even = rng.random() < 0.4
    while True:
        placed: list[tuple[float, float, float]] = []
        for _ in range(40 * number):
            radius = max(least, largest * (1.0 if is_even else rng.uniform(0.55, 1.0)))
            x, y = rng.uniform(radius + 2, width - radius - 2), rng.uniform(radius + 2, height - radius - 2)
            if all((x - a) ** 2 + (y - b) ** 2 > (radius + r + 3) ** 2 for a, b, r in placed):
                placed.append((x, y, radius))
                if len(placed) == number:
                    return placed
        largest, least = largest * 0.85, least * (0.94 if largest <= least else 1.0)


def _drawn(
    rng: random.Random, size: Size, kinds: list[tuple[str, str]], spots: list[tuple[float, float, float]]
) -> Scene:
    for _ in range(4):
        image, papers = background(rng, size)
        colours = {name: contrasting(rng, name, papers) for name, _ in kinds}
        if None not in colours.values():
            break
    else:
        base = (255, 255, 255) if "white" not in colours else (60, 70, 60) if "gray" not in colours else (20, 60, 60)
        image, papers = Image.new("RGB", size, base), [base]
        colours = {name: contrasting(rng, name, papers, least=70) for name, _ in kinds}
    style = any_style(rng)
    things = []
    is_mixed = rng.random() < 0.15
    for (colour, shape), (x, y, radius) in zip(kinds, spots, strict=True):
        tone = colours[colour]
        if tone is None:
            tone = contrasting(rng, colour, papers, least=30) or (255, 255, 255)
        own: Style = any_style(rng) if is_mixed else style
        put_shape(rng, image, outline(rng, shape, own.turn), (x, y), radius, tone, own, papers[0])
        things.append(Thing(colour=colour, shape=shape, center=(x, y), radius=radius, place=place_of((x, y), size)))
    return Scene(image=finished(rng, image), things=tuple(things))
