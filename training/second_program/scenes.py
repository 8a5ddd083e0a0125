"""Pictures of figures: which figures, which colours, and what is asked about one picture.

Knows what keeps a picture unambiguous: no two look-alike shapes together, one shade a colour, every figure
clear of its ground. Each `draw_*` gives the scene together with its turn, so that tests can check the one
against the other.
"""

from collections.abc import Callable

import numpy as np

from training.sample import COLOURS, PLACES, SHAPES, Turn
from training.second_program.ground import draw_ground_for, draw_size
from training.second_program.layouts import Spot, draw_spots, spot_in_place
from training.second_program.palette import draw_shade
from training.second_program.picture import Figure, Scene, Style
from training.second_program.questions import ask_colour, ask_count, ask_place, ask_shape, plural
from training.second_program.shapes import draw_turn, lookalikes

Kind = tuple[str, str]  # shape, colour

# Radius in pixels from which every shape is told from every other by eye.
NAMED_RADIUS = 17.0
_HOLLOW_RADIUS = 22.0
# Edges are made by shrinking a shape towards its centre, which leaves long arms without one.
_THIN_SHAPES = frozenset({"arrow", "cross"})
_MAX_ATTEMPTS = 500


def retry(attempt: Callable[[], Scene | None]) -> Scene:
    """The first scene that comes out; an attempt gives none where room or contrast is missing."""
    for _ in range(_MAX_ATTEMPTS):
        scene = attempt()
        if scene is not None:
            return scene
    raise AssertionError(f"no scene in {_MAX_ATTEMPTS} attempts: what is asked for leaves too little room or contrast")


def choose(rng: np.random.Generator, names: tuple[str, ...]) -> str:
    """One of the names, all equally likely."""
    return names[rng.integers(len(names))]


def other_shapes(rng: np.random.Generator, shape: str, num_shapes: int) -> list[str]:
    """Up to `num_shapes` shapes that differ clearly from the given one and from each other."""
    chosen: list[str] = []
    taken = set(lookalikes(shape))
    for i in rng.permutation(len(SHAPES)):
        if len(chosen) < num_shapes and SHAPES[i] not in taken:
            chosen.append(SHAPES[i])
            taken |= lookalikes(SHAPES[i])
    return chosen


def other_colours(rng: np.random.Generator, colour: str, num_colours: int) -> list[str]:
    """`num_colours` different colours, none of them the given one."""
    rest = [name for name in COLOURS if name != colour]
    return [rest[i] for i in rng.permutation(len(rest))[:num_colours]]


def _draw_style(rng: np.random.Generator, shape: str, radius: float) -> Style:
    chance = rng.random()
    if chance < 0.65 or shape in _THIN_SHAPES:
        return "solid"
    return "hollow" if chance > 0.85 and radius >= _HOLLOW_RADIUS and shape != "star" else "rimmed"


def compose(
    rng: np.random.Generator, width: int, height: int, kinds: list[Kind], spots: list[Spot] | None
) -> Scene | None:
    """A scene with one figure of each kind on the spots.

    None where there are no spots or no ground suits all colours.
    """
    if spots is None:
        return None
    shades = {colour: draw_shade(rng, colour) for colour in sorted({colour for _, colour in kinds})}
    ground = draw_ground_for(rng, tuple(shades.values()))
    if ground is None:
        return None
    figures = []
    for (shape, colour), (x, y, radius) in zip(kinds, spots, strict=True):
        figures.append(
            Figure(
                shape=shape,
                colour=colour,
                rgb=shades[colour],
                x=x,
                y=y,
                radius=radius,
                turn=draw_turn(rng, shape),
                proportion=float(rng.random()),
                style=_draw_style(rng, shape, radius),
            )
        )
    return Scene(width=width, height=height, ground=ground, figures=tuple(figures))


def scatter(rng: np.random.Generator, kinds: list[Kind], *, min_radius: float = NAMED_RADIUS) -> Scene | None:
    """A scene of any size with the kinds on free spots, the larger the more of them."""
    width, height = draw_size(rng, min_side=112 + 12 * max(0, len(kinds) - 2))
    return compose(rng, width, height, kinds, draw_spots(rng, width, height, len(kinds), min_radius=min_radius))


def draw_colour(rng: np.random.Generator) -> tuple[Scene, Turn]:
    """One to four different shapes; the colour of one is asked."""
    shape, colour, num_others = choose(rng, SHAPES), choose(rng, COLOURS), int(rng.integers(0, 4))

    def attempt() -> Scene | None:
        others = [(other, choose(rng, COLOURS)) for other in other_shapes(rng, shape, num_others)]
        return scatter(rng, [(shape, colour), *others])

    return retry(attempt), ask_colour(rng, "colour", shape=shape, colour=colour, is_alone=num_others == 0)


def draw_shape(rng: np.random.Generator) -> tuple[Scene, Turn]:
    """One to four figures of different colours; the shape of one is asked."""
    shape, colour, num_others = choose(rng, SHAPES), choose(rng, COLOURS), int(rng.choice([0, 0, 1, 2, 3]))

    def attempt() -> Scene | None:
        others = zip(other_shapes(rng, shape, num_others), other_colours(rng, colour, num_others), strict=True)
        return scatter(rng, [(shape, colour), *others])

    return retry(attempt), ask_shape(rng, "shape", shape=shape, colour=colour, is_alone=num_others == 0)


def place_figures(rng: np.random.Generator, kinds: list[Kind], places: list[str]) -> Scene | None:
    """A scene whose figures lie each in its own ninth of the picture."""
    width, height = draw_size(rng, min_side=140)
    spots = [spot_in_place(rng, width, height, place) for place in places]
    return compose(rng, width, height, kinds, spots)


def draw_place(rng: np.random.Generator) -> tuple[Scene, Turn]:
    """One to three different shapes in different places; the place of one is asked."""
    shape, colour, place = choose(rng, SHAPES), choose(rng, COLOURS), choose(rng, PLACES)
    num_others = int(rng.choice([0, 0, 1, 2]))
    free = [other for other in PLACES if other != place]

    def attempt() -> Scene | None:
        others = [(other, choose(rng, COLOURS)) for other in other_shapes(rng, shape, num_others)]
        places = [free[i] for i in rng.permutation(len(free))[:num_others]]
        return place_figures(rng, [(shape, colour), *others], [place, *places])

    return retry(attempt), ask_place(rng, "place", shape=shape, place=place, is_alone=num_others == 0)


def draw_count(rng: np.random.Generator) -> tuple[Scene, Turn]:
    """Up to ten figures; all of them, those of a shape or those of a colour are to be counted: 0 to 9."""
    count, shape, colour = int(rng.integers(0, 10)), choose(rng, SHAPES), choose(rng, COLOURS)
    about = str(rng.choice(["all", "shape", "colour"]))
    num_others = 0 if about == "all" else int(rng.integers(1 if count == 0 else 0, min(4, 10 - count) + 1))
    things = {"all": "shapes", "shape": plural(shape), "colour": f"{colour} shapes"}[about]
    min_radius = 15.0 if about == "shape" else 12.0

    def attempt() -> Scene | None:
        shapes = [shape, *other_shapes(rng, shape, 2)]
        colours = [colour, *other_colours(rng, colour, 2)]
        kinds = []
        for i in range(count + num_others):
            is_counted = i < count
            # What is counted by shape may have any colour, and the other way round.
            first_shape = 1 if about == "shape" and not is_counted else 0
            first_colour = 1 if about == "colour" and not is_counted else 0
            last_shape = 1 if about == "shape" and is_counted else 3
            last_colour = 1 if about == "colour" and is_counted else 3
            kinds.append(
                (
                    shapes[rng.integers(first_shape, last_shape)],
                    colours[rng.integers(first_colour, last_colour)],
                )
            )
        return scatter(rng, kinds, min_radius=min_radius)

    return retry(attempt), ask_count(rng, "count", things=things, count=count)
