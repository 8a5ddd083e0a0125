"""FlashInfer on a GPU: equal to SDPA over the same cache, eager and in captured graphs; a decode step without waits."""

import importlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.executor.kv_cache import KVCache
from runtime.model.attention import AttentionBatch, AttentionBucket
from runtime.model.flashinfer_attention import AttentionLimits, FlashInferAttention
from runtime.model.sdpa import PagedSdpaAttention
from tests.gpu.places import BFLOAT16, CUDA, SmallModel, load_small_model, relative_error

pytestmark = pytest.mark.gpu

BLOCK_SIZE = 16
LENGTHS = (700, 90, 33, 16, 1)
DECODE_8 = AttentionBucket(num_tokens=8, num_seqs=8, is_mixed=False)
MIXED_128 = AttentionBucket(num_tokens=128, num_seqs=9, is_mixed=True)
# bfloat16 keeps 8 bits: kernels that add up in another order differ by a few units in the last place.
TOLERANCE = 2e-2


@pytest.fixture(scope="module")
def small(small_model_directory: Path) -> SmallModel:
    return load_small_model(small_model_directory)


@pytest.fixture(scope="module", params=["fa2", "fa3"])
def kernel(request: pytest.FixtureRequest) -> str:
    pytest.importorskip("flashinfer")
    if request.param == "fa3" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("fa3 is for Hopper")
    return str(request.param)


def flashinfer_attention(small: SmallModel, kv: KVCache, kernel: Any) -> FlashInferAttention:
    return FlashInferAttention(
        kv,
        num_layers=small.config.text.num_hidden_layers,
        limits=AttentionLimits(
            num_heads=small.config.text.num_attention_heads,
            max_num_seqs=8,
            max_num_batched_tokens=1024,
            max_model_len=1024,
            buckets=(DECODE_8, MIXED_128),
        ),
        kernel=kernel,
        num_multiprocessors=torch.cuda.get_device_properties(CUDA).multi_processor_count,
        flashinfer=importlib.import_module("flashinfer"),
    )


class Tables:
    """Sequences on blocks in a shuffled order, taken apart into steps."""

    def __init__(self) -> None:
        counts = [-(-length // BLOCK_SIZE) for length in LENGTHS]
        order = (np.random.default_rng(0).permutation(sum(counts)) + 1).astype(np.int32)
        self.tables = np.zeros((len(LENGTHS), max(counts)), np.int32)
        start = 0
        for row, count in enumerate(counts):
            self.tables[row, :count] = order[start : start + count]
            start += count
        self.num_blocks = start + 1

    def batch(self, parts: Sequence[tuple[int, int, int]], bucket: AttentionBucket | None = None) -> AttentionBatch:
        """A step of parts (sequence, start, end), padded to `bucket` by sequences on the null block."""
        tokens = np.concatenate([np.arange(start, end) for _, start, end in parts])
        rows = np.concatenate([np.full(end - start, index) for index, start, end in parts])
        slots = self.tables[rows, tokens // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + tokens % BLOCK_SIZE
        counts = [end - start for _, start, end in parts]
        tail = bucket.num_tokens - sum(counts) if bucket else 0
        pads = ([tail] if tail else []) if bucket and bucket.is_mixed else [1] * tail
        tables = np.zeros((len(parts) + len(pads), 64), np.int32)
        tables[: len(parts), : self.tables.shape[1]] = self.tables[[index for index, _, _ in parts]]
        return AttentionBatch(
            query_start_loc_cpu=np.concatenate([[0], np.cumsum(counts + pads)]).astype(np.int32),
            seq_lens_cpu=np.array([end for _, _, end in parts] + pads, np.int32),
            block_tables_BN=torch.from_numpy(tables).to(CUDA),
            slot_mapping_T=torch.from_numpy(np.concatenate([slots, np.arange(tail) % BLOCK_SIZE])).to(CUDA),
            block_tables_cpu=tables,
            bucket=bucket,
        )


def qkv(small: SmallModel, num_tokens: int, seed: int) -> tuple[torch.Tensor, ...]:
    """As the decoder gives them: three parts of one row."""
    text = small.config.text
    heads = [text.num_attention_heads, text.num_key_value_heads, text.num_key_value_heads]
    generator = torch.Generator(CUDA).manual_seed(seed)
    rows = torch.randn(num_tokens, sum(heads), text.head_dim, generator=generator, device=CUDA, dtype=BFLOAT16)
    return rows.split(heads, dim=1)


PREFILLS = [(0, 0, 600), (1, 0, 80), (2, 0, 30), (3, 0, 15)]
STEPS: list[tuple[list[tuple[int, int, int]], AttentionBucket | None]] = [
    ([(0, 600, 601), (1, 80, 81), (3, 15, 16)], None),
    ([(0, 601, 602), (4, 0, 1)], DECODE_8),
    ([(0, 602, 690), (1, 81, 82), (2, 30, 33)], MIXED_128),
    ([(0, 690, 691)], DECODE_8),
    ([(0, 691, 692)], MIXED_128),
]


@torch.inference_mode()
def test_paged_kernels_equal_sdpa(small: SmallModel, kernel: str) -> None:
    tables = Tables()
    attention = flashinfer_attention(small, small.kv(tables.num_blocks), kernel)
    plain = PagedSdpaAttention(small.kv(tables.num_blocks), num_layers=small.config.text.num_hidden_layers)
    for seed, (parts, bucket) in enumerate([(PREFILLS, None), *STEPS]):
        batch = tables.batch(parts, bucket)
        q, k, v = qkv(small, int(batch.query_start_loc_cpu[-1]), seed)
        num_real = sum(end - start for _, start, end in parts)
        attention.plan(batch)
        plain.plan(tables.batch(parts))
        for layer in range(small.config.text.num_hidden_layers):
            output = attention.forward(layer, q, k, v)
            expected = plain.forward(layer, q[:num_real], k[:num_real], v[:num_real])
            assert torch.isfinite(output).all()
            assert relative_error(output[:num_real], expected) < TOLERANCE, (seed, layer)
        attention.anticipate()


@pytest.mark.parametrize("bucket", [DECODE_8, MIXED_128])
@torch.inference_mode()
def test_one_captured_graph_serves_other_compositions(small: SmallModel, kernel: str, bucket: AttentionBucket) -> None:
    tables = Tables()
    attention = flashinfer_attention(small, small.kv(tables.num_blocks), kernel)
    plain = PagedSdpaAttention(small.kv(tables.num_blocks), num_layers=small.config.text.num_hidden_layers)
    q, k, v = (x.clone() for x in qkv(small, bucket.num_tokens, 0))
    slots = torch.zeros(bucket.num_tokens, dtype=torch.int64, device=CUDA)

    def plan(parts: list[tuple[int, int, int]]) -> None:
        batch = tables.batch(parts, bucket)
        slots.copy_(batch.slot_mapping_T)
        attention.plan(replace(batch, slot_mapping_T=slots))

    for target in (attention, plain):
        target.plan(tables.batch(PREFILLS))
        target.forward(0, *qkv(small, sum(end - start for _, start, end in PREFILLS), 1))
    # What the warm-up and the capture store belongs to the context of the steps after them.
    plain.plan(tables.batch([(0, 600, 601)]))
    plain.forward(0, q[:1], k[:1], v[:1])
    plan([(0, 600, 601)])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        attention.forward(0, q, k, v)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = attention.forward(0, q, k, v)
    compositions = [[(0, 601, 602), (1, 80, 81), (2, 30, 31)], [(1, 81, 82)]]
    if bucket.is_mixed:
        compositions += [[(0, 602, 690), (1, 82, 83), (2, 31, 33)], [(3, 15, 16), (0, 690, 700)]]
    for parts in compositions:
        plan(parts)
        graph.replay()
        attention.anticipate()
        num_real = sum(end - start for _, start, end in parts)
        plain.plan(tables.batch(parts))
        expected = plain.forward(0, q[:num_real], k[:num_real], v[:num_real])
        assert torch.isfinite(output).all()
        assert relative_error(output[:num_real], expected) < TOLERANCE, parts


@torch.inference_mode()
def test_planning_and_attending_wait_for_nothing(small: SmallModel, kernel: str) -> None:
    tables = Tables()
    attention = flashinfer_attention(small, small.kv(tables.num_blocks), kernel)
    batches = [tables.batch(parts, bucket) for parts, bucket in [(PREFILLS, None), *STEPS]]
    inputs = [qkv(small, int(batch.query_start_loc_cpu[-1]), 0) for batch in batches]
    try:
        for _ in range(2):  # the first round loads and compiles
            for batch, rows in zip(batches, inputs, strict=True):
                attention.plan(batch)
                attention.forward(0, *rows)
                attention.anticipate()
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
    finally:
        torch.cuda.set_sync_debug_mode("default")
