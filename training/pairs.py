"""Questions about two pictures sent together. Draws nothing itself: it asks the modules that do."""

from __future__ import annotations

import random
from collections.abc import Callable

from training.backgrounds import Size, nothing
from training.dialogue import article, ask, say
from training.lettering import cased
from training.pair_shapes import counts, singles
from training.pair_talk import BOTH, chosen, compared, nth, which_picture, yes_or_no
from training.prints import draw_print
from training.sample import Sample, Turn
from training.scenes import Scene, single, varied


def draw_pair(rng: random.Random, sizes: tuple[Size, Size], turns: int) -> Sample:
    """Two pictures of `sizes`, and `turns` questions that compare them or ask about one of them."""
    kind = rng.random()
    if kind < 0.5:
        return singles(rng, sizes, turns)
    if kind < 0.78:
        return counts(rng, sizes, turns)
    if kind < 0.88:
        return _words(rng, sizes, turns)
    return _mixed(rng, sizes, turns)


def _words(rng: random.Random, sizes: tuple[Size, Size], turns: int) -> Sample:
    """A printed word or number in each picture."""
    sheets = [draw_print(rng, size, text=None, is_single=True) for size in sizes]
    if rng.random() < 0.35:
        text = sheets[0].prints[0].text
        if len(text) <= 5:
            sheets[1] = draw_print(rng, sizes[1], text=cased(rng, text), is_single=True)
    texts = [sheet.prints[0].text for sheet in sheets]

    def read() -> Turn:
        index = rng.randrange(2)
        question = say(
            rng,
            (
                "What does {nth} say?",
                "What does the [text|word] in {nth} say?",
                "What is [written|printed|the word|the text] in {nth}?",
                "[Read|Please read] the [text|word] in {nth}.",
                "[What|Which] [word|text] [is|do you see] in {nth}?",
            ),
            ("what is [written|printed] in {nth}",),
            nth=nth(rng, index),
        )
        return compared(question, f"It says {texts[index].upper()}.", texts[index])

    def same() -> Turn:
        question = say(
            rng,
            (
                f"Do [both|the two|the] {BOTH}s [show|say|have] the same [word|text]?",
                "Is it the same [word|text] in both [pictures|images]?",
                "Are the [two |][words|texts] the same?",
                "Do they say the same[| thing]?",
            ),
        )
        return yes_or_no(question, texts[0].lower() == texts[1].lower())

    return Sample(images=[sheet.image for sheet in sheets], turns=chosen(rng, [read, read, same], turns))


def _mixed(rng: random.Random, sizes: tuple[Size, Size], turns: int) -> Sample:
    """Shapes in one picture, and text, nothing or other shapes in the other."""
    index = rng.randrange(2)
    scene = single(rng, sizes[index]) if rng.random() < 0.5 else varied(rng, sizes[index])
    kind = rng.choice(("text", "nothing", "scene"))
    makers: list[Callable[[], Turn | None]] = []
    shown = {(thing.colour, thing.shape) for thing in scene.things}
    if kind == "text":
        sheet = draw_print(rng, sizes[1 - index], text=None, is_single=True)
        other = sheet.image
        makers.append(lambda: which_picture(rng, "[text|a word|some text|writing|a printed word]", 1 - index))
        text = sheet.prints[0].text
        makers.append(lambda: compared(ask(rng, "read"), f"It says {text.upper()}.", text))
    elif kind == "nothing":
        other = nothing(rng, sizes[1 - index])
        makers.append(lambda: which_picture(rng, "[nothing|no shape|no shapes]", 1 - index))
    else:
        second = varied(rng, sizes[1 - index])
        other = second.image
        both = {thing.shape for thing in scene.things} & {thing.shape for thing in second.things}
        theirs = [thing for thing in second.things if thing.shape not in both]
        if theirs:
            thing = rng.choice(theirs)
            makers.append(
                lambda: which_picture(rng, f"[the|{article(thing.shape).split()[0]}] {thing.shape}", 1 - index)
            )
        scene = Scene(image=scene.image, things=tuple(thing for thing in scene.things if thing.shape not in both))
    if scene.things and shown:
        mine = rng.choice(scene.things)
        makers.append(lambda: which_picture(rng, f"[the|{article(mine.shape).split()[0]}] {mine.shape}", index))
        if sum(thing.shape == mine.shape for thing in scene.things) == 1:
            makers.append(
                lambda: compared(
                    ask(rng, "colour", ref=f"the {mine.shape}"),
                    f"The {mine.shape} is {mine.colour}.",
                    mine.colour,
                )
            )
    images = [scene.image, other] if index == 0 else [other, scene.image]
    if not makers:
        return singles(rng, sizes, turns)
    return Sample(images=images, turns=chosen(rng, makers, turns))
