"""Asks the exported model about pictures of held-out seeds and counts right answers.

Goes the way a user of `transformers` would: its model class and `generate`, its image processor, the folder's
tokenizer and chat template, and the model's own earlier answers in later turns. Prints a table and ends with
one JSON line: `python -m training.evaluate`.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from training.chat import IMAGE_PAD
from training.sample import CATEGORIES, Sample, Turn, is_right
from training.train import TOKENIZER

FIRST_SEED = 1_000_000  # training draws from the numbers of its batches, never from these
PROGRAMS = {"own": "training.drawing", "second": "training.second_program"}
TARGETS = {"colour": 97, "shape": 97, "count to six": 95, "read": 90, "compare": 90, "chart": 85}


class Asked:
    """One conversation in progress."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self.messages: list[dict[str, Any]] = []
        self.answers: list[str] = []

    def ask(self) -> None:
        turn = self.sample.turns[len(self.answers)]
        pictures = [{"type": "image"} for _ in self.sample.images] if not self.answers else []
        self.messages.append({"role": "user", "content": [*pictures, {"type": "text", "text": turn.question}]})

    def hear(self, answer: str) -> None:
        self.answers.append(answer)
        self.messages.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})


class Model:
    """The exported folder, loaded by transformers in float32."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        self.device = device
        network: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        self.network = network.eval().to(device)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.processor = Qwen2VLImageProcessorPil.from_pretrained(folder)

    @torch.inference_mode()
    def answer(self, messages: Sequence[list[dict[str, Any]]], images: Sequence[list[Image.Image]]) -> list[str]:
        """One greedy answer for each conversation, all in one batch."""
        stacked = [image.convert("RGB") for group in images for image in group]
        vision = self.processor(images=stacked, return_tensors="pt") if stacked else {}
        counts = iter((vision["image_grid_thw"].prod(-1) // 4).tolist() if stacked else ())
        texts = []
        for conversation, group in zip(messages, images, strict=True):
            text = self.tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
            parts = text.split(IMAGE_PAD)
            assert len(parts) == len(group) + 1
            texts.append("".join(part + IMAGE_PAD * next(counts) for part in parts[:-1]) + parts[-1])
        encoded = self.tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=False)
        kinds = (encoded["input_ids"] == self.tokenizer.convert_tokens_to_ids(IMAGE_PAD)).int()
        out = self.network.generate(
            input_ids=encoded["input_ids"].to(self.device),
            attention_mask=encoded["attention_mask"].to(self.device),
            mm_token_type_ids=kinds.to(self.device),
            max_new_tokens=40,
            **{name: tensor.to(self.device) for name, tensor in vision.items()},
        ).cpu()
        replies = out[:, encoded["input_ids"].shape[1] :]
        return [str(text) for text in self.tokenizer.batch_decode(replies, skip_special_tokens=True)]


def run(model: Model, samples: Sequence[Sample], batch: int) -> list[tuple[Turn, str]]:
    """Every turn with the model's answer to it."""
    # Those of one size together: less padding.
    ordered = sorted(
        (Asked(sample) for sample in samples),
        key=lambda one: sum(i.width * i.height for i in one.sample.images),
    )
    for start in range(0, len(ordered), batch):
        group = ordered[start : start + batch]
        while group := [one for one in group if len(one.answers) < len(one.sample.turns)]:
            for one in group:
                one.ask()
            answers = model.answer([one.messages for one in group], [one.sample.images for one in group])
            for one, answer in zip(group, answers, strict=True):
                one.hear(answer)
    return [pair for one in ordered for pair in zip(one.sample.turns, one.answers, strict=True)]


def through_last(sample: Sample, category: str) -> Sample:
    """The sample without the turns after the last of this category."""
    last = max((i for i, turn in enumerate(sample.turns) if turn.category == category), default=0)
    return Sample(images=sample.images, turns=sample.turns[: last + 1])


def draw(seed: int, *, program: str, category: str) -> Sample:
    sample: Sample = importlib.import_module(PROGRAMS[program]).draw(seed, category)
    return through_last(sample, category)


def rows_of(turn: Turn) -> list[str]:
    """The rows of the table that a turn counts in."""
    if not turn.expected:
        return []
    rows = [turn.category]
    if turn.category == "count" and turn.expected[0].isdecimal() and int(turn.expected[0]) <= 6:
        rows.append("count to six")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=TOKENIZER.parent)
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--categories", nargs="+", choices=CATEGORIES, default=list(CATEGORIES))
    parser.add_argument("--samples", type=int, default=300, help="conversations of each category and program")
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--show-wrong", type=int, default=0, help="print this many wrong answers of each category")
    parser.add_argument("--out", type=Path, help="where the JSON goes as well")
    arguments = parser.parse_args()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.samples)
    drawn: dict[tuple[str, str], list[Sample]] = {}
    # Before the first use of a GPU, which forked processes could not share.
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for program in arguments.programs:
            for category in arguments.categories:
                draw_one = functools.partial(draw, program=program, category=category)
                drawn[program, category] = list(pool.map(draw_one, seeds, chunksize=10))
    model = Model(arguments.model, arguments.device)
    result: dict[str, Any] = {
        "samples_per_category": arguments.samples,
        "first_seed": arguments.first_seed,
        "programs": {},
    }
    for program in arguments.programs:
        scores: dict[str, list[int]] = {}
        for category in arguments.categories:
            shown = 0
            for turn, answer in run(model, drawn[program, category], arguments.batch):
                was_right = is_right(answer, turn.expected)
                for row in rows_of(turn):
                    scores.setdefault(row, []).append(int(was_right))
                if not was_right and shown < arguments.show_wrong:
                    shown += 1
                    print(f"    {turn.category}: {turn.question!r} -> {answer!r}, expected {turn.expected}")
            print(program, category, "done", flush=True)
        result["programs"][program] = {
            row: {"right_percent": round(100 * sum(found) / len(found), 2), "turns": len(found)}
            for row, found in sorted(scores.items())
        }
        for row, score in result["programs"][program].items():
            target = f" (target {TARGETS[row]})" if row in TARGETS and program == "own" else ""
            print(
                f"{program:7} {row:13} {score['right_percent']:6.2f} % of {score['turns']}{target}",
                flush=True,
            )
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
