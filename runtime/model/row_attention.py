"""Attention of a step in which each sequence has one query, in NumPy: most steps of a CPU.

An operator of NumPy takes less than a microsecond where torch's take two to ten (docs/decisions.md). One sequence has a
way of its own, by indices instead of arrays. Any other step is `PagedSdpaAttention`'s, which is the plain twin too.

Legend: B sequences, L cached tokens, K KV heads, G heads to a KV head, E head width, F = K * E, C chunks of a cache
(see `sdpa`).
"""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from runtime.model.attention import AttentionBatch, KVLayers
from runtime.model.sdpa import PagedSdpaAttention

Array = NDArray[np.float32]

# Beyond, torch's blocked kernel is the faster one.
MAX_ROW_LENGTH = 512

# Tokens whose keys and values several sequences may gather together, padding included: 4 MB in the bench's model.
MAX_GATHERED_TOKENS = 4096


class RowAttention(PagedSdpaAttention):
    """`PagedSdpaAttention` with a second way for single queries, `attend` and `attend_rows`; float32 on a CPU only.

    After `plan`, a layer is attended by `forward`, or by `attend` where `can_attend_row` says so, or by `attend_rows`
    where `can_attend_rows` does.
    """

    def __init__(self, kv: KVLayers, *, num_layers: int) -> None:
        super().__init__(kv, num_layers=num_layers)
        views = [kv.layer(index) for index in range(num_layers)]
        num_blocks, _, block_size, num_kv_heads, head_dim = views[0].shape
        chunk_size = block_size * num_kv_heads * head_dim
        self._head_shape = (num_kv_heads, head_dim)
        starts = [view.storage_offset() - views[0].storage_offset() for view in views]
        self._layer_chunks = [start // chunk_size for start in starts]
        # All layers' chunks in one array: from the first layer's first one to the last layer's last one.
        num_chunks = (num_blocks - 1) * self._block_chunks + max(self._layer_chunks) + 2
        chunks = views[0].as_strided((num_chunks, chunk_size), (chunk_size, 1))
        self._all_chunks: Array = chunks.numpy()
        self._all_rows: Array = self._all_chunks.reshape(num_chunks * block_size, -1)
        self._max_gathered_blocks = -(-max(MAX_ROW_LENGTH, MAX_GATHERED_TOKENS) // block_size)
        self._gathered_2C: Array = np.empty((2 * self._max_gathered_blocks, chunk_size), np.float32)
        self._can_attend_row = False
        self._can_attend_rows = False
        # The step, if `PagedSdpaAttention` has not planned it.
        self._unplanned: AttentionBatch | None = None
        # Set by `plan` for `attend`: where layer 0 has the new row, the chunks to gather (keys, then values), where
        # they go, and how products see them there.
        self._row = 0
        self._chunk_ids: NDArray[np.int64] = np.empty(0, np.int64)
        self._target: Array = self._gathered_2C
        self._keys_KEL: Array = self._gathered_2C
        self._values_KLE: Array = self._gathered_2C
        # The same for `attend_rows`; the mask is 0 where a token counts and -inf where it is padding.
        self._rows_B: NDArray[np.int64] = self._chunk_ids
        self._keys_BKEL: Array = self._gathered_2C
        self._values_BKLE: Array = self._gathered_2C
        self._mask_B11L: Array | None = None

    @property
    def can_attend_row(self) -> bool:
        """Whether the planned step is one that `attend` serves."""
        return self._can_attend_row

    @property
    def can_attend_rows(self) -> bool:
        """Whether the planned step is one that `attend_rows` serves."""
        return self._can_attend_rows

    @property
    def workspace_bytes(self) -> int:
        return super().workspace_bytes + self._gathered_2C.nbytes

    def plan(self, batch: AttentionBatch) -> None:
        lengths = batch.seq_lens_cpu
        num_sequences, longest = len(lengths), int(lengths.max())
        is_short = batch.is_decode and longest <= MAX_ROW_LENGTH
        self._can_attend_row = is_short and num_sequences == 1
        num_blocks = -(-longest // self._block_size)
        self._can_attend_rows = (
            is_short and num_sequences > 1 and num_sequences * num_blocks <= self._max_gathered_blocks
        )
        self._unplanned = batch if self._can_attend_row or self._can_attend_rows else None
        if self._can_attend_row:
            self._plan_row(batch, longest)
        elif self._can_attend_rows:
            self._plan_rows(batch, longest, num_blocks)
        else:
            super().plan(batch)

    def forward(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        if self._unplanned is not None:
            super().plan(self._unplanned)
            self._unplanned = None
        return super().forward(layer, q_THD, k_TKD, v_TKD)

    def attend(self, layer: int, q_KGE: Array, k: Array, v: Array, output_KGE: Array) -> None:
        """Stores one token's keys and values [K * E] and attends.

        Args:
            q_KGE: queries, multiplied by E ** -0.5.
            output_KGE: where the result goes.
        """
        chunk = self._layer_chunks[layer]
        row = self._row + chunk * self._block_size
        self._all_rows[row] = k
        self._all_rows[row + self._block_size] = v
        # `clip` takes without a buffer in between; no index is out of bounds.
        self._all_chunks.take(self._chunk_ids + chunk, 0, self._target, "clip")
        scores = np.matmul(q_KGE, self._keys_KEL)
        _attend(scores, self._values_KLE, output_KGE)

    def attend_rows(self, layer: int, q_BKGE: Array, k_BF: Array, v_BF: Array, output_BKGE: Array) -> None:
        """Stores one token's keys and values of each sequence and attends.

        Args:
            q_BKGE: queries, multiplied by E ** -0.5.
            output_BKGE: where the result goes.
        """
        chunk = self._layer_chunks[layer]
        rows_B = self._rows_B + chunk * self._block_size
        self._all_rows[rows_B] = k_BF
        self._all_rows[rows_B + self._block_size] = v_BF
        self._all_chunks.take(self._chunk_ids + chunk, 0, self._target, "clip")
        scores = np.matmul(q_BKGE, self._keys_BKEL)
        if self._mask_B11L is not None:
            np.add(scores, self._mask_B11L, out=scores)
        _attend(scores, self._values_BKLE, output_BKGE)

    def _plan_row(self, batch: AttentionBatch, length: int) -> None:
        num_blocks = -(-length // self._block_size)
        keys = batch.block_tables_BN.numpy()[0, :num_blocks] * np.int64(self._block_chunks)
        self._chunk_ids = np.concatenate((keys, keys + 1))
        block, offset = divmod(batch.slot_mapping_T.item(), self._block_size)
        self._row = int(block * self._block_chunks * self._block_size + offset)
        self._target = self._gathered_2C[: 2 * num_blocks]
        rows = self._target.reshape(2, num_blocks * self._block_size, *self._head_shape)[:, :length]
        self._keys_KEL, self._values_KLE = rows[0].transpose(1, 2, 0), rows[1].transpose(1, 0, 2)

    def _plan_rows(self, batch: AttentionBatch, longest: int, num_blocks: int) -> None:
        lengths = batch.seq_lens_cpu
        keys = batch.block_tables_BN.numpy()[:, :num_blocks].ravel() * np.int64(self._block_chunks)
        self._chunk_ids = np.concatenate((keys, keys + 1))
        slots = batch.slot_mapping_T.numpy()
        self._rows_B = slots + slots // self._block_size * ((self._block_chunks - 1) * self._block_size)
        self._target = self._gathered_2C[: 2 * len(keys)]
        shape = (2, len(lengths), num_blocks * self._block_size, *self._head_shape)
        rows = self._target.reshape(shape)[:, :, :longest]
        self._keys_BKEL, self._values_BKLE = rows[0].transpose(0, 2, 3, 1), rows[1].transpose(0, 2, 1, 3)
        self._mask_B11L = None
        if lengths.min() < longest:
            is_padding = np.arange(longest) >= lengths[:, None]
            self._mask_B11L = np.where(is_padding, np.float32(-np.inf), np.float32(0))[:, None, None]


def _attend(scores: Array, values: Array, output: Array) -> None:
    """`softmax(scores) @ values`, scores [..., G, L] and values [..., L, E]; overwrites the scores."""
    np.subtract(scores, np.maximum.reduce(scores, axis=-1, keepdims=True), out=scores)
    np.exp(scores, out=scores)
    np.matmul(scores, values, out=output)
    np.divide(output, np.add.reduce(scores, axis=-1, keepdims=True), out=output)
