"""The KV cache's layout, its views, and what it costs before it is used."""

import pytest
import torch

from runtime.checkpoint import TextConfig
from runtime.executor.kv_cache import AnonymousMapping, KVCache, KVLayout, block_bytes, kv_layout

LAYOUT = KVLayout(num_layers=3, block_size=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)


def text_config() -> TextConfig:
    return TextConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        mrope_section=(2, 3, 3),
        vocab_size=512,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )


def test_block_bytes_count_every_layer_keys_and_values() -> None:
    assert block_bytes(text_config(), torch.float32, 16) == 3 * 2 * 16 * 2 * 16 * 4
    assert block_bytes(text_config(), torch.bfloat16, 16) == 3 * 2 * 16 * 2 * 16 * 2
    assert kv_layout(text_config(), torch.float32, 16).block_shape == (3, 2, 16, 2, 16)


def test_layer_is_a_view_of_block_major_memory() -> None:
    backing = AnonymousMapping(5 * LAYOUT.block_bytes)
    cache = KVCache(LAYOUT, 5, backing)
    assert cache.layer(1).shape == (5, 2, 4, 2, 8)
    cache.layer(1)[3, 0, 2, 1, 7] = 42.0
    block_elements = LAYOUT.block_elements
    position = 3 * block_elements + 1 * (block_elements // 3) + 0 + 2 * (2 * 8) + 1 * 8 + 7
    assert backing.tensor().view(torch.float32)[position] == 42.0


def test_layers_do_not_overlap() -> None:
    cache = KVCache(LAYOUT, 4)
    for index in range(3):
        cache.layer(index).fill_(index + 1.0)
    for index in range(3):
        assert (cache.layer(index) == index + 1.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fresh_cache_is_zero_and_serves_every_dtype(dtype: torch.dtype) -> None:
    cache = KVCache(KVLayout(num_layers=2, block_size=4, num_kv_heads=1, head_dim=8, dtype=dtype), 3)
    assert cache.layer(1).dtype == dtype
    assert not cache.layer(1).any()
    assert cache.num_bytes == 3 * 2 * 2 * 4 * 8 * dtype.itemsize


def test_untouched_pages_cost_nothing_and_touched_ones_count() -> None:
    layout = KVLayout(num_layers=1, block_size=16, num_kv_heads=2, head_dim=32, dtype=torch.float32)
    assert layout.block_bytes == 8192
    cache = KVCache(layout, (1 << 30) // layout.block_bytes)
    assert cache.resident_bytes() == 0
    cache.layer(0)[7] = 1.0
    assert cache.resident_bytes() == 8192
    cache.layer(0)[100_000, 1, 15] = 1.0
    assert cache.resident_bytes() == 8192 + 4096


def test_shrinking_gives_memory_back_and_keeps_the_rest() -> None:
    layout = KVLayout(num_layers=1, block_size=16, num_kv_heads=2, head_dim=32, dtype=torch.float32)
    cache = KVCache(layout, 8)
    cache.layer(0)[:8] = 5.0
    assert cache.resident_bytes() == 8 * 8192
    cache.resize(3)
    assert cache.num_blocks == 3
    assert cache.num_bytes == cache.resident_bytes() == 3 * 8192
    assert (cache.layer(0)[:3] == 5.0).all()
    cache.resize(8)
    assert not cache.layer(0)[3:].any()


def test_views_keep_their_addresses_when_the_cache_grows_into_its_addresses() -> None:
    cache = KVCache(LAYOUT, 2, AnonymousMapping(64 * LAYOUT.block_bytes))
    address = cache.layer(2).data_ptr()
    assert (cache.num_blocks, cache.max_blocks) == (2, 64)
    cache.resize(64)
    cache.layer(2)[63] = 1.0
    assert cache.layer(2).data_ptr() == address


def test_too_few_and_too_many_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="1 blocks; it needs 2"):
        KVCache(LAYOUT, 1)
    with pytest.raises(ValueError, match="5 blocks; its addresses hold 1 to 4"):
        KVCache(LAYOUT, 4).resize(5)
