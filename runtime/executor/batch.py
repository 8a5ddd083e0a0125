"""Fills a step's inputs: static buffers at fixed addresses, gathered from the requests' slots.

Knows slots, blocks and padding; knows no model and no scheduler policy. Everything is computed on whole arrays on the
host and, where the device has its own memory, copied once.

    query_start_loc   0        3  4                 9        each sequence owns a run of the step's tokens
    token             a0 a1 a2 b7 c4 c5 c6 c7 c8             tokens num_computed .. num_computed + num_scheduled of it
    slot              block_table[index // block_size] * block_size + index % block_size

Legend: T tokens of a step, B sequences, M blocks of a table, S sequences that sample, D hidden width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.executor.kv_cache import NULL_BLOCK
from runtime.executor.request_slots import RequestSlots, RunningRequest
from runtime.model.attention import AttentionBatch, AttentionBucket
from runtime.scheduler.output import ScheduledRequest
from runtime.staging import CopyFence, StagedTensor


class StepBuffers:
    """The static inputs of every step and every decoder bucket: a bucket uses the front part of each."""

    def __init__(
        self, *, max_tokens: int, max_seqs: int, max_blocks: int, block_size: int, device: torch.device
    ) -> None:
        self.max_tokens = max_tokens
        self.max_seqs = max_seqs
        self.block_size = block_size
        # The padding of a mixed bucket is one sequence that may be as long as the step.
        max_blocks = max(max_blocks, -(-max_tokens // block_size))
        self.token_ids_T = StagedTensor((max_tokens,), torch.int64, device)
        self.positions_3T = StagedTensor((3, max_tokens), torch.int64, device, row_dim=1)
        self.slot_mapping_T = StagedTensor((max_tokens,), torch.int64, device)
        self.block_tables_BM = StagedTensor((max_seqs, max_blocks), torch.int32, device)
        self.logits_index_S = StagedTensor((max_seqs,), torch.int64, device)
        # Where the tokens of a step that ran ahead come from.
        self.token_sources_S = StagedTensor((max_seqs,), torch.int64, device)
        self._fence = CopyFence(device)

    def begin_fill(self) -> None:
        """To be called before the host arrays are written: the last upload may not have read them yet, for a step in
        which nobody samples does not wait for the device."""
        self._fence.wait()

    def upload(self, *, num_tokens: int, num_seqs: int) -> None:
        """Makes the device tensors equal to the host arrays, as far as a step of that size reads them."""
        for tensor in (self.token_ids_T, self.positions_3T, self.slot_mapping_T):
            tensor.upload(num_tokens)
        self.block_tables_BM.upload(num_seqs)
        self.logits_index_S.upload(self.max_seqs)
        self._fence.record()

    def take_tokens(self, tokens_S: Tensor, index_S: NDArray[np.int64]) -> None:
        """Puts tokens that are on the device in the place of a decode step's uploaded ones: `tokens_S[index_S]`."""
        count = len(index_S)
        if index_S[-1] == count - 1 and np.array_equal(index_S, np.arange(count)):
            self.token_ids_T.device[:count].copy_(tokens_S[:count])
            return
        self.token_sources_S.host[:count] = index_S
        self.token_sources_S.upload(count)
        self._fence.record()
        self.token_ids_T.device[:count].copy_(tokens_S.index_select(0, self.token_sources_S.device[:count]))

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> tuple[Tensor, ...]:
        staged = (
            self.token_ids_T,
            self.positions_3T,
            self.slot_mapping_T,
            self.block_tables_BM,
            self.logits_index_S,
            self.token_sources_S,
        )
        return tuple(tensor.device for tensor in staged)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSpan:
    """Rows `row_start .. row_end` of an image's embedding belong at tokens `token_start ..` of the step."""

    token_start: int
    image_hash: bytes
    row_start: int
    row_end: int


Step = Sequence[tuple[RunningRequest, ScheduledRequest]]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """How large a step is, which is what decides on its bucket. `is_decode`: a token of text for each sequence, and
    each of them samples."""

    num_tokens: int
    num_seqs: int
    is_decode: bool

    @classmethod
    def of(cls, step: Step) -> "StepShape":
        num_tokens = sum(part.num_scheduled_tokens for _, part in step)
        is_decode = num_tokens == len(step) and all(
            part.is_sampling and part.num_computed_tokens >= running.image_tokens_end for running, part in step
        )
        return cls(num_tokens=num_tokens, num_seqs=len(step), is_decode=is_decode)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch:
    """One step, filled in: the first tokens and sequences are real, the others padding. `padded_tokens` counts both."""

    padded_tokens: int
    attention: AttentionBatch
    image_spans: tuple[ImageSpan, ...]
    # Of the sequences that sample, in order: their indices in the step, their slots, and their tokens so far.
    sampling_B: NDArray[np.int64]
    sampling_slots_S: NDArray[np.int64]
    sampling_lengths_S: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Padding:
    """A bucket's size. A decode bucket is padded by sequences of one token, a mixed one by one sequence that takes the
    whole tail, since only the number of tokens must reach the bucket's. `bucket`: what attention was captured for."""

    tokens: int
    is_mixed: bool
    bucket: AttentionBucket | None = None


def fill_batch(
    buffers: StepBuffers,
    slots: RequestSlots,
    step: Step,
    shape: StepShape,
    padding: Padding | None = None,
) -> StepBatch:
    """Writes the inputs of `step` into the buffers. Every request in it has its slot and its block table."""
    buffers.begin_fill()
    num_tokens, num_seqs = shape.num_tokens, shape.num_seqs
    if shape.is_decode and num_seqs == 1 and (padding is None or padding.tokens == 1):
        return _fill_row(buffers, slots, step, padding)
    slot_B = np.array([running.slot for running, _ in step], dtype=np.int64)
    start_B = np.array([part.num_computed_tokens for _, part in step], dtype=np.int64)
    padded_tokens, padded_seqs = _padded_sizes(num_tokens, num_seqs, padding)
    query_start_loc = np.arange(padded_seqs + 1, dtype=np.int32)
    if num_tokens == num_seqs:
        slot_T, index_T, end_B = slot_B, start_B, start_B + 1
    else:
        count_B = np.array([part.num_scheduled_tokens for _, part in step], dtype=np.int64)
        end_B = start_B + count_B
        np.cumsum(count_B, out=query_start_loc[1 : num_seqs + 1])
        slot_T = np.repeat(slot_B, count_B)
        index_T = np.arange(num_tokens) + np.repeat(start_B - query_start_loc[:num_seqs], count_B)
    seq_lens = np.empty(padded_seqs, dtype=np.int32)
    seq_lens[:num_seqs] = end_B
    block_T, offset_T = np.divmod(index_T, buffers.block_size)
    buffers.token_ids_T.host[:num_tokens] = slots.token_ids_NL[slot_T, index_T]
    buffers.positions_3T.host[:, :num_tokens] = slots.positions_3NL[:, slot_T, index_T]
    buffers.slot_mapping_T.host[:num_tokens] = (
        slots.block_tables_NM[slot_T, block_T].astype(np.int64) * buffers.block_size + offset_T
    )
    width = -(-int(end_B.max()) // buffers.block_size)
    buffers.block_tables_BM.host[:num_seqs, :width] = slots.block_tables_NM[slot_B, :width]

    if shape.is_decode:
        sampling_B, sampling_slots_S, sampling_lengths_S = np.arange(num_seqs), slot_B, end_B
    else:
        sampling_B = np.array([b for b, (_, part) in enumerate(step) if part.is_sampling], dtype=np.int64)
        sampling_slots_S, sampling_lengths_S = slot_B[sampling_B], end_B[sampling_B]
    # Sequences that do not sample leave their place to the first token, whose logits nobody reads.
    buffers.logits_index_S.host[: len(sampling_B)] = query_start_loc[sampling_B + 1] - 1
    buffers.logits_index_S.host[len(sampling_B) :] = 0
    if padded_tokens > num_tokens:
        _pad(buffers, query_start_loc, seq_lens, num_tokens, num_seqs, padded_tokens)
    buffers.upload(num_tokens=padded_tokens, num_seqs=padded_seqs)
    return StepBatch(
        padded_tokens=padded_tokens,
        attention=AttentionBatch(
            query_start_loc_cpu=query_start_loc,
            seq_lens_cpu=seq_lens,
            block_tables_BN=buffers.block_tables_BM.device[:padded_seqs],
            slot_mapping_T=buffers.slot_mapping_T.device[:padded_tokens],
            block_tables_cpu=buffers.block_tables_BM.host[:padded_seqs],
            bucket=padding.bucket if padding else None,
        ),
        image_spans=() if shape.is_decode else _image_spans(step, query_start_loc),
        sampling_B=sampling_B,
        sampling_slots_S=sampling_slots_S,
        sampling_lengths_S=sampling_lengths_S,
    )


def _fill_row(buffers: StepBuffers, slots: RequestSlots, step: Step, padding: Padding | None) -> StepBatch:
    """`fill_batch` for one sequence that decodes: indices instead of whole arrays, a third of the time."""
    ((running, part),) = step
    slot, index = running.slot, part.num_computed_tokens
    block, offset = divmod(index, buffers.block_size)
    table = slots.block_tables_NM[slot, : block + 1]
    buffers.token_ids_T.host[0] = slots.token_ids_NL[slot, index]
    buffers.positions_3T.host[:, 0] = slots.positions_3NL[:, slot, index]
    buffers.slot_mapping_T.host[0] = int(table[block]) * buffers.block_size + offset
    buffers.block_tables_BM.host[0, : block + 1] = table
    buffers.logits_index_S.host[:] = 0
    buffers.upload(num_tokens=1, num_seqs=1)
    return StepBatch(
        padded_tokens=1,
        attention=AttentionBatch(
            query_start_loc_cpu=np.array((0, 1), dtype=np.int32),
            seq_lens_cpu=np.array((index + 1,), dtype=np.int32),
            block_tables_BN=buffers.block_tables_BM.device[:1],
            slot_mapping_T=buffers.slot_mapping_T.device[:1],
            block_tables_cpu=buffers.block_tables_BM.host[:1],
            bucket=padding.bucket if padding else None,
        ),
        image_spans=(),
        sampling_B=np.zeros(1, dtype=np.int64),
        sampling_slots_S=np.array((slot,), dtype=np.int64),
        sampling_lengths_S=np.array((index + 1,), dtype=np.int64),
    )


def _padded_sizes(num_tokens: int, num_seqs: int, padding: Padding | None) -> tuple[int, int]:
    if padding is None:
        return num_tokens, num_seqs
    assert padding.tokens >= num_tokens, (padding.tokens, num_tokens)
    num_missing = padding.tokens - num_tokens
    return padding.tokens, num_seqs + (min(1, num_missing) if padding.is_mixed else num_missing)


def _pad(
    buffers: StepBuffers,
    query_start_loc: NDArray[np.int32],
    seq_lens: NDArray[np.int32],
    num_tokens: int,
    num_seqs: int,
    padded_tokens: int,
) -> None:
    """Fills up with sequences on the null block.

    In a decode bucket each has one token, writes the block's last slot and reads its first. In a mixed bucket there is
    one, as long as the tail, and its table repeats the null block.
    """
    num_pads = len(seq_lens) - num_seqs
    length = (padded_tokens - num_tokens) // num_pads
    query_start_loc[num_seqs + 1 :] = num_tokens + length * np.arange(1, num_pads + 1)
    seq_lens[num_seqs:] = length
    tail = slice(num_tokens, padded_tokens)
    buffers.token_ids_T.host[tail] = 0
    buffers.positions_3T.host[:, tail] = 0
    first_slot = NULL_BLOCK * buffers.block_size
    last_offset = buffers.block_size - 1
    offsets = np.arange(length) % buffers.block_size if num_pads == 1 and length > 1 else last_offset
    buffers.slot_mapping_T.host[tail] = first_slot + offsets
    width = -(-length // buffers.block_size)
    buffers.block_tables_BM.host[num_seqs : len(seq_lens), :width] = NULL_BLOCK


def _image_spans(step: Step, query_start_loc: NDArray[np.int32]) -> tuple[ImageSpan, ...]:
    """Which rows of which image the step's placeholder tokens take; a chunk may begin or end within an image."""
    spans: list[ImageSpan] = []
    for b, (running, part) in enumerate(step):
        start, end = part.num_computed_tokens, part.num_computed_tokens + part.num_scheduled_tokens
        for _, image in running.images_within(start, end):
            place = image.placeholder
            first, last = max(start, place.offset), min(end, place.end)
            spans.append(
                ImageSpan(
                    token_start=int(query_start_loc[b]) + first - start,
                    image_hash=image.image_hash,
                    row_start=first - place.offset,
                    row_end=last - place.offset,
                )
            )
    return tuple(spans)
