"""Two pictures and one question about both: the category `compare`.

Knows how to make the right answer sure by making the pair for it; single scenes come from `scenes`.
"""

import numpy as np

from training.sample import COLOURS, SHAPES, Turn
from training.second_program.picture import Scene
from training.second_program.questions import pick, with_article
from training.second_program.scenes import Kind, choose, other_colours, other_shapes, retry, scatter

_ORDINALS = ("first", "second")


def _one_each(rng: np.random.Generator, kinds: tuple[list[Kind], list[Kind]]) -> tuple[Scene, Scene]:
    """A scene of each list of kinds."""
    return retry(lambda: scatter(rng, kinds[0])), retry(lambda: scatter(rng, kinds[1]))


def _same_colour(rng: np.random.Generator) -> tuple[tuple[Scene, Scene], Turn]:
    is_same, colour = bool(rng.random() < 0.5), choose(rng, COLOURS)
    other = colour if is_same else other_colours(rng, colour, 1)[0]
    shapes = choose(rng, SHAPES), choose(rng, SHAPES)
    scenes = _one_each(rng, ([(shapes[0], colour)], [(shapes[1], other)]))
    phrasings = (
        "Do the two shapes have the same colour?",
        "Are the shapes in both pictures the same colour?",
        "Is the shape in the first picture the same colour as the one in the second?",
        "Two pictures, one shape each: is their colour the same?",
    )
    answer = f"Yes, both are {colour}." if is_same else f"No, one is {colour} and the other is {other}."
    expected = ("yes" if is_same else "no",)
    return scenes, Turn(question=pick(rng, phrasings), answer=answer, expected=expected, category="compare")


def _which_has_more(rng: np.random.Generator) -> tuple[tuple[Scene, Scene], Turn]:
    fewer = int(rng.integers(1, 5))
    more = int(rng.integers(fewer + 1, 8))
    which = int(rng.integers(2))
    counts = (more, fewer) if which == 0 else (fewer, more)

    def kinds(count: int) -> list[Kind]:
        shape, colour = choose(rng, SHAPES), choose(rng, COLOURS)
        shapes, colours = [shape, *other_shapes(rng, shape, 2)], [colour, *other_colours(rng, colour, 1)]
        return [(shapes[rng.integers(3)], colours[rng.integers(2)]) for _ in range(count)]

    first = retry(lambda: scatter(rng, kinds(counts[0]), min_radius=13.0))
    second = retry(lambda: scatter(rng, kinds(counts[1]), min_radius=13.0))
    phrasings = (
        "Which picture has more shapes?",
        "In which of the two images are there more shapes?",
        "Which one shows more shapes, the first picture or the second?",
        "Where are more shapes: in the first or in the second picture?",
    )
    answer = f"The {_ORDINALS[which]} picture has more shapes."
    turn = Turn(question=pick(rng, phrasings), answer=answer, expected=(_ORDINALS[which],), category="compare")
    return (first, second), turn


def _with_and_without(rng: np.random.Generator, shape: str, *, has_shape: bool) -> list[Kind]:
    """One to three kinds of figures, clearly told apart, the shape among them or nothing like it."""
    num_others = int(rng.integers(0 if has_shape else 1, 3))
    shapes = other_shapes(rng, shape, num_others) + ([shape] if has_shape else [])
    return [(name, choose(rng, COLOURS)) for name in shapes]


def _which_shows(rng: np.random.Generator) -> tuple[tuple[Scene, Scene], Turn]:
    shape, which = choose(rng, SHAPES), int(rng.integers(2))
    first = retry(lambda: scatter(rng, _with_and_without(rng, shape, has_shape=which == 0)))
    second = retry(lambda: scatter(rng, _with_and_without(rng, shape, has_shape=which == 1)))
    phrasings = (
        "Which picture shows the {shape}?",
        "In which picture is the {shape}, the first or the second?",
        "Which of the two images contains {a_shape}?",
        "Where is the {shape}: in the first or in the second picture?",
    )
    question = pick(rng, phrasings, shape=shape, a_shape=with_article(shape))
    answer, expected = f"The {_ORDINALS[which]} picture shows the {shape}.", (_ORDINALS[which],)
    return (first, second), Turn(question=question, answer=answer, expected=expected, category="compare")


def _in_both(rng: np.random.Generator) -> tuple[tuple[Scene, Scene], Turn]:
    shape, is_both = choose(rng, SHAPES), bool(rng.random() < 0.5)
    has = (True, True) if is_both else ((True, False), (False, True), (False, False))[rng.integers(3)]
    first = retry(lambda: scatter(rng, _with_and_without(rng, shape, has_shape=has[0])))
    second = retry(lambda: scatter(rng, _with_and_without(rng, shape, has_shape=has[1])))
    phrasings = (
        "Is there {a_shape} in both pictures?",
        "Do both images show {a_shape}?",
        "Does each of the two pictures contain {a_shape}?",
        "Can you see {a_shape} in the first picture and in the second?",
    )
    question = pick(rng, phrasings, a_shape=with_article(shape))
    answer = f"Yes, both show {with_article(shape)}." if is_both else f"No, not both show {with_article(shape)}."
    expected = ("yes" if is_both else "no",)
    return (first, second), Turn(question=question, answer=answer, expected=expected, category="compare")


def draw_compare(rng: np.random.Generator) -> tuple[tuple[Scene, Scene], Turn]:
    """Two scenes and one of four questions."""
    makers = (_same_colour, _which_has_more, _which_shows, _in_both)
    return makers[rng.integers(len(makers))](rng)
