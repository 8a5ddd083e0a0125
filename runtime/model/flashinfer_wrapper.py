"""One of FlashInfer's wrappers over workspaces that all of them share. Reaches into a known release's insides, to plan
without its second copy of the indices.

Knows pages and tiles of one step; knows no cache and no layers.

Legend: T tokens of a step, B sequences, H heads, D head width.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from runtime.model.attention import AttentionBucket
from runtime.model.page_plan import IndexLayout, Kernel, PagePlan, page_plan
from runtime.staging import PinnedPair

# The release whose wrappers `_replan` may reach into; others are planned through their public method.
KNOWN_VERSION = "0.6.12"


class FlashInfer(Protocol):
    """The part of the package `flashinfer` that is used here. A test brings its own."""

    __version__: str
    BatchPrefillWithPagedKVCacheWrapper: Any


@dataclass(frozen=True, kw_only=True)
class WrapperShape:
    """What every plan of a model has in common. `dtype`: of queries, keys and values."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Workspaces:
    """What all wrappers write to, one after the other: FlashInfer's float and integer workspaces as bytes, the integer
    one's twins in pinned memory, and lengths, int32 [B]."""

    floats: Tensor
    ints: Tensor
    pinned_ints: PinnedPair
    kv_lens: Tensor


class Wrapper:
    """One of FlashInfer's wrappers, for one bucket, or for eager steps when `bucket` is None."""

    def __init__(
        self,
        flashinfer: FlashInfer,
        kernel: Kernel,
        bucket: AttentionBucket | None,
        shape: WrapperShape,
        shared: Workspaces,
        indices: Tensor,
        layout: IndexLayout,
    ) -> None:
        self.kernel: Kernel = kernel
        self._bucket = bucket
        self._shape = shape
        self._shared = shared
        self._is_known = flashinfer.__version__ == KNOWN_VERSION
        buffers: dict[str, Any] = {}
        if bucket is not None:
            qo_indptr, kv_indptr, last_page = _parts(indices, layout, bucket.num_seqs)
            buffers = {
                "use_cuda_graph": True,
                "qo_indptr_buf": qo_indptr,
                "paged_kv_indptr_buf": kv_indptr,
                "paged_kv_indices_buf": indices[layout.indices_start :],
                "paged_kv_last_page_len_buf": last_page,
            }
        self._inner = flashinfer.BatchPrefillWithPagedKVCacheWrapper(shared.floats, "NHD", backend=kernel, **buffers)
        # The wrapper brought 8 MiB of its own on the device and in pinned memory; they go, ours stay.
        self._inner._int_workspace_buffer = shared.ints
        self._inner._pin_memory_int_workspace_buffer = shared.pinned_ints.first
        self._inner._kv_lens_buffer = shared.kv_lens
        self._prime(indices[layout.indices_start :])

    def _prime(self, indices: Tensor) -> None:
        """The first plan, through the public method: loads the module, and tells a graph's wrapper its size."""
        num_seqs = self._bucket.num_seqs if self._bucket else 1
        num_tokens = self._bucket.num_tokens if self._bucket else 1
        first = num_tokens - num_seqs + 1 if num_tokens >= num_seqs else num_tokens
        counts = np.zeros(num_seqs, np.int32)
        counts[: num_tokens - first + 1] = 1
        counts[0] = first
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        plan = page_plan(starts, np.maximum(counts, 1), block_size=self._shape.block_size)
        self._public_plan(plan, indices[: plan.num_pages])

    def _public_plan(self, plan: PagePlan, indices: Tensor) -> None:
        shape = self._shape
        last_page = (plan.kv_lens - 1) % shape.block_size + 1
        self._inner.plan(
            torch.from_numpy(plan.qo_indptr),
            torch.from_numpy(plan.kv_indptr),
            indices,
            torch.from_numpy(last_page),
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.block_size,
            causal=True,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
            seq_lens=torch.from_numpy(plan.kv_lens),
        )

    def schedule(self, plan: PagePlan) -> None:
        """Cuts the step's work; the result goes to the integer workspace, in the stream's order."""
        slot = self._shared.pinned_ints.take()
        self._inner._pin_memory_int_workspace_buffer = slot.tensor
        if self._is_known:
            self._replan(plan, slot.tensor)
        else:
            self._public_plan(plan, self._inner._paged_kv_indices_buf[: plan.num_pages])
        slot.fence.record()

    def _replan(self, plan: PagePlan, pinned: Tensor) -> None:
        """What `plan` of the known release does at its end. The rest of it copies indices once more, and looks for
        longest sequences entry by entry: half of its time (docs/decisions.md)."""
        shape, bucket = self._shape, self._bucket
        arguments: list[Any] = [
            self._shared.floats,
            self._shared.ints,
            pinned,
            torch.from_numpy(plan.qo_indptr),
            torch.from_numpy(plan.kv_indptr),
            torch.from_numpy(plan.kv_lens),
            bucket.num_tokens if bucket else plan.num_rows,
            len(plan.kv_lens),
            shape.num_heads,
            shape.num_kv_heads,
            shape.block_size,
            bucket is not None,
            shape.head_dim,
            shape.head_dim,
            True,  # causal
            -1,  # no window
        ]
        if self.kernel == "fa2":
            arguments += [-1, False, 0]  # no fixed split, splits allowed, nothing runs beside it
        self._inner._plan_info = self._inner._cached_module.plan(*arguments)

    def use(self, indices: Tensor, layout: IndexLayout, plan: PagePlan) -> None:
        """Points the wrapper at the step's indices. A captured one reads them at fixed addresses already."""
        self._inner._qo_indptr_last = plan.num_rows
        if self._bucket is None:
            qo_indptr, kv_indptr, last_page = _parts(indices, layout, len(plan.kv_lens))
            self._inner._qo_indptr_buf = qo_indptr
            self._inner._paged_kv_indptr_buf = kv_indptr
            self._inner._paged_kv_last_page_len_buf = last_page
            self._inner._paged_kv_indices_buf = indices[layout.indices_start :]

    def run(self, q_THD: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
        # Without `out` it would be filled with zeros first: one kernel more in each layer.
        output: Tensor = self._inner.run(
            q_THD, cache, out=torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        )
        return output


def _parts(indices: Tensor, layout: IndexLayout, num_seqs: int) -> tuple[Tensor, Tensor, Tensor]:
    """The device's `qo_indptr` [B + 1], `kv_indptr` [B + 1] and `last_page_len` [B]."""
    return (
        indices[: num_seqs + 1],
        indices[layout.kv_start : layout.kv_start + num_seqs + 1],
        indices[layout.last_page_start : layout.last_page_start + num_seqs],
    )
