"""Two pictures of shapes sent together, and questions that compare them: one shape in each, or a few to count."""

from __future__ import annotations

import random
from collections.abc import Callable

from training.backgrounds import Size
from training.dialogue import article, ask, at, plural, say
from training.pair_talk import BOTH, ORDINALS, chosen, compared, nth, which_picture, yes_or_no
from training.sample import COLOURS, SHAPES, Sample, Turn
from training.scenes import Scene, several, single


def singles(rng: random.Random, sizes: tuple[Size, Size], turns: int) -> Sample:
    """One shape in each picture, often alike in colour or shape."""
    colours, shapes = rng.sample(COLOURS, 2), rng.sample(SHAPES, 2)
    if rng.random() < 0.5:
        colours[1] = colours[0]
    if rng.random() < 0.5:
        shapes[1] = shapes[0]
    scenes = []
    for colour, shape, size in zip(colours, shapes, sizes, strict=True):
        if rng.random() < 0.4:
            scenes.append(several(rng, size, [(colour, shape)]))
        else:
            scenes.append(single(rng, size, kind=(colour, shape)))
    things = [scene.things[0] for scene in scenes]

    def same_colour() -> Turn:
        question = say(
            rng,
            (
                "Do the [two |]shapes have the same colo[u|]r?",
                "Are the [two |][shapes|objects|figures|things] the same colo[u|]r?",
                f"Do both [shapes|objects|{BOTH}s] [have|show] the same colo[u|]r?",
                f"Is the colo[u|]r the same in both {BOTH}s?",
                f"Do the [two |]{BOTH}s [show|have] [shapes|objects] of the same colo[u|]r?",
                "Are they the same colo[u|]r?",
                "Is the shape in {one} the same colo[u|]r as the [shape|one] in {other}?",
                "Do the colo[u|]rs match?",
                "Same colo[u|]r?",
            ),
            ("if [both|the two] shapes [have|are] the same colo[u|]r",),
            one=nth(rng, 0),
            other=nth(rng, 1),
        )
        return yes_or_no(question, colours[0] == colours[1])

    def same_shape() -> Turn:
        question = say(
            rng,
            (
                "Are the [two |][shapes|objects|figures] the same[| shape| kind of shape]?",
                f"Do [both|the two|the] {BOTH}s show the same [kind of |]shape?",
                f"Is the shape the same in both {BOTH}s?",
                f"Is [it|there] the same [kind of |]shape in both {BOTH}s?",
                f"Do the [two |]{BOTH}s [show|contain] the same shape?",
                "Are they the same shape?",
                "Is the shape in {one} the same as [the shape|the one|that] in {other}?",
                "Do the shapes match?",
                "Same shape?",
            ),
            ("[if|whether] [both|the two] {pics} show the same shape",),
            one=nth(rng, 0),
            other=nth(rng, 1),
            pics="[pictures|images]",
        )
        if "the same?" in question.lower() and "shape in" not in question.lower() and colours[0] != colours[1]:
            return same_colour()
        return yes_or_no(question, shapes[0] == shapes[1])

    def both_are() -> Turn:
        by_colour = rng.random() < 0.5
        name = rng.choice(colours if by_colour else shapes)
        noun = f"{name} [shape|object]" if by_colour else name
        question = say(
            rng,
            (
                f"Do both {BOTH}s [show|contain|have] {{a_thing}}?",
                f"Is there {{a_thing}} in both {BOTH}s?",
                "Are both [shapes|objects|of them] {claim}?",
            ),
            a_thing=f"{article(name).split()[0]} {noun}",
            claim=name if by_colour else plural(name),
        )
        return yes_or_no(question, (colours if by_colour else shapes) == [name, name])

    def which() -> Turn | None:
        by_colour = rng.random() < 0.5
        names = colours if by_colour else shapes
        if names[0] == names[1]:
            return None
        index = rng.randrange(2)
        noun = f"{names[index]} [shape|object|figure|one]" if by_colour else names[index]
        return which_picture(rng, f"[the|{article(names[index]).split()[0]}] {noun}", index)

    def attribute() -> Turn:
        index = rng.randrange(2)
        thing, where = things[index], f"in {nth(rng, index)}"
        if rng.random() < 0.5:
            question = say(
                rng,
                (
                    "[What|Which] colo[u|]r is the [shape|object|figure|{shape}] {where}?",
                    "What is the colo[u|]r of the [shape|object|{shape}] {where}?",
                    "[What|Which] colo[u|]r do you see {where}?",
                    "[What|Which] colo[u|]r does the [shape|{shape}] {where} have?",
                    "{Where}, what colo[u|]r is the [shape|{shape}]?",
                ),
                ("what colo[u|]r the [shape|{shape}] {where} is",),
                where=where,
                Where=where.capitalize(),
                shape=thing.shape,
            )
            return compared(question, f"It is {thing.colour}.", thing.colour)
        question = say(
            rng,
            (
                "[What|Which] shape is {where}?",
                "[What|Which] shape [do you see|is shown] {where}?",
                "What is {where}?",
                "What is the shape {where}?",
                "{Where}, what shape [is it|do you see|is shown]?",
                "[What|Which] shape does {nth} [show|contain]?",
            ),
            ("[what|which] shape is [shown |]{where}", "what is {where}"),
            where=where,
            Where=where.capitalize(),
            nth=where.removeprefix("in "),
        )
        return compared(question, f"It is {article(thing.shape)}.", thing.shape)

    def bigger() -> Turn | None:
        share = [thing.radius / min(size) for thing, size in zip(things, sizes, strict=True)]
        pixels = [thing.radius for thing in things]
        index = 0 if pixels[0] > pixels[1] else 1
        if pixels[index] < 1.35 * pixels[1 - index] or share[index] < 1.35 * share[1 - index]:
            return None
        is_big = rng.random() < 0.65
        words = "[larger|bigger]" if is_big else "smaller"
        index = index if is_big else 1 - index
        question = say(
            rng,
            (
                f"[Which|What] {BOTH} [shows|has|contains] the {{words}} [shape|object]?",
                "In which [picture|image] is the shape {words}?",
                "Which [shape|object|one] is {words}[|, the first or the second]?",
            ),
            words=words,
        )
        return compared(question, f"The {ORDINALS[index]} picture.", ORDINALS[index])

    def place() -> Turn | None:
        index = rng.randrange(2)
        name = things[index].place
        if name is None:
            return None
        question = ask(rng, "place", ref=f"the [shape|object|{things[index].shape}] in {nth(rng, index)}")
        return compared(question, f"It is {at(name)}.", name)

    makers: list[Callable[[], Turn | None]] = [
        same_colour,
        same_colour,
        same_shape,
        same_shape,
        both_are,
        which,
        which,
    ]
    makers += [attribute, attribute, attribute, bigger, bigger, place, lambda: _described(rng, scenes)]
    return Sample(
        images=[scene.image for scene in scenes],
        turns=chosen(rng, makers, turns),
        marks=[scene.marks for scene in scenes],
    )


def _described(rng: random.Random, scenes: list[Scene]) -> Turn:
    names = [article(scene.things[0].name) for scene in scenes]
    question = say(
        rng,
        (
            "[Describe|Please describe] [the|these|both] [two |][pictures|images].",
            "What do the [two |][pictures|images] show?",
            "What do you see[| in these pictures]?",
        ),
    )
    return Turn(
        question=question,
        answer=f"The first picture shows {names[0]}, the second {names[1]}.",
        expected=(),
        category="general",
    )


def counts(rng: random.Random, sizes: tuple[Size, Size], turns: int) -> Sample:
    """A few like shapes in each picture."""
    shape, colours = rng.choice(SHAPES), [rng.choice(COLOURS), rng.choice(COLOURS)]
    is_alike = rng.random() < 0.6
    numbers = [rng.randint(1, 7), rng.randint(1, 7)] if rng.random() < 0.8 else [rng.randint(1, 6)] * 2
    scenes = []
    for index in range(2):
        kinds = [
            (
                colours[0] if is_alike else rng.choice(COLOURS),
                shape if is_alike or rng.random() < 0.2 else rng.choice(SHAPES),
            )
            for _ in range(numbers[index])
        ]
        scenes.append(several(rng, sizes[index], kinds))
    any_noun = rng.choice(("shapes", "shapes", "objects", "figures", "things", "items"))
    noun = plural(shape) if is_alike and rng.random() < 0.6 else any_noun

    def more() -> Turn | None:
        if numbers[0] == numbers[1]:
            return None
        is_more = rng.random() < 0.65
        index = 0 if (numbers[0] > numbers[1]) == is_more else 1
        question = say(
            rng,
            (
                f"[Which|Which|What] {BOTH} [has|shows|contains] {{words}} {{noun}}?",
                f"[In|On] which {BOTH} are there {{words}} {{noun}}?",
                f"Which of the [two |]{BOTH}s [has|shows|contains] {{words}} {{noun}}?",
                "Where are there {words} {noun}, in the first or [in |]the second [picture|image]?",
                "Which one has {words} {noun}?",
                f"Are there {{words}} {{noun}} in the first or in the second {BOTH}?",
            ),
            (f"which {BOTH} [has|shows] {{words}} {{noun}}",),
            words="[more|more|the most]" if is_more else "[fewer|fewer|less|the fewest]",
            noun=noun,
        )
        return compared(question, f"The {ORDINALS[index]} picture.", ORDINALS[index])

    def number() -> Turn:
        index = rng.randrange(2)
        question = say(
            rng,
            (
                "How many {noun} are [there |]in {nth}?",
                "How many {noun} does {nth} [show|have|contain]?",
                "How many {noun} [do|can] you see in {nth}?",
                "Count the {noun} in {nth}.",
                "What is the number of {noun} in {nth}?",
            ),
            ("how many {noun} [there are|are] in {nth}",),
            noun=noun,
            nth=nth(rng, index),
        )
        return compared(
            question, f"There {'is' if numbers[index] == 1 else 'are'} {numbers[index]}.", str(numbers[index])
        )

    def total() -> Turn:
        question = say(
            rng,
            (
                "How many {noun} are there in [total|all]?",
                f"How many {{noun}} are there in both {BOTH}s [together|combined]?",
                f"How many {{noun}} do [the two|both] {BOTH}s show [together|in total]?",
            ),
            noun=noun,
        )
        return compared(question, f"There are {sum(numbers)} in all.", str(sum(numbers)))

    def same_number() -> Turn:
        question = say(
            rng,
            (
                f"Do [both|the two] {BOTH}s [show|have|contain] [the same number of|as many|equally many] {{noun}}?",
                f"Are there [equally many|as many|the same number of] {{noun}} in both {BOTH}s?",
                f"Is the number of {{noun}} the same[| in both {BOTH}s]?",
            ),
            noun=noun,
        )
        return yes_or_no(question, numbers[0] == numbers[1])

    def comparison() -> Turn:
        index = rng.randrange(2)
        is_more = rng.random() < 0.6
        question = say(
            rng,
            (
                "Are there {words} {noun} in {one} than in {other}?",
                "Does {one} [have|show|contain] {words} {noun} than {other}?",
            ),
            words="more" if is_more else "fewer",
            noun=noun,
            one=nth(rng, index),
            other=nth(rng, 1 - index),
        )
        mine, theirs = numbers[index], numbers[1 - index]
        return yes_or_no(question, mine > theirs if is_more else mine < theirs)

    makers: list[Callable[[], Turn | None]] = [more, more, more, number, number, total, same_number, comparison]
    return Sample(
        images=[scene.image for scene in scenes],
        turns=chosen(rng, makers, turns),
        marks=[scene.marks for scene in scenes],
    )
