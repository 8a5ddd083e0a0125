"""Attention through torch's scaled_dot_product_attention: what a CPU runs, and the plain twin of CUDA's kernels.

`prepare` and `plan` read lengths on the host and choose shapes by them, so none of this is for graph capture.

Legend: P patches, T tokens of a step, B sequences, Q queries, L cached tokens, H heads, K KV heads, G heads to a KV
head, D head width, N blocks of a table, R rows of a cache (one token's keys or values in one layer).
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.model.attention import AttentionBatch, KVLayers, Segments

# Prompts are attended in pieces of this many queries, so that a mask has QUERY_PIECE x L entries and not Q x L, and
# keys after a piece cost nothing.
QUERY_PIECE = 256

# Decoding sequences share one padded batch unless it would gather this many times the keys of the shortest.
MAX_LENGTH_RATIO = 2

# Where rows of a mask must begin for torch's kernels on a GPU.
ALIGNMENT_BYTES = 16

# Up to this many tokens, padding costs less than one more call.
SHORT_LENGTH = 128


@dataclass(frozen=True, kw_only=True)
class _Run:
    """`count` neighbouring segments of `length` patches each, from patch `start` on."""

    start: int
    count: int
    length: int


class SdpaEncoderAttention:
    """Segments of one length that are neighbours go in one call: an image's whole windows, images of one size."""

    def prepare(self, segments: Segments) -> object:
        """The runs of equal segments; empty segments vanish."""
        lengths = segments.cu_seqlens_S.diff().cpu().numpy()
        lengths = lengths[lengths > 0]
        if not len(lengths):
            return ()
        starts = np.flatnonzero(np.diff(lengths, prepend=0))
        counts = np.diff(starts, append=len(lengths))
        runs: list[_Run] = []
        patch = 0
        for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
            length = int(lengths[start])
            runs.append(_Run(start=patch, count=count, length=length))
            patch += count * length
        return tuple(runs)

    def forward(self, prepared: object, q_PHD: Tensor, k_PHD: Tensor, v_PHD: Tensor) -> Tensor:
        """Attention output [P, H, D] within each segment."""
        assert isinstance(prepared, tuple)
        pieces = [self._attend(run, q_PHD, k_PHD, v_PHD) for run in prepared]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    @staticmethod
    def _attend(run: _Run, *qkv_PHD: Tensor) -> Tensor:
        heads, width = qkv_PHD[0].shape[1:]
        end = run.start + run.count * run.length
        shape = (run.count, run.length, heads, width)
        q, k, v = (x[run.start : end].view(shape).transpose(1, 2) for x in qkv_PHD)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, heads, width)


class DenseSdpaAttention:
    """The plain twin without a cache: each sequence's tokens are all in the step, and attend causally to each other."""

    def __init__(self) -> None:
        self._bounds: list[tuple[int, int]] = []

    def plan(self, batch: AttentionBatch) -> None:
        self._bounds = list(pairwise(batch.query_start_loc_cpu.tolist()))
        assert np.array_equal(np.diff(batch.query_start_loc_cpu), batch.seq_lens_cpu), "tokens outside of the step"

    def anticipate(self) -> None:
        """Nothing to prepare."""

    def forward(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Attention output [T, H, D]."""
        groups = q_THD.shape[1] // k_TKD.shape[1]
        outputs: list[Tensor] = []
        for start, end in self._bounds:
            q, k, v = (x[start:end].transpose(0, 1) for x in (q_THD, k_TKD, v_TKD))
            k, v = k.repeat_interleave(groups, dim=0), v.repeat_interleave(groups, dim=0)
            outputs.append(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1))
        return torch.cat(outputs)


@dataclass(frozen=True, kw_only=True)
class _DecodeGroup:
    """Sequences with one query each, padded to one length.

    `queries_B`: their queries in the step, None for all of them. `chunks`: chunks of the cache to gather, keys of all
    sequences, then values [2 * B * N]. `mask_B11L`: 0 where a cached token counts, -inf where it is padding; None when
    all are of one length.
    """

    queries_B: Tensor | None
    chunks: Tensor
    length: int
    mask_B11L: Tensor | None


@dataclass(frozen=True, kw_only=True)
class _Prompt:
    """One sequence with several queries, `start` .. `end` of the step, the last of `length` tokens.

    `chunks`: chunks of the cache to gather, keys, then values [2 * N]; None when all its tokens are in the step.
    """

    start: int
    end: int
    length: int
    chunks: Tensor | None


class PagedSdpaAttention:
    """Causal attention over the paged cache. Decoding sequences go in one batch, prompts one by one.

    A layer of the cache is viewed as chunks: the `block_size` rows of keys, or of values, of one block are contiguous,
    and all chunks lie a whole number of chunks apart. Gathering is then one copy of large pieces:

        block 0                        block 1
        | layer 0: k v | layer 1: k v | layer 0: k v | ...      chunk of layer l's keys in block b, seen from the
                                                                layer's view = b * (chunks to a block), values + 1
    """

    def __init__(self, kv: KVLayers, *, num_layers: int) -> None:
        views = [kv.layer(index) for index in range(num_layers)]
        self._block_size = kv.block_size
        num_blocks, _, block_size, num_kv_heads, head_dim = views[0].shape
        row = num_kv_heads * head_dim
        chunk = block_size * row
        stride = views[0].stride(0)
        assert views[0].stride()[1:] == (chunk, row, head_dim, 1), "a block's keys and values are not contiguous"
        assert stride % chunk == 0, "blocks do not lie a whole number of chunks apart"
        self._block_chunks = stride // chunk
        num_chunks = (num_blocks - 1) * self._block_chunks + 2
        self._chunks = [
            view.as_strided((num_chunks, block_size, num_kv_heads, head_dim), (chunk, row, head_dim, 1))
            for view in views
        ]
        self._rows = [chunks.flatten(0, 1) for chunks in self._chunks]
        self._decodes: list[_DecodeGroup] = []
        self._prompts: list[_Prompt] = []
        self._key_rows_T = torch.empty(0, dtype=torch.int64)
        self._value_rows_T = self._key_rows_T
        self._band = torch.empty(0, 0)

    @property
    def workspace_bytes(self) -> int:
        """Bytes that are held from step to step, beside the cache."""
        return self._band.nbytes

    def reserve(self, max_model_len: int) -> None:
        """Makes room for sequences of that many tokens, so that no step has to."""
        self._widen_band(max_model_len)

    def plan(self, batch: AttentionBatch) -> None:
        """Works out what to gather, once for all layers."""
        slots = batch.slot_mapping_T
        blocks = slots.div(self._block_size, rounding_mode="floor")
        # From slots of a block-by-block numbering to rows of chunks: a block is block_chunks chunks further on.
        self._key_rows_T = slots + blocks * ((self._block_chunks - 1) * self._block_size)
        self._value_rows_T = self._key_rows_T + self._block_size

        lengths = batch.seq_lens_cpu
        starts = batch.query_start_loc_cpu
        num_queries = np.diff(starts)
        decoding = np.flatnonzero(num_queries == 1)
        self._decodes = [
            self._decode_group(batch, members, len(slots)) for members in _similar_lengths(decoding, lengths)
        ]
        self._prompts = [
            self._prompt(batch, index, int(starts[index]), int(num_queries[index]), int(lengths[index]))
            for index in np.flatnonzero(num_queries > 1).tolist()
        ]

    def anticipate(self) -> None:
        """Nothing to prepare: a plan is quick, and no device works meanwhile on a CPU."""

    def forward(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Stores keys and values, then gives the attention output [T, H, D]."""
        rows = self._rows[layer]
        rows.index_copy_(0, self._key_rows_T, k_TKD)
        rows.index_copy_(0, self._value_rows_T, v_TKD)
        chunks = self._chunks[layer]
        if not self._prompts and len(self._decodes) == 1:
            return self._decode(self._decodes[0], chunks, q_THD)
        output = torch.empty_like(q_THD)
        for group in self._decodes:
            assert group.queries_B is not None
            queries = q_THD.index_select(0, group.queries_B)
            output.index_copy_(0, group.queries_B, self._decode(group, chunks, queries))
        for prompt in self._prompts:
            bounds = slice(prompt.start, prompt.end)
            output[bounds] = self._attend(prompt, chunks, q_THD[bounds], k_TKD[bounds], v_TKD[bounds])
        return output

    def _decode_group(self, batch: AttentionBatch, members: np.ndarray, num_tokens: int) -> _DecodeGroup:
        lengths = batch.seq_lens_cpu[members]
        longest = int(lengths.max())
        device = batch.block_tables_BN.device
        tables = batch.block_tables_BN[:, : -(-longest // self._block_size)]
        is_whole_step = len(members) == num_tokens
        if not is_whole_step or len(members) < len(tables):
            tables = tables.index_select(0, torch.from_numpy(members).to(device))
        mask = None
        if (lengths != longest).any():
            lengths_B1 = torch.from_numpy(lengths).to(device).unsqueeze(1)
            is_padding = torch.arange(longest, device=device) >= lengths_B1
            mask = torch.zeros(is_padding.shape, dtype=self._rows[0].dtype, device=device)
            mask = aligned(mask.masked_fill_(is_padding, float("-inf"))[:, None, None, :])
        queries = None if is_whole_step else torch.from_numpy(batch.query_start_loc_cpu[members]).to(device).long()
        return _DecodeGroup(queries_B=queries, chunks=self._gathered(tables), length=longest, mask_B11L=mask)

    def _prompt(self, batch: AttentionBatch, index: int, start: int, num_queries: int, length: int) -> _Prompt:
        chunks = None
        if num_queries < length:
            self._widen_band(length)
            num_blocks = -(-length // self._block_size)
            chunks = self._gathered(batch.block_tables_BN[index : index + 1, :num_blocks])
        return _Prompt(start=start, end=start + num_queries, length=length, chunks=chunks)

    def _gathered(self, tables_BN: Tensor) -> Tensor:
        """Chunks of keys, then of values, of all blocks of the tables."""
        keys = tables_BN.flatten().long() * self._block_chunks
        return torch.cat((keys, keys + 1))

    def _decode(self, group: _DecodeGroup, chunks: Tensor, q_BHD: Tensor) -> Tensor:
        num_sequences, num_heads, head_dim = q_BHD.shape
        num_kv_heads = chunks.shape[2]
        gathered = chunks.index_select(0, group.chunks).view(2, num_sequences, -1, num_kv_heads, head_dim)
        k_BKLD, v_BKLD = gathered[:, :, : group.length].transpose(2, 3).unbind(0)
        # The G heads of a KV head stand where queries do: the same keys serve them without being repeated.
        q_BKGD = q_BHD.reshape(num_sequences, num_kv_heads, -1, head_dim)
        output = F.scaled_dot_product_attention(q_BKGD, k_BKLD, v_BKLD, attn_mask=group.mask_B11L)
        return output.reshape(num_sequences, num_heads, head_dim)

    def _attend(self, prompt: _Prompt, chunks: Tensor, q_QHD: Tensor, k_QKD: Tensor, v_QKD: Tensor) -> Tensor:
        num_kv_heads, head_dim = k_QKD.shape[1:]
        groups = q_QHD.shape[1] // num_kv_heads
        # [Q, K * G, D] -> [K, G, Q, D]: the G heads share keys through a stride of zero.
        q_KGQD = q_QHD.view(-1, num_kv_heads, groups, head_dim).permute(1, 2, 0, 3)
        if prompt.chunks is None:
            k, v = (x.transpose(0, 1).unsqueeze(1).expand(-1, groups, -1, -1) for x in (k_QKD, v_QKD))
            output = F.scaled_dot_product_attention(q_KGQD, k, v, is_causal=True)
            return output.permute(2, 0, 1, 3).reshape(q_QHD.shape)
        gathered = chunks.index_select(0, prompt.chunks).view(2, -1, num_kv_heads, head_dim)[:, : prompt.length]
        k, v = gathered.transpose(1, 2).unsqueeze(2).expand(-1, -1, groups, -1, -1).unbind(0)
        num_queries = len(q_QHD)
        outputs: list[Tensor] = []
        for start in range(0, num_queries, QUERY_PIECE):
            end = min(start + QUERY_PIECE, num_queries)
            context = prompt.length - num_queries + start
            visible = context + end - start
            piece = F.scaled_dot_product_attention(
                q_KGQD[:, :, start:end],
                k[:, :, :visible],
                v[:, :, :visible],
                attn_mask=self._mask(context, end - start),
            )
            outputs.append(piece.permute(2, 0, 1, 3))
        return torch.cat(outputs).reshape(q_QHD.shape)

    def _mask(self, context: int, num_queries: int) -> Tensor:
        """[num_queries, context + num_queries]: query i sees the context and the queries up to itself."""
        width = self._band.shape[1] - QUERY_PIECE
        return aligned(self._band[:num_queries, width - context : width + num_queries])

    def _widen_band(self, length: int) -> None:
        """The band that masks are cut from: zeros for any context, then a square with -inf above its diagonal."""
        if self._band.shape[1] >= length + QUERY_PIECE:
            return
        rows = self._rows[0]
        width = 1 << (length - 1).bit_length()
        square = torch.full((QUERY_PIECE, QUERY_PIECE), float("-inf"), dtype=rows.dtype, device=rows.device).triu_(1)
        self._band = torch.cat((square.new_zeros(QUERY_PIECE, width), square), dim=1)


def aligned(mask: Tensor) -> Tensor:
    """The mask, on a GPU a copy whose rows begin at multiples of 16 bytes: the kernel that torch picks on Hopper reads
    several entries at a time, and faults where a row begins at an odd one."""
    if mask.device.type == "cpu":
        return mask
    step = ALIGNMENT_BYTES // mask.element_size()
    width = mask.shape[-1]
    rows = mask.new_empty((*mask.shape[:-1], -(-width // step) * step))[..., :width]
    return rows.copy_(mask)


def _similar_lengths(sequences: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Parts the sequences such that in each part the longest has at most MAX_LENGTH_RATIO times the shortest's tokens.

    One part, in the given order, when that holds as it is, or when all is so short that a call costs more.
    """
    if not len(sequences):
        return []
    own = lengths[sequences]
    if own.max() <= max(MAX_LENGTH_RATIO * own.min(), SHORT_LENGTH):
        return [sequences]
    order = sequences[np.argsort(own, kind="stable")]
    parts: list[np.ndarray] = []
    start = 0
    for index in range(1, len(order) + 1):
        limit = max(MAX_LENGTH_RATIO * lengths[order[start]], SHORT_LENGTH)
        if index == len(order) or lengths[order[index]] > limit:
            parts.append(order[start:index])
            start = index
    return parts
