"""Hands drawn batches to the trainer, and earlier ones again while drawing lags."""

from __future__ import annotations

import queue
import random
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import Tensor


class Supply:
    """Gives the next drawn batch, or, while drawing lags, one of the last few hundred again.

    With `uses` 1 it only ever gives new batches, in order, so that a run repeats exactly.
    """

    def __init__(self, stream: Iterator[dict[str, Tensor]], uses: int, device: str, most_kept: int = 1500) -> None:
        self.uses, self.device = uses, device
        self.kept: deque[list[Any]] = deque(maxlen=most_kept)  # [uses left, (batch, form)]
        self.rng = random.Random(0)
        self.queue: queue.Queue[dict[str, Tensor]] = queue.Queue(maxsize=4)
        self.stream = stream
        if uses > 1:
            threading.Thread(target=self._fill, daemon=True).start()

    def next(self) -> tuple[dict[str, Tensor], int, bool]:
        """A batch on the device, its form, and whether it is new."""
        if self.uses == 1:
            return *self._moved(next(self.stream)), True
        try:
            drawn = self.queue.get_nowait()
        except queue.Empty:
            for _ in range(8):
                if len(self.kept) > 20:
                    slot = self.kept[self.rng.randrange(len(self.kept))]
                    if slot[0] > 0:
                        slot[0] -= 1
                        return *slot[1], False
            drawn = self.queue.get()
        moved = self._moved(drawn)
        self.kept.append([self.uses - 1, moved])
        return *moved, True

    def _fill(self) -> None:
        for batch in self.stream:
            self.queue.put(batch)

    def _moved(self, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], int]:
        form = int(batch.pop("form"))
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}, form
