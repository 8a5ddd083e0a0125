"""How questions about two pictures sent together are worded. Knows nothing of what is on them."""

from __future__ import annotations

import random
from collections.abc import Callable

from training.dialogue import say
from training.sample import Turn

BOTH = "[picture|image|photo|drawing]"
_NTH = (
    (
        "[the first|the first|the first|the 1st] [picture|image|image|photo|drawing|one]",
        "[picture|image|photo] [1|one|1|A]",
    ),
    (
        "[the second|the second|the second|the 2nd] [picture|image|image|photo|drawing|one]",
        "[picture|image|photo] [2|two|2|B]",
    ),
)
ORDINALS = ("first", "second")


def nth(rng: random.Random, index: int) -> str:
    """A template for the first (0) or the second (1) picture."""
    return _NTH[index][0] if rng.random() < 0.75 else _NTH[index][1]


def compared(question: str, answer: str, *expected: str) -> Turn:
    """A question that compares, or asks about one of the two, and its answer."""
    return Turn(question=question, answer=answer, expected=expected, category="compare")


def yes_or_no(question: str, is_so: bool) -> Turn:
    """A question that "they are" or "they are not" answers."""
    return compared(question, "Yes, they are." if is_so else "No, they are not.", "yes" if is_so else "no")


def chosen(rng: random.Random, makers: list[Callable[[], Turn | None]], turns: int) -> list[Turn]:
    """Up to `turns` different questions, each by one of the makers; None of a maker is tried again."""
    said: list[Turn] = []
    for _ in range(5 * turns):
        turn = rng.choice(makers)()
        if turn is not None and all(turn.question != earlier.question for earlier in said):
            said.append(turn)
            if len(said) == turns:
                break
    return said


def which_picture(rng: random.Random, what: str, index: int) -> Turn:
    """Asks which picture, the answer being `index`, shows `what`: a template of a noun phrase."""
    question = say(
        rng,
        (
            f"[Which|Which|What] {BOTH} [shows|shows|has|contains|includes] {{what}}?",
            f"[In|On] which {BOTH} [is|do you see|can you see|is there] {{what}}?",
            f"Which of the [two |]{BOTH}s [shows|has|contains] {{what}}?",
            f"Is {{what}} in the first or [in |]the second {BOTH}?",
            "Which one [shows|has|contains] {what}[|, the first or the second]?",
            "Where is {what}, in the first or the second picture?",
        ),
        (f"which {BOTH} [shows|has|contains] {{what}}", f"in which {BOTH} {{what}} is"),
        what=what,
    )
    return compared(question, f"The {ORDINALS[index]} picture.", ORDINALS[index])
