"""What the executor keeps of each request, and the stable rows from which a step's inputs are gathered.

A request lives here from arrival to end, with its pixels: an embedding may have to be computed again at any time. It
holds a slot (a row of every table below) while it runs; one that waits, or was preempted, may lose it, and gets another
filled from what is kept. Knows no schedule, no model.

Legend: N slots, L max_model_len, M blocks of a table.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from runtime.executor.kv_cache import NULL_BLOCK
from runtime.processing.grammar import Matcher
from runtime.request import ImageInput, Request


@dataclass(kw_only=True, slots=True)
class RunningRequest:
    """One request. `positions_3P` are those of its prompt; output token i has position `next_position + i`."""

    # Set once, at arrival.
    request: Request
    pixels: Sequence[NDArray[np.uint8]]
    prompt_token_ids: NDArray[np.int64]
    positions_3P: NDArray[np.int64]
    next_position: int
    seed: int
    # Grow with the output; the matcher stands behind its last token.
    output_token_ids: list[int] = field(default_factory=list)
    matcher: Matcher | None = None
    # Index after the last placeholder token: no image is read from there on.
    image_tokens_end: int = field(init=False)
    # Set by `RequestSlots`.
    slot: int | None = None
    block_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.image_tokens_end = self.request.images[-1].placeholder.end if self.request.images else 0

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        """Known tokens, prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def images_within(self, start: int, end: int) -> list[tuple[int, ImageInput]]:
        """The images, with their indices, that have placeholder tokens in `start .. end`."""
        if start >= self.image_tokens_end:
            return []
        return [
            (index, image)
            for index, image in enumerate(self.request.images)
            if image.placeholder.offset < end and image.placeholder.end > start
        ]


class RequestSlots:
    """Tables of `num_slots` rows: tokens, positions and block tables of the requests that run."""

    def __init__(self, *, num_slots: int, max_model_len: int, max_blocks: int) -> None:
        # Pages of these that no request reaches cost nothing.
        self.token_ids_NL: NDArray[np.int32] = np.zeros((num_slots, max_model_len), dtype=np.int32)
        self.positions_3NL: NDArray[np.int32] = np.zeros((3, num_slots, max_model_len), dtype=np.int32)
        self.block_tables_NM: NDArray[np.int32] = np.zeros((num_slots, max_blocks), dtype=np.int32)
        # Position of an output token minus its index, and the number of output tokens.
        self.position_shift_N: NDArray[np.int64] = np.zeros(num_slots, dtype=np.int64)
        self.num_outputs_N: NDArray[np.int64] = np.zeros(num_slots, dtype=np.int64)
        self._owners: list[RunningRequest | None] = [None] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_bytes(self) -> int:
        """Bytes on the host, whether or not they were touched yet."""
        tables = (
            self.token_ids_NL,
            self.positions_3NL,
            self.block_tables_NM,
            self.position_shift_N,
            self.num_outputs_N,
        )
        return sum(table.nbytes for table in tables)

    def acquire(self, running: RunningRequest, *, step_request_ids: Collection[str]) -> int:
        """Gives the request a slot, filled with what is known of it; that of a request outside the step if need be."""
        assert running.slot is None
        slot = self._free.pop() if self._free else self._take_from_outside(step_request_ids)
        self._owners[slot] = running
        running.slot = slot
        # What lies beyond a sequence's blocks is gathered for a longer neighbour's sake, and masked: by adding, which
        # leaves a NaN of the former owner's blocks what it is.
        self.block_tables_NM[slot] = NULL_BLOCK
        num_prompt, num_tokens = len(running.prompt_token_ids), running.num_tokens
        self.token_ids_NL[slot, :num_prompt] = running.prompt_token_ids
        self.token_ids_NL[slot, num_prompt:num_tokens] = running.output_token_ids
        shift = running.next_position - num_prompt
        self.positions_3NL[:, slot, :num_prompt] = running.positions_3P
        self.positions_3NL[:, slot, num_prompt:num_tokens] = np.arange(num_prompt, num_tokens) + shift
        self.position_shift_N[slot] = shift
        self.num_outputs_N[slot] = len(running.output_token_ids)
        return slot

    def release(self, running: RunningRequest) -> None:
        """Takes the request's slot away; does nothing if it has none."""
        if running.slot is None:
            return
        self._owners[running.slot] = None
        self._free.append(running.slot)
        running.slot = None
        running.block_ids = ()

    def set_blocks(self, running: RunningRequest, block_ids: tuple[int, ...]) -> None:
        """Writes the block table of a request that has a slot, as far as it changed."""
        known = running.block_ids
        if block_ids is known:
            return
        slot = running.slot
        assert slot is not None
        num_known = len(known) if block_ids[: len(known)] == known else 0
        self.block_tables_NM[slot, num_known : len(block_ids)] = block_ids[num_known:]
        self.block_tables_NM[slot, len(block_ids) : len(known)] = NULL_BLOCK
        running.block_ids = block_ids

    @property
    def max_model_len(self) -> int:
        """Tokens that a row has room for."""
        return int(self.token_ids_NL.shape[1])

    def foresee(self, slots: NDArray[np.int64], num_tokens: NDArray[np.int64]) -> None:
        """Writes the position of the output token that `append` will add to each of `slots`."""
        self.positions_3NL[:, slots, num_tokens] = num_tokens + self.position_shift_N[slots]

    def append(self, slots: NDArray[np.int64], num_tokens: NDArray[np.int64], token_ids: Sequence[int]) -> None:
        """Adds one output token to each of `slots`, which have `num_tokens` tokens before it."""
        self.token_ids_NL[slots, num_tokens] = token_ids
        self.foresee(slots, num_tokens)
        self.num_outputs_N[slots] += 1

    def _take_from_outside(self, step_request_ids: Collection[str]) -> int:
        for owner in self._owners:
            if owner is not None and owner.request_id not in step_request_ids:
                self.release(owner)
                return self._free.pop()
        raise AssertionError(f"a step has more than {len(self._owners)} requests")
