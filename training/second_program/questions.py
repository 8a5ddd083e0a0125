"""How people ask about figures, and what is right to say.

Knows wording alone: it is told the facts. Every function gives one turn; `expected` holds lower-case
canonical words.
"""

import numpy as np

from training.sample import Turn

_PLURALS = {"cross": "crosses"}


def plural(shape: str) -> str:
    """The name of several such shapes."""
    return _PLURALS.get(shape, f"{shape}s")


def with_article(noun: str) -> str:
    """The noun with "a" or "an" before it."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def pick(rng: np.random.Generator, phrasings: tuple[str, ...], **words: str) -> str:
    """One of the phrasings, gaps filled, in either spelling of "colour", now and then in a hasty hand."""
    text = phrasings[rng.integers(len(phrasings))].format(**words)
    if rng.random() < 0.5:
        text = text.replace("colour", "color")
    if rng.random() < 0.1:
        text = text[0].lower() + text[1:].rstrip("?.")
    return text


def ask_colour(rng: np.random.Generator, category: str, *, shape: str, colour: str, is_alone: bool) -> Turn:
    """The colour of the only figure of that shape."""
    named = (
        "What colour is the {shape}?",
        "What is the colour of the {shape}?",
        "Which colour does the {shape} have?",
        "Tell me the colour of the {shape}.",
        "Can you say what colour the {shape} is?",
        "The {shape} in this picture: what colour is it?",
    )
    unnamed = (
        "What colour is the shape?",
        "What colour is this shape?",
        "Which colour is the figure drawn in?",
    )
    question = pick(rng, named + unnamed if is_alone else named, shape=shape)
    return Turn(question=question, answer=f"The {shape} is {colour}.", expected=(colour,), category=category)


def ask_shape(rng: np.random.Generator, category: str, *, shape: str, colour: str, is_alone: bool) -> Turn:
    """The shape of the only figure of that colour."""
    named = (
        "What shape is the {colour} one?",
        "What shape is the {colour} thing?",
        "Which shape is {colour}?",
        "What is the {colour} shape called?",
        "Name the {colour} shape.",
        "There is something {colour} in the picture. What shape does it have?",
    )
    unnamed = (
        "What shape is this?",
        "What shape is it?",
        "Which shape do you see?",
        "Name the shape in the picture.",
        "What kind of shape is shown here?",
    )
    question = pick(rng, unnamed if is_alone and rng.random() < 0.7 else named, colour=colour)
    return Turn(question=question, answer=f"It is {with_article(shape)}.", expected=(shape,), category=category)


def ask_place(rng: np.random.Generator, category: str, *, shape: str, place: str, is_alone: bool) -> Turn:
    """The place of the only figure of that shape."""
    named = (
        "Where is the {shape}?",
        "Where in the picture is the {shape}?",
        "In which part of the image is the {shape}?",
        "Where can I find the {shape}?",
        "Whereabouts is the {shape} placed?",
        "What is the position of the {shape}?",
    )
    unnamed = ("Where is the shape?", "Where in the image is the shape?", "Where has the shape been drawn?")
    question = pick(rng, named + unnamed if is_alone else named, shape=shape)
    where = "in the center" if place == "center" else f"at the {place}"
    return Turn(question=question, answer=f"The {shape} is {where}.", expected=(place,), category=category)


def ask_count(rng: np.random.Generator, category: str, *, things: str, count: int) -> Turn:
    """How many of the named things there are."""
    phrasings = (
        "How many {things} are there?",
        "How many {things} do you see?",
        "How many {things} can you count?",
        "Count the {things}.",
        "What is the number of {things} in the picture?",
        "Please count the {things} in this image.",
    )
    question = pick(rng, phrasings, things=things)
    return Turn(
        question=question,
        answer=f"The number of {things} is {count}.",
        expected=(str(count),),
        category=category,
    )


def ask_nothing(rng: np.random.Generator, category: str) -> Turn:
    """What a picture of nothing shows."""
    phrasings = (
        "What is in this picture?",
        "What do you see?",
        "What does the image show?",
        "Describe the picture.",
        "Can you tell me what this is?",
        "What can be seen here?",
    )
    answer = "I see nothing that I know."
    return Turn(question=pick(rng, phrasings), answer=answer, expected=("nothing",), category=category)
