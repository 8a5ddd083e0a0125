"""What lies where on a drawn picture, and the auxiliary loss that teaches the vision tower to say it.

The drawing program knows where it put a shape, or which bar a printed value belongs to. Small linear heads on the
merged units ask for it while the network trains, and are dropped with the export: answers alone teach a small tower to
tell many things apart in one picture far more slowly (`README.md` has the figures).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.sample import COLOURS, SHAPES, Mark

IGNORED = -1
_CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_MOST_ALIKE = 10
# What a head tells of a unit, and into how many classes. "things" is how many centers lie in it, 3 for more.
HEADS = {
    "things": 4,
    "shape": len(SHAPES),
    "colour": len(COLOURS),
    "tens": 13,
    "ones": 10,
    "first": len(_CHARACTERS) + 1,  # character of a bar's label; the last class is any other, or none
    "second": len(_CHARACTERS) + 1,
    "same_colour": _MOST_ALIKE + 1,
    "same_shape": _MOST_ALIKE + 1,
    "same_both": _MOST_ALIKE + 1,
}
_NAMES = tuple(HEADS)
_EMPTY_WEIGHT = 0.1  # of a unit without a thing: nearly all are


def _classes(mark: Mark) -> dict[str, int]:
    """The class of every head that the mark speaks of."""
    found = {}
    if mark.shape is not None:
        found["shape"] = SHAPES.index(mark.shape)
    if mark.colour is not None:
        found["colour"] = COLOURS.index(mark.colour)
    if mark.value is not None:
        found["tens"], found["ones"] = min(mark.value // 10, HEADS["tens"] - 1), mark.value % 10
    if mark.label is not None:
        padded = f"{mark.label.upper():2}"
        found["first"], found["second"] = (_character(letter) for letter in padded[:2])
    if mark.alike is not None:
        for name, number in zip(("same_colour", "same_shape", "same_both"), mark.alike, strict=True):
            found[name] = min(number, _MOST_ALIKE)
    return found


def _character(letter: str) -> int:
    return _CHARACTERS.index(letter) if letter in _CHARACTERS else len(_CHARACTERS)


def unit_targets(marks: Iterable[Mark] | None, rows: int, columns: int) -> npt.NDArray[np.int64]:
    """Classes [U, heads] of a picture's merged units in raster order; `IGNORED` where a head is not asked.

    `marks` is None for a picture about which nothing is said. Shapes are complete: a unit without one has none.
    """
    targets = np.full((rows * columns, len(HEADS)), IGNORED, dtype=np.int64)
    if marks is None:
        return targets
    listed = list(marks)
    if all(mark.shape is not None for mark in listed):
        targets[:, 0] = 0
    for mark in listed:
        column = min(columns - 1, int(mark.center[0] * columns))
        row = min(rows - 1, int(mark.center[1] * rows))
        unit = targets[row * columns + column]
        if mark.shape is not None:
            unit[0] = min(unit[0] + 1, HEADS["things"] - 1)
        for name, number in _classes(mark).items():
            unit[_NAMES.index(name)] = number
    return targets


class UnitHeads(nn.Module):
    """One linear head for everything in `HEADS`, side by side."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(hidden_size, sum(HEADS.values()))
        nn.init.normal_(self.proj.weight, std=hidden_size**-0.5 * 0.1)
        nn.init.zeros_(self.proj.bias)

    def forward(self, units: Tensor) -> Sequence[Tensor]:
        """units [N, C] -> logits [N, classes] of every head, in the order of `HEADS`."""
        logits: Sequence[Tensor] = self.proj(units.float()).split(list(HEADS.values()), dim=-1)
        return logits


def marks_loss(heads: UnitHeads, units: Tensor, targets: Tensor) -> Tensor:
    """Sum of the heads' mean losses; units [B, U, C], targets [B, U, heads]. No host synchronisation."""
    total = torch.zeros((), device=units.device)
    flat_targets = targets.flatten(0, 1)
    for index, logits in enumerate(heads(units.flatten(0, 1))):
        target = flat_targets[:, index]
        weight = (target != IGNORED).float()
        if index == 0:
            weight = torch.where(target == 0, _EMPTY_WEIGHT, weight)
        losses = F.cross_entropy(logits, target.clamp(min=0), reduction="none")
        total = total + (losses * weight).sum() / weight.sum().clamp(min=1)
    return total
