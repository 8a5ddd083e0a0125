"""FlashInfer's path against the plain twin, over a stand-in that computes from the wrapper's buffers alone."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from runtime.model.attention import AttentionBatch, AttentionBucket
from runtime.model.flashinfer_attention import AttentionLimits, FlashInferAttention, _as_one
from runtime.model.page_plan import MIB, IndexLayout, float_workspace_bytes, page_plan, query_tile, write_indices
from runtime.model.sdpa import PagedSdpaAttention
from tests.unit.runtime.model.fake_flashinfer import fake_flashinfer
from tests.unit.runtime.model.test_sdpa import HEADS, KV_HEADS, NUM_LAYERS, WIDTH, Cache, Sequences

BLOCK_SIZE = 4
LENGTHS = (7, 16, 3, 33, 12)
DECODE_4 = AttentionBucket(num_tokens=4, num_seqs=4, is_mixed=False)
MIXED_32 = AttentionBucket(num_tokens=32, num_seqs=6, is_mixed=True)


class Twins:
    """FlashInfer's path and the plain twin over caches of their own, fed the same steps."""

    def __init__(self, *, kernel: str = "fa2", version: str = "0.6.12") -> None:
        self.sequences = Sequences(LENGTHS, BLOCK_SIZE)
        shape = {"num_layers": NUM_LAYERS, "kv_heads": KV_HEADS, "width": WIDTH}
        self.caches = [Cache(self.sequences.num_blocks, BLOCK_SIZE, **shape) for _ in range(2)]
        self.flashinfer = fake_flashinfer(version)
        self.wrapper = self.flashinfer.BatchPrefillWithPagedKVCacheWrapper
        self.attention = FlashInferAttention(
            self.caches[0],
            num_layers=NUM_LAYERS,
            limits=AttentionLimits(
                num_heads=HEADS,
                max_num_seqs=5,
                max_num_batched_tokens=32,
                max_model_len=40,
                buckets=(DECODE_4, MIXED_32),
            ),
            kernel=kernel,
            num_multiprocessors=132,
            flashinfer=self.flashinfer,
        )
        self.plain = PagedSdpaAttention(self.caches[1], num_layers=NUM_LAYERS)
        self.generator = torch.Generator().manual_seed(3)

    def batch(self, parts: Sequence[tuple[int, int, int]], bucket: AttentionBucket | None) -> AttentionBatch:
        """The step, padded to the bucket as `fill_batch` pads it."""
        batch = self.sequences.batch(parts)
        tables = batch.block_tables_BN
        if bucket is not None:
            tail = bucket.num_tokens - int(batch.query_start_loc_cpu[-1])
            lengths = ([tail] if tail else []) if bucket.is_mixed else [1] * tail
            starts = np.cumsum([batch.query_start_loc_cpu[-1], *lengths])
            tables = torch.zeros(len(parts) + len(lengths), 16, dtype=torch.int32)
            tables[: len(parts), : batch.block_tables_BN.shape[1]] = batch.block_tables_BN
            batch = replace(
                batch,
                query_start_loc_cpu=np.concatenate([batch.query_start_loc_cpu, starts[1:]]).astype(np.int32),
                seq_lens_cpu=np.concatenate([batch.seq_lens_cpu, lengths]).astype(np.int32),
                slot_mapping_T=torch.cat([batch.slot_mapping_T, torch.arange(tail) % BLOCK_SIZE]),
                block_tables_BN=tables,
                bucket=bucket,
            )
        return replace(batch, block_tables_cpu=tables.numpy())

    def step(
        self, parts: Sequence[tuple[int, int, int]], bucket: AttentionBucket | None = None, *, is_one: bool = True
    ) -> None:
        """Runs one step on both; outputs of real tokens must agree, and padding must be finite. `is_one`: values lie
        behind keys in memory."""
        batch = self.batch(parts, bucket)
        num_real = sum(end - start for _, start, end in parts)
        num_tokens = int(batch.query_start_loc_cpu[-1])
        # As the decoder hands them over: parts of one row, so not contiguous.
        qkv = torch.randn(num_tokens, HEADS + 2 * KV_HEADS, WIDTH, generator=self.generator)
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        self.attention.plan(batch)
        self.plain.plan(self.sequences.batch(parts))
        for layer, sign in ((0, 1.0), (1, -1.0)):
            values = torch.cat((k, v * sign), dim=1).split(KV_HEADS, dim=1) if is_one else (k, v * sign)
            assert (_as_one(*values) is not None) == is_one
            output = self.attention.forward(layer, q, *values)
            expected = self.plain.forward(layer, q[:num_real], k[:num_real], v[:num_real] * sign)
            torch.testing.assert_close(output[:num_real], expected, rtol=1e-4, atol=1e-4)
            assert torch.isfinite(output).all()
        self.attention.anticipate()


def prefills() -> list[tuple[int, int, int]]:
    return [(0, 0, 5), (1, 0, 9), (2, 0, 2), (3, 0, 4)]


@pytest.mark.parametrize("kernel", ["fa2", "fa3"])
def test_steps_of_all_kinds_equal_sdpa(kernel: str) -> None:
    twins = Twins(kernel=kernel)
    twins.step(prefills())
    twins.step([(0, 5, 6), (1, 9, 10), (3, 4, 20)])  # decodes beside a chunk behind a context
    twins.step([(1, 10, 11), (0, 6, 7)], is_one=False)
    twins.step([(4, 0, 12), (3, 20, 33), (1, 11, 12)], MIXED_32)
    twins.step([(1, 12, 13), (2, 2, 3)], DECODE_4)
    twins.step([(1, 13, 14)], DECODE_4)


def test_mixed_bucket_serves_a_full_one_and_an_almost_empty_one() -> None:
    twins = Twins()
    twins.step([(3, 0, 32)], MIXED_32)
    twins.step([(0, 0, 1)], MIXED_32)
    twins.step([(3, 32, 33), (0, 1, 2)], MIXED_32)


def test_other_releases_are_planned_through_their_public_method() -> None:
    twins = Twins(version="0.7.0")
    before = twins.wrapper.num_public_plans
    twins.step(prefills())
    twins.step([(1, 9, 10)], DECODE_4)
    assert twins.wrapper.num_plans == 0
    assert twins.wrapper.num_public_plans > before


def test_decoding_is_cut_anew_only_when_a_sequence_begins_a_page_and_then_ahead_of_its_step() -> None:
    twins = Twins()
    twins.step([(3, 0, 12)])
    plans = []
    for length in range(12, 20):
        before = twins.wrapper.num_plans
        batch = twins.batch([(3, length, length + 1)], DECODE_4)
        twins.attention.plan(batch)
        in_plan = twins.wrapper.num_plans - before
        twins.attention.anticipate()
        plans.append((in_plan, twins.wrapper.num_plans - before - in_plan))
    # The first decode step must plan; the token at 16 begins a page, which the step before it foresaw.
    assert plans == [(1, 0), (0, 0), (0, 0), (0, 1), (0, 0), (0, 0), (0, 0), (0, 1)]


def test_a_wrong_guess_is_planned_again() -> None:
    twins = Twins()
    twins.step(prefills())
    twins.step([(0, 5, 6), (3, 4, 5)], DECODE_4)
    twins.step([(3, 5, 6), (1, 9, 10), (2, 2, 3)], DECODE_4)
    twins.step([(3, 6, 7)])
    twins.step([(3, 7, 8)])
    twins.step([(3, 8, 9), (0, 6, 7)])


def test_workspaces_are_counted_once_for_all_wrappers() -> None:
    twins = Twins()
    attention = twins.attention
    tensors = {
        id(wrapper._inner._int_workspace_buffer)
        for wrapper in [*attention._captured.values(), *attention._eager.values()]
    }
    assert len(tensors) == 1
    assert 8 * MIB < attention.workspace_bytes < 200 * MIB
    attention.reserve(40)


def test_a_forward_leaves_no_memory_of_its_own_behind() -> None:
    # What it leaves while a graph is captured would be a live block of the graph's pool, for good if the capture fails.
    twins = Twins()
    before = {name: id(value) for name, value in vars(twins.attention).items() if isinstance(value, Tensor)}
    batch = twins.batch([(0, 0, 5), (1, 0, 9)], None)
    twins.attention.plan(batch)
    qkv = torch.randn(14, HEADS + 2 * KV_HEADS, WIDTH)
    planned = {name: id(value) for name, value in vars(twins.attention).items() if isinstance(value, Tensor)}
    twins.attention.forward(0, *qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1))
    after = {name: id(value) for name, value in vars(twins.attention).items() if isinstance(value, Tensor)}
    assert after == planned
    assert before["_rows_2T"] == after["_rows_2T"]


def test_indices_lie_end_to_end_and_padding_is_empty() -> None:
    plan = page_plan(np.array([0, 3, 4], np.int32), np.array([5, 9], np.int32), block_size=4, num_seqs=4)
    assert plan.qo_indptr.tolist() == [0, 3, 4, 4, 4]
    assert plan.kv_indptr.tolist() == [0, 2, 5, 5, 5]
    layout = IndexLayout(max_seqs=4, max_pages=8)
    target = np.full(layout.size, -1, np.int32)
    batch: Any = AttentionBatch(
        query_start_loc_cpu=np.array([0, 3, 4], np.int32),
        seq_lens_cpu=np.array([5, 9], np.int32),
        block_tables_BN=Tensor(),
        slot_mapping_T=Tensor(),
        block_tables_cpu=np.array([[7, 3, 99], [5, 1, 2]], np.int32),
    )
    end = write_indices(target, layout, plan, batch, block_size=4)
    assert target[layout.indices_start : end].tolist() == [7, 3, 5, 1, 2]
    assert target[layout.last_page_start : layout.last_page_start + 2].tolist() == [1, 1]


def test_workspace_follows_the_largest_bucket() -> None:
    shape = {"num_heads": 16, "num_kv_heads": 2, "head_dim": 128, "num_multiprocessors": 132}
    eager = float_workspace_bytes([], kernel="fa2", **shape)
    assert eager >= 132 * 16 * 128 * 129 * 4
    decode = AttentionBucket(num_tokens=128, num_seqs=128, is_mixed=False)
    assert float_workspace_bytes([decode], kernel="fa2", **shape) == eager
    mixed = AttentionBucket(num_tokens=2048, num_seqs=17, is_mixed=True)
    tiles = 2048 * 8 // 128 + 16
    assert float_workspace_bytes([mixed], kernel="fa2", **shape) >= tiles * 16 * 128 * 129 * 4
    assert float_workspace_bytes([mixed], kernel="fa3", **shape) == eager
    assert [query_tile(n, 128) for n in (8, 16, 17, 64, 65)] == [16, 16, 64, 64, 128]
