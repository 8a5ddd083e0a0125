"""The paged attention against its dense twin, in every way to cut sequences into steps."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from runtime.model.attention import AttentionBatch
from runtime.model.loader import LoadedModel
from runtime.model.sdpa import QUERY_PIECE, DenseSdpaAttention, PagedSdpaAttention, aligned

NUM_LAYERS, HEADS, KV_HEADS, WIDTH = 2, 6, 2, 8


class Cache:
    """A block-major cache full of garbage: what is not written must not count."""

    def __init__(self, num_blocks: int, block_size: int, *, num_layers: int, kv_heads: int, width: int) -> None:
        self.block_size = block_size
        generator = torch.Generator().manual_seed(1)
        self.blocks = torch.randn(num_blocks, num_layers, 2, block_size, kv_heads, width, generator=generator) * 100

    def layer(self, index: int) -> Tensor:
        return self.blocks[:, index]


@dataclass
class Sequences:
    """Sequences with their block tables over a cache, taken apart into steps by the tests."""

    lengths: Sequence[int]
    block_size: int

    def __post_init__(self) -> None:
        counts = [-(-length // self.block_size) for length in self.lengths]
        self.num_blocks = sum(counts) + 1
        order = (np.random.default_rng(0).permutation(sum(counts)) + 1).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in counts]

    def batch(self, parts: Sequence[tuple[int, int, int]], *, num_padding: int = 0) -> AttentionBatch:
        """A step of parts (sequence, start, end), then padding sequences on the null block."""
        slots = [
            self.tables[index][token // self.block_size] * self.block_size + token % self.block_size
            for index, start, end in parts
            for token in range(start, end)
        ]
        counts = [end - start for _, start, end in parts] + [1] * num_padding
        tables = torch.zeros(len(counts), max(map(len, self.tables)), dtype=torch.int32)
        for row, (index, _, _) in enumerate(parts):
            tables[row, : len(self.tables[index])] = torch.tensor(self.tables[index])
        return AttentionBatch(
            query_start_loc_cpu=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
            seq_lens_cpu=np.array([end for _, _, end in parts] + [1] * num_padding, np.int32),
            block_tables_BN=tables,
            slot_mapping_T=torch.tensor(slots + [0] * num_padding),
        )


def random_qkv(lengths: Sequence[int]) -> list[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        tuple(torch.randn(length, heads, WIDTH, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS))
        for length in lengths
    ]


def dense(qkv: list[tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
    """Each sequence whole, on the plain twin."""
    outputs = []
    for q, k, v in qkv:
        attention = DenseSdpaAttention()
        attention.plan(Sequences([len(q)], 16).batch([(0, 0, len(q))]))
        outputs.append(attention.forward(0, q, k, v))
    return outputs


def paged(lengths: Sequence[int], steps: Sequence[Sequence[tuple[int, int, int]]], *, block_size: int = 4) -> None:
    """Runs the steps on a paged cache, in two layers, and compares every output with the dense twin's."""
    sequences = Sequences(lengths, block_size)
    cache = Cache(sequences.num_blocks, block_size, num_layers=NUM_LAYERS, kv_heads=KV_HEADS, width=WIDTH)
    attention = PagedSdpaAttention(cache, num_layers=NUM_LAYERS)
    qkv = random_qkv(lengths)
    expected = dense(qkv)
    for step in steps:
        attention.plan(sequences.batch(step))
        q, k, v = (torch.cat([qkv[index][part][start:end] for index, start, end in step]) for part in range(3))
        for layer, sign in ((0, 1.0), (1, -1.0)):
            output = attention.forward(layer, q, k, v * sign) * sign
            wanted = torch.cat([expected[index][start:end] for index, start, end in step])
            torch.testing.assert_close(output, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_whole_prompts_equal_dense(block_size: int) -> None:
    paged([7, 16, 1, 33], [[(0, 0, 7), (1, 0, 16), (2, 0, 1), (3, 0, 33)]], block_size=block_size)


@pytest.mark.parametrize("chunk", [2, 5, 16])
def test_chunked_prompt_equals_dense(chunk: int) -> None:
    paged([37], [[(0, start, min(start + chunk, 37))] for start in range(0, 37, chunk)])


def test_long_chunk_behind_a_context_equals_dense() -> None:
    length = 2 * QUERY_PIECE + 30
    paged([length], [[(0, 0, 20)], [(0, 20, length)]], block_size=16)


def test_contexts_that_grow_widen_the_mask() -> None:
    paged([300, 20], [[(1, 0, 8)], [(1, 8, 20)], [(0, 0, 100)], [(0, 100, 300)]], block_size=16)


def test_decoding_one_equals_dense() -> None:
    paged([12], [[(0, 0, 5)], *([(0, token, token + 1)] for token in range(5, 12))])


def test_decoding_batch_equals_dense_at_unequal_lengths() -> None:
    lengths = [9, 5, 14, 10]
    prefill = [(index, 0, length - 3) for index, length in enumerate(lengths)]
    decodes = [
        [(index, length - left, length - left + 1) for index, length in enumerate(lengths)] for left in (3, 2, 1)
    ]
    paged(lengths, [prefill, *decodes])


def test_decoding_batch_of_equal_lengths_equals_dense() -> None:
    paged([8, 8, 8], [[(index, 0, 7) for index in range(3)], [(index, 7, 8) for index in range(3)]])


def test_decoding_long_beside_short_is_parted_and_equals_dense() -> None:
    lengths = [700, 3, 300, 5, 650]
    prefill = [(index, 0, length - 1) for index, length in enumerate(lengths)]
    decode = [(index, length - 1, length) for index, length in enumerate(lengths)]
    paged(lengths, [prefill, decode], block_size=16)


def test_mixed_step_equals_dense() -> None:
    paged([20, 9, 30, 6], [[(0, 0, 12), (1, 0, 8)], [(1, 8, 9), (0, 12, 20), (2, 0, 30), (3, 0, 1)]])


@pytest.mark.parametrize("num_padding", [1, 5])
def test_padding_sequences_change_nothing_and_stay_finite(num_padding: int) -> None:
    lengths = [9, 4]
    sequences = Sequences(lengths, 4)
    cache = Cache(sequences.num_blocks, 4, num_layers=1, kv_heads=KV_HEADS, width=WIDTH)
    attention = PagedSdpaAttention(cache, num_layers=1)
    qkv = random_qkv(lengths)
    attention.plan(sequences.batch([(0, 0, 8), (1, 0, 3)]))
    attention.forward(0, *(torch.cat([qkv[0][part][:8], qkv[1][part][:3]]) for part in range(3)))

    attention.plan(sequences.batch([(0, 8, 9), (1, 3, 4)], num_padding=num_padding))
    padding = torch.zeros(num_padding, HEADS, WIDTH)
    q, k, v = (
        torch.cat([qkv[0][part][8:], qkv[1][part][3:], padding[:, : qkv[0][part].shape[1]]]) for part in range(3)
    )
    output = attention.forward(0, q, k, v)

    expected = dense(qkv)
    assert output.isfinite().all()
    torch.testing.assert_close(output[:2], torch.stack([expected[0][8], expected[1][3]]), rtol=1e-5, atol=1e-5)


def test_steps_write_only_their_own_slots() -> None:
    sequences = Sequences([6], 4)
    cache = Cache(sequences.num_blocks, 4, num_layers=NUM_LAYERS, kv_heads=KV_HEADS, width=WIDTH)
    before = cache.blocks.clone()
    attention = PagedSdpaAttention(cache, num_layers=NUM_LAYERS)
    ((q, k, v),) = random_qkv([6])

    attention.plan(sequences.batch([(0, 0, 6)]))
    attention.forward(1, q, k, v)

    first, second = sequences.tables[0]
    assert torch.equal(cache.blocks[first, 1, 0], k[:4])
    assert torch.equal(cache.blocks[first, 1, 1], v[:4])
    assert torch.equal(cache.blocks[second, 1, 0, :2], k[4:])
    before[first, 1] = cache.blocks[first, 1]
    before[second, 1, :, :2] = cache.blocks[second, 1, :, :2]
    assert torch.equal(cache.blocks, before)


def test_reserved_workspace_is_enough_for_every_step() -> None:
    sequences = Sequences([300], 16)
    cache = Cache(sequences.num_blocks, 16, num_layers=1, kv_heads=KV_HEADS, width=WIDTH)
    attention = PagedSdpaAttention(cache, num_layers=1)
    attention.reserve(300)
    reserved = attention.workspace_bytes

    for start in range(0, 300, 50):
        attention.plan(sequences.batch([(0, start, start + 50)]))

    assert attention.workspace_bytes == reserved > 0


def test_bfloat16_cache_stays_near_float32() -> None:
    sequences = Sequences([40], 16)
    ((q, k, v),) = random_qkv([40])
    (expected,) = dense([(q, k, v)])
    cache = Cache(sequences.num_blocks, 16, num_layers=1, kv_heads=KV_HEADS, width=WIDTH)
    cache.blocks = cache.blocks.bfloat16()
    attention = PagedSdpaAttention(cache, num_layers=1)

    for start, end in ((0, 20), (20, 39), (39, 40)):
        attention.plan(sequences.batch([(0, start, end)]))
        output = attention.forward(0, *(x[start:end].bfloat16() for x in (q, k, v)))
        torch.testing.assert_close(output.float(), expected[start:end], rtol=0.05, atol=0.05)


def test_cache_of_another_layout_is_refused() -> None:
    class LayerMajor(Cache):
        def layer(self, index: int) -> Tensor:
            return self.blocks.transpose(2, 3)[:, index]

    with pytest.raises(AssertionError, match="not contiguous"):
        PagedSdpaAttention(LayerMajor(3, 4, num_layers=1, kv_heads=2, width=8), num_layers=1)


def test_whole_decoder_gives_the_same_paged_in_steps_and_dense(model: LoadedModel) -> None:
    text = model.text
    assert text is not None
    lengths = [19, 7]
    sequences = Sequences(lengths, 4)
    config = text.config
    cache = Cache(
        sequences.num_blocks,
        4,
        num_layers=config.num_hidden_layers,
        kv_heads=config.num_key_value_heads,
        width=config.head_dim,
    )
    token_ids = [
        torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(length)) for length in lengths
    ]

    def positions(parts: Sequence[tuple[int, int, int]]) -> Tensor:
        return torch.cat([torch.arange(start, end) for _, start, end in parts]).expand(3, -1)

    whole = [(0, 0, 19), (1, 0, 7)]
    plain = DenseSdpaAttention()
    plain.plan(sequences.batch(whole))
    expected = text(text.embed(torch.cat(token_ids)), positions(whole), plain)

    attention = PagedSdpaAttention(cache, num_layers=config.num_hidden_layers)
    outputs: dict[tuple[int, int], Tensor] = {}
    for step in ([(0, 0, 8)], [(0, 8, 17), (1, 0, 5)], [(0, 17, 18), (1, 5, 6)], [(1, 6, 7), (0, 18, 19)]):
        attention.plan(sequences.batch(step))
        ids = torch.cat([token_ids[index][start:end] for index, start, end in step])
        rows = iter(text(text.embed(ids), positions(step), attention))
        outputs |= {(index, token): next(rows) for index, start, end in step for token in range(start, end)}

    stepped = torch.stack([outputs[index, token] for index, _, end in whole for token in range(end)])
    torch.testing.assert_close(stepped, expected, rtol=1e-5, atol=1e-5)


def test_rows_of_a_mask_begin_where_a_gpu_reads_them() -> None:
    band = torch.zeros(8, 40, dtype=torch.bfloat16, device="meta")
    mask = aligned(band[:5, 3:16])
    assert (tuple(mask.shape), mask.stride(), mask.storage_offset()) == ((5, 13), (16, 1), 0)
    mask = aligned(torch.zeros(3, 1, 1, 9, device="meta"))
    assert (tuple(mask.shape), mask.stride()[0] % 4) == ((3, 1, 1, 9), 0)
    own = torch.zeros(8, 40)[:5, 3:16]
    assert aligned(own) is own
