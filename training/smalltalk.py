"""Turns that need no picture: greetings, thanks, what the model can do, what to say when none came."""

from __future__ import annotations

import random

from training.dialogue import PIC, ask, expand, say
from training.sample import COLOURS, SHAPES, Turn

_NO_PICTURE = "I see no picture. Please send me one."
_ABILITIES = (
    "I can name colours and shapes, say where they are, count them, read a short word or number, "
    "compare two pictures and read a bar chart."
)

_TALK: tuple[tuple[str, str], ...] = (
    (
        "[Hi|Hello|Hey|Hi there|Hello there|Good morning|Good evening|Good day|Greetings][!|.||, how are you?| Fovea!]",
        "Hello! Send me a picture and ask me about it.",
    ),
    (
        "[How are you|How are you doing|How is it going|How do you do][?|| today?]",
        "I am well, thank you. Send me a picture and ask me about it.",
    ),
    (
        "[What can you do|What are you able to do|How can you help me|What do you know|What can I "
        "ask you|Help|What are your abilities|What are you good at|Can you help me|What questions "
        "can I ask][?|]",
        _ABILITIES,
    ),
    (
        "[Who are you|What are you|What is your name|What's your name|Are you a robot|Introduce "
        "yourself|Tell me about yourself|Who made you|What model are you][?|]",
        "I am Fovea's small demo model. I answer questions about simple pictures.",
    ),
    (
        "[Thanks|Thank you|Thank you very much|Thanks a lot|Great, thanks|Thx|Many thanks][!|.||]",
        "You are welcome.",
    ),
    ("[Bye|Goodbye|See you|Good night|Bye bye|See you later][!|.|]", "Goodbye!"),
    ("[Good job|Well done|That is right|Correct|Great|Nice|Perfect|Very good][!|.|]", "Thank you."),
    (
        "[Tell me a joke|Write a poem|What is the capital of France|Who won the match|What time is "
        "it|Tell me a story|What is the weather like|How old are you|Translate this|What is two plus "
        "two|Write some code|What is the meaning of life|Sing a song|Do you like music|What day is "
        "it][?|.|]",
        "I only know simple pictures. Send me one and ask me about it.",
    ),
    ("[Are you sure|Really|Is that right][?|]", "I can be wrong, but that is what I see."),
)
_SYSTEM = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "Answer briefly.",
    "You answer questions about pictures.",
    "You are Fovea, a friendly assistant that looks at pictures. Be short.",
    "Be concise and polite.",
)


def small_talk(rng: random.Random) -> Turn:
    question, answer = rng.choice(_TALK)
    text = expand(rng, question)
    if rng.random() < 0.25:
        text = text.lower()
    return Turn(question=text, answer=answer, expected=(), category="general")


def unseen(rng: random.Random) -> Turn:
    """A question about a picture that was not sent."""
    kind = rng.randrange(6)
    shape = rng.choice(SHAPES)
    if kind == 0:
        question = ask(rng, "colour", ref=rng.choice(("it", "this", f"the {shape}", "the shape")))
    elif kind == 1:
        question = ask(rng, rng.choice(("only_shape", "describe", "read", "only_colour")))
    elif kind == 2:
        question = ask(rng, "count", things=rng.choice((f"{shape}s", "shapes", f"{rng.choice(COLOURS)} shapes")))
    elif kind == 3:
        question = ask(rng, "place", ref=f"the {shape}")
    elif kind == 4:
        question = ask(rng, "describe")
    else:
        question = say(rng, (f"Can you see [the|this|my] {PIC}?", f"What do you think of [my|this] {PIC}?"))
    return Turn(question=question, answer=_NO_PICTURE, expected=(), category="general")


def system_prompt(rng: random.Random) -> str:
    return rng.choice(_SYSTEM)
