"""Draws the dozen pictures in `examples/`, with questions that the exported model answers right."""

from __future__ import annotations

import argparse
import io
import json
import random
from pathlib import Path

from PIL import Image

from training.drawing import draw_sized
from training.evaluate import Model, run
from training.sample import CATEGORIES, Sample, is_right
from training.train import TOKENIZER

_WANTED = (*CATEGORIES, "count", "read", "chart")  # twelve


def right_sample(model: Model, category: str, taken: set[str]) -> Sample:
    """The first sample that the model gets right throughout, of small PNGs and answers not yet taken."""
    for seed in range(1000):
        rng = random.Random(f"examples {category} {seed}")
        size = rng.choice(((224, 224), (280, 224), (224, 280), (336, 252)))
        drawn = "colour" if category == "second_turn" else category
        sample = draw_sized(rng, drawn, (size, (224, 224)), 2 if category == "second_turn" else 1)
        turns = sample.turns
        key = " ".join(turns[-1].expected)
        if any(len(_png(image)) > 30_000 for image in sample.images):
            continue
        is_fitting = turns[-1].category == category and all(turn.expected for turn in turns) and key not in taken
        if is_fitting and turns[0].question[0].isupper() and turns[0].question.endswith("?"):
            answered = run(model, [sample], 1)
            if all(is_right(answer, turn.expected) for turn, answer in answered):
                taken.add(key)
                return sample
    raise AssertionError(f"no picture of {category} is answered right")


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=TOKENIZER.parent)
    parser.add_argument("--out", type=Path, default=Path("examples"))
    arguments = parser.parse_args()
    arguments.out.mkdir(exist_ok=True)
    model = Model(arguments.model)
    taken: set[str] = set()
    entries = []
    for number, category in enumerate(_WANTED, start=1):
        sample = right_sample(model, category, taken)
        names = []
        for index, image in enumerate(sample.images):
            letter = ("-a", "-b")[index] if len(sample.images) > 1 else ""
            names.append(f"{number:02d}-{category.replace('_', '-')}{letter}.png")
            (arguments.out / names[-1]).write_bytes(_png(image))
        turns = [{"question": turn.question, "expected": list(turn.expected)} for turn in sample.turns]
        entries.append({"images": names, "category": category, "turns": turns})
    (arguments.out / "questions.json").write_text(json.dumps(entries, indent=2) + "\n")


if __name__ == "__main__":
    main()
