"""Batches to train on: which pictures and conversations go together. Knows nothing of the network.

A batch is a function of the run's seed and its number alone, whatever the number of worker processes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from training.charts import SMALLEST
from training.chat import IMAGE_PAD, EncodedChat, encode_chat, token_id
from training.drawing import draw_sized
from training.marks import HEADS, unit_targets
from training.sample import CATEGORIES, Sample
from training.smalltalk import small_talk, system_prompt

UNIT = 28
MOST_TURNS = 6  # of a conversation
LOGGED = (*CATEGORIES, "general")
# Shares of the pictures in batches of single pictures; pairs have batches of their own.
SHARES = {
    "colour": 0.06,
    "shape": 0.09,
    "place": 0.04,
    "count": 0.27,
    "read": 0.31,
    "chart": 0.19,
    "nothing": 0.027,
    "general": 0.013,
}
_MOST_TURNS = {"read": 3, "nothing": 2, "general": 2}
Grid = tuple[int, int]  # rows and columns of merged units, of 28 pixels a side

# Every batch has one of these forms, so that a training step's shapes are known. Small pictures come first:
# they are
# cheap and teach the same.
_SMALL: tuple[tuple[Grid, ...], ...] = (
    ((4, 4),),
    ((5, 5),),
    ((4, 6),),
    ((6, 4),),
    ((5, 7),),
    ((6, 6),),
    ((7, 5),),
    ((7, 7),),
    ((4, 4), (4, 4)),
    ((5, 5), (5, 5)),
    ((6, 5), (4, 6)),
)
_LARGE: tuple[tuple[Grid, ...], ...] = (
    ((4, 9),),
    ((8, 8),),
    ((9, 4),),
    ((6, 10),),
    ((10, 7),),
    ((10, 10),),
    ((8, 12),),
    ((12, 9),),
    ((13, 13),),
    ((11, 15),),
    ((16, 12),),
    ((16, 16),),
    ((8, 8), (8, 8)),
    ((9, 6), (6, 8)),
    ((11, 11), (11, 11)),
    ((7, 12), (14, 10)),
)
FORMS = (*_SMALL, *_LARGE)
_LARGE_FROM, _MIXED_FROM, _MOST_LARGE = (
    6_000,
    12_000,
    0.7,
)  # steps, and the share of large ones from the latter on


@dataclass(frozen=True, kw_only=True)
class BatchSpec:
    """How large batches are. The number of pictures follows from their size."""

    patches: int = 24_576  # of all pictures of a batch
    most_conversations: int = 256
    max_text_tokens: int = 112
    pair_share: float = 0.18
    answer_tokens: int = 40  # of a conversation, on average; more are left out

    def conversations(self, form: tuple[Grid, ...]) -> int:
        return max(1, min(self.most_conversations, self.patches // (4 * num_units(form))))

    def length(self, form: tuple[Grid, ...]) -> int:
        return -(-(num_units(form) + 2 * len(form) + self.max_text_tokens) // 16) * 16


class Batches(IterableDataset[dict[str, Tensor]]):
    """Batches number `first`, `first` + 1, ... of a run; iterate in workers through `loader`."""

    def __init__(self, tokenizer_json: str, seed: str, first: int, count: int, spec: BatchSpec) -> None:
        self.tokenizer_json, self.seed, self.first, self.count, self.spec = (
            tokenizer_json,
            seed,
            first,
            count,
            spec,
        )

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        torch.set_num_threads(1)
        tokenizer = Tokenizer.from_str(self.tokenizer_json)
        worker = get_worker_info()
        offset, stride = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        for number in range(self.first + offset, self.first + self.count, stride):
            yield make_batch(tokenizer, random.Random(f"{self.seed} batch {number}"), self.spec, number)


def loader(batches: Batches, num_workers: int, *, is_pinned: bool) -> DataLoader[dict[str, Tensor]]:
    """The batches in order, drawn ahead by `num_workers` forked processes (0 draws them here).

    Iterate before the first use of a GPU: forked processes start at once, spawned ones take most of a minute.
    """
    return DataLoader(
        batches,
        batch_size=None,
        num_workers=num_workers,
        prefetch_factor=4 if num_workers else None,
        multiprocessing_context="fork" if num_workers else None,
        pin_memory=is_pinned,
    )


def num_units(form: tuple[Grid, ...]) -> int:
    return sum(rows * columns for rows, columns in form)


def large_share(number: int) -> float:
    """The share of batches around the `number`-th that hold large pictures."""
    return _MOST_LARGE * min(1.0, max(0.0, (number - _LARGE_FROM) / (_MIXED_FROM - _LARGE_FROM)))


def make_batch(tokenizer: Tokenizer, rng: random.Random, spec: BatchSpec, number: int) -> dict[str, Tensor]:
    """Batch `number` of a run.

    Gives `pixels0` (and `pixels1` for pairs) [B, H, W, 3] uint8; `token_ids` [B, T]; `positions` [3, B, T];
    `image_index` as `Network.forward` says; and for every answer token `target_index` (place in the flattened
    [B * T] of the token before it), `target_ids`,
    `target_turns` (which turn of the batch, counted through) and `target_categories` (index into `LOGGED`);
    and for the pictures' units `unit_targets` [B, U, heads] as `marks.unit_targets` says.
    """
    is_pair = rng.random() < spec.pair_share
    forms = _LARGE if rng.random() < large_share(number) else _SMALL
    grids = rng.choice([form for form in forms if (len(form) == 2) == is_pair])
    size, length = spec.conversations(grids), spec.length(grids)
    pixels = [np.zeros((size, rows * UNIT, columns * UNIT, 3), dtype=np.uint8) for rows, columns in grids]
    marks = np.empty((size, num_units(grids), len(HEADS)), dtype=np.int64)
    chats, turn_categories = [], []
    for row in range(size):
        category = "compare" if is_pair else rng.choices(list(SHARES), weights=list(SHARES.values()))[0]
        if category == "chart" and min(grids[0]) * UNIT < SMALLEST:
            category = rng.choice(("read", "count", "shape", "read"))
        sample = _conversation(rng, category, grids)
        images, turns = sample.images, list(sample.turns)
        marks[row] = _unit_targets(sample, grids)
        for stack, image, (rows, columns) in zip(pixels, images, grids, strict=False):
            if image.size != (columns * UNIT, rows * UNIT):
                image = image.resize((columns * UNIT, rows * UNIT), Image.Resampling.BICUBIC)
            stack[row] = np.asarray(image)
        image_turn = 0
        if category not in ("general", "compare") and rng.random() < 0.05:
            turns.insert(0, small_talk(rng))
            image_turn = 1
        chats.append(
            encode_chat(
                tokenizer,
                turns,
                grids if images else [],
                system=system_prompt(rng) if rng.random() < 0.12 else None,
                image_turn=image_turn,
                is_image_last=rng.random() < 0.12,
                max_text_tokens=spec.max_text_tokens,
            )
        )
        turn_categories.append([LOGGED.index(turn.category) for turn in turns])
    pad_id = token_id(tokenizer, IMAGE_PAD)
    batch = _stacked(chats, turn_categories, num_units(grids), pad_id, length, size * spec.answer_tokens)
    batch["unit_targets"] = torch.from_numpy(marks)
    batch["form"] = torch.tensor(FORMS.index(grids))
    for index, stack in enumerate(pixels):
        batch[f"pixels{index}"] = torch.from_numpy(stack)
    return batch


def _conversation(rng: random.Random, category: str, grids: Sequence[Grid]) -> Sample:
    """Pictures whose sizes round to the grids, by the processor's rule, and questions about them."""
    sizes = []
    for rows, columns in grids:
        width, height = columns * UNIT, rows * UNIT
        if rng.random() < 0.4:
            width, height = width + rng.randint(-13, 13), height + rng.randint(-13, 13)
        sizes.append((max(width, 112), max(height, 112)))
    return draw_sized(rng, category, (sizes[0], sizes[-1]), _MOST_TURNS.get(category, 4))


def _unit_targets(sample: Sample, grids: Sequence[Grid]) -> npt.NDArray[np.int64]:
    marks = [*sample.marks, *[None] * (len(grids) - len(sample.marks))]
    parts = [unit_targets(one, rows, columns) for one, (rows, columns) in zip(marks, grids, strict=True)]
    return np.concatenate(parts)


def _stacked(
    chats: list[EncodedChat],
    turn_categories: list[list[int]],
    units: int,
    pad_id: int,
    length: int,
    max_targets: int,
) -> dict[str, Tensor]:
    size = len(chats)
    token_ids = np.zeros((size, length), dtype=np.int64)
    positions = np.zeros((3, size, length), dtype=np.int64)
    image_index = np.full((size, units), size * length, dtype=np.int64)
    index, ids, turn_numbers, categories = [], [], [], []
    for row, (chat, kinds) in enumerate(zip(chats, turn_categories, strict=True)):
        count = min(length, len(chat.token_ids))
        token_ids[row, :count] = chat.token_ids[:count]
        positions[:, row, :count] = chat.positions[:, :count]
        pads = np.flatnonzero(chat.token_ids[:count] == pad_id)
        image_index[row, : len(pads)] = row * length + pads
        answers = np.flatnonzero(chat.turn_of[:count] >= 0)
        index.append(row * length + answers - 1)
        ids.append(chat.token_ids[answers])
        turn_numbers.append(row * MOST_TURNS + chat.turn_of[answers])
        categories.append(np.array(kinds)[chat.turn_of[answers]])
    return {
        "token_ids": torch.from_numpy(token_ids),
        "positions": torch.from_numpy(positions),
        "image_index": torch.from_numpy(image_index.reshape(-1)),
        "target_index": _filled(index, max_targets, 0),
        "target_ids": _filled(ids, max_targets, 0),
        "target_turns": _filled(turn_numbers, max_targets, size * MOST_TURNS),
        "target_categories": _filled(categories, max_targets, len(LOGGED)),
    }


def _filled(parts: list[npt.NDArray[np.int64]], count: int, filler: int) -> Tensor:
    """The parts in one row of `count` numbers, cut or filled up."""
    joined = np.concatenate(parts)[:count]
    return torch.from_numpy(np.concatenate((joined, np.full(count - len(joined), filler, dtype=np.int64))))
