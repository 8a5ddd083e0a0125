"""Encodes images on a thread of its own, beside the steps, before a step asks for them. Knows no schedule.

What is encoded waits here, by digest, until a step asks for it: the store's rows are the scheduler's to give. A step
that asks for another image, as after an eviction, encodes it itself, as if there were no thread. An engine that has
nothing else to do encodes too. All that is kept here is the engine's thread's; the other one only computes.

Legend: T output tokens of an image, D hidden width of the decoder.
"""

import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from runtime.device_errors import raise_if_device_lost
from runtime.executor.embedding_store import EmbeddingStore
from runtime.executor.encoder_runner import EncoderItem, EncoderRunner
from runtime.request import Request

log = logging.getLogger(__name__)

# Batches that the thread has: one that it computes, and one to go on with.
MAX_BATCHES = 2


class _Batch:
    """Images that are encoded together, and their rows to come."""

    def __init__(self, items: list[EncoderItem]) -> None:
        self.items = items
        self.rows: Future[list[Tensor]] = Future()


class AheadEncoder:
    """An `ImageEncoder` around an `EncoderRunner`, and what lets requests wait for it.

    Args:
        encoder, store: what encodes, and where rows go once a step asks for them.
        max_held_tokens: rows that may wait here for a step, those being computed among them.
        max_shared_tokens: output tokens of the images that are encoded together, if they are several.
    """

    def __init__(
        self, encoder: EncoderRunner, store: EmbeddingStore, *, max_held_tokens: int, max_shared_tokens: int
    ) -> None:
        self._encoder, self._store = encoder, store
        self._max_held_tokens = max_held_tokens
        self._max_shared_tokens = max_shared_tokens
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="encoder")
        # An image is pending, then in a batch (unready so far), then held, until a step takes it or no request wants
        # it any more.
        self._pending: deque[EncoderItem] = deque()
        self._batches: deque[_Batch] = deque()
        self._unready: set[bytes] = set()
        self._rows: dict[bytes, Tensor] = {}
        self._num_held_tokens = 0
        self._wanted_by: dict[bytes, set[str]] = {}
        self._wanted: dict[str, tuple[bytes, ...]] = {}
        # Of the requests that wait: what is still to be encoded.
        self._waits_for: dict[str, set[bytes]] = {}

    @property
    def num_held_tokens(self) -> int:
        """Rows that wait here, and those being computed."""
        return self._num_held_tokens

    @property
    def max_bytes(self) -> int:
        """Of the rows that may wait here."""
        return self._max_held_tokens * self._store.row_bytes

    def begin(self, request: Request, pixels: Sequence[NDArray[np.uint8]], indices: Sequence[int]) -> bool:
        """Has some of the request's images encoded, from the next `take_ready` on; says whether it must wait for them.
        Not if together they have more rows than may wait here."""
        items = {
            request.images[index].image_hash: EncoderItem(
                image_hash=request.images[index].image_hash, pixels=pixels[index]
            )
            for index in indices
        }
        num_tokens = sum(self._encoder.program.num_tokens(item.pixels) for item in items.values())
        if not items or num_tokens > self._max_held_tokens:
            return False
        self._wanted[request.request_id] = tuple(items)
        for image_hash, item in items.items():
            self._wanted_by.setdefault(image_hash, set()).add(request.request_id)
            if image_hash not in self._rows and image_hash not in self._unready:
                self._unready.add(image_hash)
                self._pending.append(item)
        waits_for = self._unready.intersection(items)
        if waits_for:
            self._waits_for[request.request_id] = waits_for
        return bool(waits_for)

    def take_ready(self, *, timeout_seconds: float) -> list[str]:
        """The requests that need no longer wait, each once.

        Args:
            timeout_seconds: how long the caller has nothing else to do. It encodes a batch itself, or waits for one.
        """
        if timeout_seconds and not (self._batches and self._batches[0].rows.done()):
            # The thread first, unless it rests: then a single image is spared the way to it and back.
            if self._batches:
                self._go_on()
            own = self._next_batch()
            self._go_on()
            if own is not None:
                self._batches.appendleft(own)
                self._compute(own)
            elif self._batches:
                wait([self._batches[0].rows], timeout_seconds)
        ready: list[str] = []
        while self._batches and self._batches[0].rows.done():
            ready += self._take_in(self._batches.popleft())
        self._go_on()
        while not ready and self._is_stuck():
            ready += self._settle(self._pending.popleft().image_hash)
            self._go_on()
        return ready

    def forget(self, request_id: str) -> None:
        """The request wants nothing any more; an unknown one is no error."""
        self._waits_for.pop(request_id, None)
        for image_hash in self._wanted.pop(request_id, ()):
            wanted_by = self._wanted_by[image_hash]
            wanted_by.discard(request_id)
            if not wanted_by:
                self._drop(image_hash)

    def encode(self, items: Sequence[EncoderItem]) -> None:
        """Stores the rows of the images, of those that wait here and of others, which are encoded now.

        Raises:
            EmbeddingStoreFullError: the scheduler asked for more rows than there are.
        """
        missing = []
        for item in items:
            rows_TD = self._rows.pop(item.image_hash, None)
            if rows_TD is None:
                missing.append(item)
            else:
                self._num_held_tokens -= len(rows_TD)
                self._store.put(item.image_hash, rows_TD)
        if missing:
            self._encoder.encode(missing)
        self._go_on()

    def _take_in(self, batch: _Batch) -> list[str]:
        """Holds the rows of a batch that somebody still wants; who now has all. What could not be encoded a step will
        try again."""
        error = batch.rows.exception()
        if error is not None:
            raise_if_device_lost(error)
            log.warning("encoding ahead failed; the step that needs the images tries again", exc_info=error)
        ready: list[str] = []
        for index, item in enumerate(batch.items):
            if item.image_hash not in self._wanted_by or error is not None:
                self._num_held_tokens -= self._encoder.program.num_tokens(item.pixels)
            else:
                self._rows[item.image_hash] = batch.rows.result()[index]
            ready += self._settle(item.image_hash)
        return ready

    def _settle(self, image_hash: bytes) -> list[str]:
        """Nobody waits for the image any more, be it here or left to a step; who now waits for none."""
        self._unready.discard(image_hash)
        ready: list[str] = []
        for request_id in self._wanted_by.get(image_hash, ()):
            waits_for = self._waits_for.get(request_id, set())
            if image_hash in waits_for:
                waits_for.discard(image_hash)
                if not waits_for:
                    del self._waits_for[request_id]
                    ready.append(request_id)
        return ready

    def _is_stuck(self) -> bool:
        """Whether all room is taken by rows of requests that wait for more of it, so that no step would ever make any.
        An image that several want can bring that about: who wanted it first may end, and its rows stay."""
        return (
            bool(self._pending)
            and not self._batches
            and all(self._wanted_by[image_hash] <= self._waits_for.keys() for image_hash in self._rows)
        )

    def _go_on(self) -> None:
        """Gives the thread its next batches."""
        while len(self._batches) < MAX_BATCHES:
            batch = self._next_batch()
            if batch is None:
                return
            self._batches.append(batch)
            self._thread.submit(self._compute, batch)

    def _next_batch(self) -> _Batch | None:
        """Takes the next images, as far as there is room for their rows; `None` if there are none, or no room."""
        items: list[EncoderItem] = []
        num_tokens = 0
        room = self._max_held_tokens - self._num_held_tokens
        while self._pending:
            more = self._encoder.program.num_tokens(self._pending[0].pixels)
            if num_tokens + more > (min(room, self._max_shared_tokens) if items else room):
                break
            items.append(self._pending.popleft())
            num_tokens += more
        self._num_held_tokens += num_tokens
        return _Batch(items) if items else None

    def _compute(self, batch: _Batch) -> None:
        """On either thread. What is no error but ends the thread, as an interrupt, goes on to the caller."""
        try:
            batch.rows.set_result(self._encoder.compute(batch.items))
        except BaseException as error:
            batch.rows.set_exception(error)
            if not isinstance(error, Exception):
                raise

    def _drop(self, image_hash: bytes) -> None:
        del self._wanted_by[image_hash]
        rows_TD = self._rows.pop(image_hash, None)
        if rows_TD is not None:
            self._num_held_tokens -= len(rows_TD)
        if any(item.image_hash == image_hash for item in self._pending):
            self._pending = deque(item for item in self._pending if item.image_hash != image_hash)
            self._unready.discard(image_hash)
