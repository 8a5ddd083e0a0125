"""FlashInfer's wrapper as its documentation describes it, in torch on a CPU: computes from the wrapper's buffers alone.

Takes part in tests where the package `flashinfer` would: it reads the page indices that were written to the buffers,
not the arguments of a plan, as a replayed graph does, and it counts plans.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class FakeWrapper:
    """`BatchPrefillWithPagedKVCacheWrapper` of release 0.6.12, with causal masks only."""

    num_public_plans = 0
    num_plans = 0

    def __init__(
        self, floats: Tensor, kv_layout: str, *, backend: str, use_cuda_graph: bool = False, **buffers: Tensor
    ):
        assert kv_layout == "NHD"
        assert backend in ("fa2", "fa3")
        self._backend = backend
        self._float_workspace_buffer = floats
        self._int_workspace_buffer = torch.empty(8)
        self._pin_memory_int_workspace_buffer = torch.empty(8)
        self._use_cuda_graph = use_cuda_graph
        self._qo_indptr_buf = buffers.get("qo_indptr_buf")
        self._paged_kv_indptr_buf = buffers.get("paged_kv_indptr_buf")
        self._paged_kv_indices_buf = buffers.get("paged_kv_indices_buf")
        self._paged_kv_last_page_len_buf = buffers.get("paged_kv_last_page_len_buf")
        self._max_total_num_rows: int | None = None
        self._plan_info: Any = None
        self._cached_module = SimpleNamespace(plan=self._module_plan)

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        causal: bool,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        seq_lens: Tensor,
    ) -> None:
        assert causal
        type(self).num_public_plans += 1
        self._qo_indptr_last = int(qo_indptr[-1])
        if self._use_cuda_graph:
            self._max_total_num_rows = self._max_total_num_rows or self._qo_indptr_last
            assert self._qo_indptr_last <= self._max_total_num_rows
            assert len(qo_indptr) == len(self._qo_indptr_buf)
            self._qo_indptr_buf.copy_(qo_indptr)
            self._paged_kv_indptr_buf.copy_(kv_indptr)
            self._paged_kv_last_page_len_buf.copy_(last_page_len)
            self._paged_kv_indices_buf[: len(indices)].copy_(indices)
        else:
            self._qo_indptr_buf, self._paged_kv_indptr_buf = qo_indptr, kv_indptr
            self._paged_kv_indices_buf, self._paged_kv_last_page_len_buf = indices, last_page_len
        self._plan_info = _key(qo_indptr, kv_indptr)

    def _module_plan(self, *arguments: Any) -> Any:
        _, ints, pinned, qo_indptr, kv_indptr, kv_lens, rows, batch_size = arguments[:8]
        page_size, is_graph = arguments[10:12]
        assert len(arguments) == (19 if self._backend == "fa2" else 16)
        assert len(qo_indptr) == len(kv_indptr) == batch_size + 1 == len(kv_lens) + 1
        assert int(qo_indptr[-1]) <= rows
        assert is_graph == self._use_cuda_graph
        if is_graph:
            assert rows == self._max_total_num_rows
        assert torch.equal(kv_indptr.diff(), -(-kv_lens // page_size))
        assert {x.dtype for x in (qo_indptr, kv_indptr, kv_lens)} == {torch.int32}
        assert ints is self._int_workspace_buffer
        assert pinned is self._pin_memory_int_workspace_buffer
        type(self).num_plans += 1
        return _key(qo_indptr, kv_indptr)

    def run(self, q_THD: Tensor, cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        assert q_THD.shape[0] == self._qo_indptr_last
        assert q_THD.stride(-1) == 1
        assert out.is_contiguous()
        starts, kv_starts = self._qo_indptr_buf.tolist(), self._paged_kv_indptr_buf.tolist()
        # The cut is of the lengths that the step has, give or take what does not change the cut.
        assert self._plan_info == _key(self._qo_indptr_buf, self._paged_kv_indptr_buf), "planned for another step"
        keys, values = cache
        page_size = keys.shape[1]
        for b in range(len(starts) - 1):
            queries = q_THD[starts[b] : starts[b + 1]]
            if not len(queries):
                continue
            pages = self._paged_kv_indices_buf[kv_starts[b] : kv_starts[b + 1]].long()
            length = (len(pages) - 1) * page_size + int(self._paged_kv_last_page_len_buf[b])
            k, v = (x[pages].flatten(0, 1)[:length].float() for x in (keys, values))
            groups = q_THD.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            scores = torch.einsum("qhd,lhd->hql", queries.float(), k) * q_THD.shape[-1] ** -0.5
            visible = torch.arange(length) <= torch.arange(len(queries))[:, None] + length - len(queries)
            weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
            out[starts[b] : starts[b + 1]] = torch.einsum("hql,lhd->qhd", weights, v).to(out.dtype)
        return out


def _key(qo_indptr: Tensor, kv_indptr: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(qo_indptr.tolist()), tuple(kv_indptr.tolist())


def fake_flashinfer(version: str = "0.6.12") -> Any:
    """The package, with a wrapper class of its own that counts from 0."""
    return SimpleNamespace(__version__=version, BatchPrefillWithPagedKVCacheWrapper=type("Wrapper", (FakeWrapper,), {}))
