"""What a drawn sample is, the vocabulary of its answers, and when an answer counts as right.

Knows nothing of how pictures are drawn or questions are worded: two independent drawing programs share this
file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from PIL import Image

CATEGORIES = ("colour", "shape", "place", "count", "read", "compare", "chart", "second_turn", "nothing")
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white", "gray")
SHAPES = (
    "circle",
    "square",
    "triangle",
    "rectangle",
    "star",
    "ellipse",
    "diamond",
    "hexagon",
    "pentagon",
    "cross",
    "heart",
    "arrow",
)
PLACES = (
    "top left",
    "top",
    "top right",
    "left",
    "center",
    "right",
    "bottom left",
    "bottom",
    "bottom right",
)
NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
NOTHING = "nothing"

_SYNONYMS = {
    "grey": "gray",
    "violet": "purple",
    "oval": "ellipse",
    "rhombus": "diamond",
    "plus": "cross",
    "centre": "center",
    "middle": "center",
}
_NOTHING_PHRASES = re.compile(
    r"\b(nothing|no (shapes?|objects?|text|words?|picture)|not? (sure|know|see|recogni[sz]e|anything)"
    r"|(do not|don't|cannot|can't|can not) (see|know|recogni[sz]e|make out|tell|find|read)"
    r"|blank|empty|unknown)\b"
)
_CLASSES: tuple[tuple[str, ...], ...] = (COLOURS, SHAPES, ("yes", "no"), ("first", "second"), PLACES)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One question and its answer.

    `answer` is the sentence to train on, or None where a program only evaluates. `expected` holds the
    keywords
    that a right answer contains: a colour, shape or place by its canonical name, a count in digits ("3"), the
    printed text, "yes" or "no", "first" or "second" (of two pictures), a bar's label or its value in digits,
    or "nothing" for a picture that shows nothing nameable.
    """

    question: str
    answer: str | None
    expected: tuple[str, ...]
    category: str


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Something at one place of a picture: a shape, or a part of a bar (its label, its value, its middle)."""

    center: tuple[float, float]  # shares of the picture's width and height
    shape: str | None = None
    colour: str | None = None
    value: int | None = None
    label: str | None = None
    alike: tuple[int, int, int] | None = None  # how many things have its colour, its shape, both; itself counted


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One conversation: its RGB pictures, all sent with the first question, and its turns in order.

    `marks` says of every picture what lies where, for training; None of a picture, or no entry for it, says nothing.
    """

    images: list[Image.Image]
    turns: list[Turn]
    marks: Sequence[Sequence[Mark] | None] = ()


class DrawingProgram(Protocol):
    """A module that draws: the same seed and category always give the same sample."""

    def draw(self, seed: int, category: str) -> Sample: ...


def is_right(answer: str, expected: tuple[str, ...]) -> bool:
    """Whether `answer` holds every expected keyword, and no other keyword of the same classes.

    Classes are colours, shapes, places, yes/no, first/second and whole numbers; any other keyword is text,
    which
    must occur as a whole word, whatever its case. Common synonyms count ("grey", "oval", "middle", "three"
    for 3).
    """
    text = _normalise(answer)
    wanted = [_canonical(keyword) for keyword in expected]
    for keyword in wanted:
        if keyword == NOTHING:
            if not _NOTHING_PHRASES.search(text):
                return False
            continue
        if _is_count(keyword):
            if _numbers(text) != {int(word) for word in wanted if _is_count(word)}:
                return False
            continue
        group = next((names for names in _CLASSES if keyword in names), None)
        if group is None:
            if not re.search(rf"(?<!\w){re.escape(keyword)}(?!\w)", text):
                return False
        elif _found(text, group) != {word for word in wanted if word in group}:
            return False
    return True


def _is_count(keyword: str) -> bool:
    return keyword.isdecimal() and len(keyword) <= 3 and str(int(keyword)) == keyword


def _normalise(text: str) -> str:
    text = re.sub(r"[-_]+", " ", text.lower())
    text = re.sub(r"\bupper\b", "top", text)
    text = re.sub(r"\blower\b", "bottom", text)
    return re.sub(r"\s+", " ", text)


def _canonical(keyword: str) -> str:
    word = _normalise(keyword).strip()
    return _SYNONYMS.get(word, word)


def _found(text: str, group: tuple[str, ...]) -> set[str]:
    """The canonical keywords of `group` in `text`; the longest wins, so "top left" is not also "top"."""
    names = sorted({*group, *(word for word, name in _SYNONYMS.items() if name in group)}, key=len, reverse=True)
    pattern = rf"\b({'|'.join(re.escape(name) for name in names)})(?:es|s)?\b"
    return {_SYNONYMS.get(match, match) for match in re.findall(pattern, text)}


def _numbers(text: str) -> set[int]:
    """Whole numbers in digits; where there are none, those written as words up to ten."""
    digits = {int(number) for number in re.findall(r"\d+", text)}
    if digits:
        return digits
    return {value for value, word in enumerate(NUMBER_WORDS) if re.search(rf"\b{word}\b", text)}
