"""Decoder attention through FlashInfer's paged kernels: the CUDA path. Knows no models and no requests.

One wrapper for each captured bucket, and one for eager steps. All share one float workspace, one integer workspace and
one array of indices: only one of them runs at a time, and everything that a plan writes is ordered by the stream.

    plan        numpy: pages of each sequence -> one pinned array -> one copy; FlashInfer cuts the work into tiles,
                unless the cut of the step before holds (`fa2` cuts by pages: 15 of 16 steps of one sequence)
    forward     keys and values into their slots, then attention; nothing of it reads the host, so graphs capture it
    anticipate  while the device works on a decode step: the cut for the same sequences, each a token longer

Decoding runs `fa2` with tensor cores even where prefills run `fa3`: `fa3` does not pack the query heads that share
a KV head into one tile, `fa2` does, and one compiled module then serves prefills too.

Legend: T tokens of a step, B sequences, H heads, K KV heads, D head width, R rows of a cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.model.attention import AttentionBatch, AttentionBucket, KVLayers
from runtime.model.flashinfer_wrapper import FlashInfer, Workspaces, Wrapper, WrapperShape
from runtime.model.page_plan import (
    INT_WORKSPACE_BYTES,
    IndexLayout,
    Kernel,
    PagePlan,
    float_workspace_bytes,
    page_plan,
    write_indices,
)
from runtime.staging import PinnedPair

# Head widths that both kernels are compiled for.
HEAD_DIMS = (64, 128, 256)


@dataclass(frozen=True, kw_only=True)
class AttentionLimits:
    """How large a step can be. `buckets`: the shapes that graphs capture."""

    num_heads: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    buckets: Sequence[AttentionBucket] = ()


class FlashInferAttention:
    """Causal attention over the paged cache, with `forward` fit for capture in every planned bucket."""

    def __init__(
        self,
        kv: KVLayers,
        *,
        num_layers: int,
        limits: AttentionLimits,
        kernel: Kernel,
        num_multiprocessors: int,
        flashinfer: FlashInfer,
    ) -> None:
        """Allocates the workspaces, and compiles or loads FlashInfer's modules.

        `kernel`: of prefills and mixed steps.
        """
        views = [kv.layer(index) for index in range(num_layers)]
        self._views = views
        self._caches = [(view[:, 0], view[:, 1]) for view in views]
        self._cache_rows = [_rows(view) for view in views]
        self._block_size = kv.block_size
        _, _, _, num_kv_heads, head_dim = views[0].shape
        self._rows_between_blocks = views[0].stride(0) // (num_kv_heads * head_dim) - self._block_size
        device = views[0].device
        blocks_of_sequence = -(-limits.max_model_len // self._block_size)
        blocks_of_tail = -(-limits.max_num_batched_tokens // self._block_size)
        max_seqs = max([limits.max_num_seqs, *(bucket.num_seqs for bucket in limits.buckets)]) + 1
        self._layout = IndexLayout(max_seqs=max_seqs, max_pages=max_seqs * blocks_of_sequence + blocks_of_tail)
        self._indices = torch.zeros(self._layout.size, dtype=torch.int32, device=device)
        self._pinned_indices = PinnedPair(self._layout.size, torch.int32, device)
        self._shared = Workspaces(
            floats=torch.empty(
                float_workspace_bytes(
                    limits.buckets,
                    kernel=kernel,
                    num_heads=limits.num_heads,
                    num_kv_heads=num_kv_heads,
                    head_dim=head_dim,
                    num_multiprocessors=num_multiprocessors,
                ),
                dtype=torch.uint8,
                device=device,
            ),
            ints=torch.empty(INT_WORKSPACE_BYTES, dtype=torch.uint8, device=device),
            pinned_ints=PinnedPair(INT_WORKSPACE_BYTES, torch.uint8, device),
            kv_lens=torch.zeros(max_seqs, dtype=torch.int32, device=device),
        )
        self._shape = WrapperShape(
            num_heads=limits.num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=self._block_size,
            dtype=views[0].dtype,
        )
        self._flashinfer = flashinfer
        self._eager = {
            "decode": self._wrapper("fa2", None),
            "mixed": self._wrapper(kernel, None),
        }
        self._captured = {
            bucket: self._wrapper(kernel if bucket.is_mixed else "fa2", bucket) for bucket in limits.buckets
        }
        # What the integer workspace holds now.
        self._scheduled: tuple[Wrapper, bytes] | None = None
        # The step that was planned last.
        self._wrapper_in_use: Wrapper | None = None
        self._plan_in_use: PagePlan | None = None
        self._slots_T = torch.empty(0, dtype=torch.int64, device=device)
        # Rows of the step's keys, and of its values. They have a place of their own: what a forward leaves behind it
        # in a graph's pool would be a live block there, also of a capture that failed.
        self._rows_2T = torch.zeros(2, limits.max_num_batched_tokens, dtype=torch.int64, device=device)

    @property
    def workspace_bytes(self) -> int:
        """Bytes on the device that are held from step to step, beside the cache."""
        shared = self._shared
        tensors = (shared.floats, shared.ints, shared.kv_lens, self._indices, self._rows_2T)
        return sum(tensor.nbytes for tensor in tensors)

    def reserve(self, max_model_len: int) -> None:
        """Everything has its final size since construction."""
        assert max_model_len <= self._layout.max_pages * self._block_size, max_model_len

    def plan(self, batch: AttentionBatch) -> None:
        """Puts the step's pages on the device, and cuts its work. Waits for nothing."""
        wrapper = self._choose(batch)
        plan = page_plan(
            batch.query_start_loc_cpu,
            batch.seq_lens_cpu,
            block_size=self._block_size,
            num_seqs=batch.bucket.num_seqs if batch.bucket else None,
        )
        slot = self._pinned_indices.take()
        end = write_indices(slot.array, self._layout, plan, batch, block_size=self._block_size)
        self._indices[:end].copy_(slot.tensor[:end], non_blocking=True)
        slot.fence.record()
        self._schedule(wrapper, plan)
        wrapper.use(self._indices, self._layout, plan)
        self._wrapper_in_use, self._plan_in_use = wrapper, plan
        self._slots_T = batch.slot_mapping_T

    def anticipate(self) -> None:
        """Cuts the work of the decode step that most likely follows a decode step. A wrong guess costs nothing that
        anybody waits for: `plan` sees that the cut does not fit, and makes another."""
        wrapper, plan = self._wrapper_in_use, self._plan_in_use
        if wrapper is None or plan is None or plan.num_rows != len(plan.kv_lens):
            return
        longer = page_plan(plan.qo_indptr, plan.kv_lens + 1, block_size=self._block_size)
        if longer.num_pages <= self._layout.max_pages:
            self._schedule(wrapper, longer)

    def forward(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Stores keys and values, then gives the attention output [T, H, D]."""
        rows_2T = self._rows_2T[:, : len(self._slots_T)]
        if layer == 0:
            # Here, not in `plan`: a graph must compute it from the slots of its own step.
            blocks_T = self._slots_T.div(self._block_size, rounding_mode="floor")
            torch.add(self._slots_T, blocks_T, alpha=self._rows_between_blocks, out=rows_2T[0])
            torch.add(rows_2T[0], self._block_size, out=rows_2T[1])
        rows = self._cache_rows[layer]
        both_2TKD = _as_one(k_TKD, v_TKD)
        if both_2TKD is not None:
            rows.index_put_((rows_2T,), both_2TKD)
        else:
            rows.index_put_((rows_2T[0],), k_TKD)
            rows.index_put_((rows_2T[1],), v_TKD)
        return self.attend(layer, q_THD)

    def place(self, layer: int) -> tuple[Tensor, Tensor]:
        """Where the step's keys and values of a layer belong."""
        return self._views[layer], self._slots_T

    def attend(self, layer: int, q_THD: Tensor) -> Tensor:
        """The attention output [T, H, D], keys and values being in their place."""
        assert self._wrapper_in_use is not None, "forward before plan"
        return self._wrapper_in_use.run(q_THD, self._caches[layer])

    def _choose(self, batch: AttentionBatch) -> Wrapper:
        if batch.bucket is not None:
            return self._captured[batch.bucket]
        return self._eager["decode" if batch.is_decode else "mixed"]

    def _schedule(self, wrapper: Wrapper, plan: PagePlan) -> None:
        key = plan.schedule_key(wrapper.kernel)
        if self._scheduled is not None and self._scheduled[0] is wrapper and self._scheduled[1] == key:
            return
        self._scheduled = None
        wrapper.schedule(plan)
        self._scheduled = (wrapper, key)

    def _wrapper(self, kernel: Kernel, bucket: AttentionBucket | None) -> Wrapper:
        return Wrapper(self._flashinfer, kernel, bucket, self._shape, self._shared, self._indices, self._layout)


def _rows(view: Tensor) -> Tensor:
    """One layer's keys and values as rows [R, K, D], from its first block's first key to its last block's last value;
    other layers' rows lie between."""
    num_blocks, _, block_size, num_kv_heads, head_dim = view.shape
    row = num_kv_heads * head_dim
    assert view.stride()[1:] == (block_size * row, row, head_dim, 1), "a block's keys and values are not contiguous"
    assert view.stride(0) % row == 0, "blocks do not lie a whole number of rows apart"
    num_rows = (num_blocks - 1) * (view.stride(0) // row) + 2 * block_size
    return view.as_strided((num_rows, num_kv_heads, head_dim), (row, head_dim, 1))


def _as_one(k_TKD: Tensor, v_TKD: Tensor) -> Tensor | None:
    """Keys and values as one view [2, T, K, D], where a token's values follow its keys in memory, as they do in rows
    of one tensor: one kernel then stores both."""
    num_tokens, num_kv_heads, head_dim = k_TKD.shape
    follows = v_TKD.storage_offset() - k_TKD.storage_offset() == num_kv_heads * head_dim
    is_same = k_TKD.untyped_storage().data_ptr() == v_TKD.untyped_storage().data_ptr()
    if not (follows and is_same and k_TKD.stride() == v_TKD.stride() and k_TKD.stride()[1:] == (head_dim, 1)):
        return None
    stride = (num_kv_heads * head_dim, *k_TKD.stride())
    return k_TKD.as_strided((2, num_tokens, num_kv_heads, head_dim), stride)
