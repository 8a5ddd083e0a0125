"""Attention of a step that is one query of one sequence, in NumPy: most steps of a CPU that serves one request.

An operator of NumPy takes less than a microsecond where torch's take two to ten (docs/decisions.md). Any other step is
`PagedSdpaAttention`'s, which is the plain twin too.

Legend: L cached tokens, K KV heads, G heads to a KV head, E head width, C chunks of a cache (see `sdpa`).
"""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from runtime.model.attention import AttentionBatch, KVLayers
from runtime.model.sdpa import PagedSdpaAttention

Array = NDArray[np.float32]

# Beyond, torch's blocked kernel is the faster one.
MAX_ROW_LENGTH = 512


class RowAttention(PagedSdpaAttention):
    """`PagedSdpaAttention` with a second way for a single query, `attend`; float32 on a CPU only.

    After `plan`, a layer is attended by `forward`, or by `attend` where `can_attend_row` says so.
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
        self._gathered_2C: Array = np.empty((2 * -(-MAX_ROW_LENGTH // block_size), chunk_size), np.float32)
        self._can_attend_row = False
        # The step, if `PagedSdpaAttention` has not planned it.
        self._unplanned: AttentionBatch | None = None
        # Set by `plan` for `attend`: where layer 0 has the new row, the chunks to gather (keys, then values), where
        # they go, and how products see them there.
        self._row = 0
        self._chunk_ids: NDArray[np.int64] = np.empty(0, np.int64)
        self._target: Array = self._gathered_2C
        self._keys_KEL: Array = self._gathered_2C
        self._values_KLE: Array = self._gathered_2C

    @property
    def can_attend_row(self) -> bool:
        """Whether the planned step is one that `attend` serves."""
        return self._can_attend_row

    @property
    def workspace_bytes(self) -> int:
        return super().workspace_bytes + self._gathered_2C.nbytes

    def plan(self, batch: AttentionBatch) -> None:
        lengths = batch.seq_lens_cpu
        self._can_attend_row = len(lengths) == 1 == batch.query_start_loc_cpu[1] and lengths[0] <= MAX_ROW_LENGTH
        if self._can_attend_row:
            self._unplanned = batch
            self._plan_row(batch, int(lengths[0]))
        else:
            self._unplanned = None
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
        np.subtract(scores, np.maximum.reduce(scores, axis=-1, keepdims=True), out=scores)
        np.exp(scores, out=scores)
        np.matmul(scores, self._values_KLE, out=output_KGE)
        np.divide(output_KGE, np.add.reduce(scores, axis=-1, keepdims=True), out=output_KGE)

    def _plan_row(self, batch: AttentionBatch, length: int) -> None:
        num_blocks = -(-length // self._block_size)
        keys = batch.block_tables_BN.numpy()[0, :num_blocks] * np.int64(self._block_chunks)
        self._chunk_ids = np.concatenate((keys, keys + 1))
        block, offset = divmod(batch.slot_mapping_T.item(), self._block_size)
        self._row = int(block * self._block_chunks * self._block_size + offset)
        self._target = self._gathered_2C[: 2 * num_blocks]
        rows = self._target.reshape(2, num_blocks * self._block_size, *self._head_shape)[:, :length]
        self._keys_KEL, self._values_KLE = rows[0].transpose(1, 2, 0), rows[1].transpose(1, 0, 2)
