"""The engine's configuration: what it refuses, and what it derives from a checkpoint."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.checkpoint import ModelConfig, ProcessorConfig, TextConfig, VisionConfig
from runtime.config import (
    MAX_DEFAULT_BUDGET,
    MIN_DEFAULT_BUDGET,
    ConfigError,
    EngineConfig,
    ResolvedConfig,
    default_decoder_sizes,
    default_encoder_budgets,
    resolve_config,
)

MODEL = ModelConfig(
    model_type="qwen2_5_vl",
    text=TextConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        mrope_section=(2, 1, 1),
        vocab_size=16,
        max_position_embeddings=128000,
        tie_word_embeddings=True,
    ),
    vision=VisionConfig(
        depth=1,
        hidden_size=8,
        intermediate_size=8,
        num_heads=1,
        in_channels=3,
        out_hidden_size=8,
        patch_size=14,
        temporal_patch_size=2,
        spatial_merge_size=2,
        window_size=112,
        fullatt_block_indexes=(0,),
    ),
    image_token_id=1,
    vision_start_token_id=2,
    vision_end_token_id=3,
    eos_token_ids=(0,),
    dtype="float32",
)
PROCESSOR = ProcessorConfig(min_pixels=3136, max_pixels=200704, image_mean=(0.5, 0.5, 0.5), image_std=(0.5, 0.5, 0.5))


def resolve(**knobs: Any) -> ResolvedConfig:
    return resolve_config(EngineConfig(**knobs), MODEL, PROCESSOR)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0; it must be at least 1"),
        ({"block_size": -1}, "block_size is -1"),
        ({"encoder_graph_max_items": 0}, "encoder_graph_max_items is 0"),
        ({"max_images_per_prompt": -1}, "max_images_per_prompt is -1"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, r"max_num_batched_tokens \(32\).*max_num_seqs \(64\)"),
        ({"gpu_memory_utilization": 0.0}, r"gpu_memory_utilization is 0\.0; it must be in \(0, 1\]"),
        ({"gpu_memory_utilization": 1.1}, r"gpu_memory_utilization is 1\.1"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization is nan"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"memory_bytes": 0}, "memory_bytes is 0"),
        ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes is 0"),
        ({"memory_margin_bytes": -1}, "memory_margin_bytes is -1"),
        ({"num_threads": 0}, "num_threads is 0"),
        ({"encoder_graph_budgets": ()}, r"encoder_graph_budgets is \[\]"),
        ({"encoder_graph_budgets": (64, 32)}, r"encoder_graph_budgets is \[64, 32\].*ascending"),
        ({"decoder_graph_sizes": (1, 1)}, r"decoder_graph_sizes is \[1, 1\].*without repetition"),
        ({"decoder_graph_sizes": (0, 1)}, r"decoder_graph_sizes is \[0, 1\].*positive"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**knobs)


def test_unknown_names_are_errors_and_the_config_is_frozen() -> None:
    with pytest.raises(TypeError, match="max_num_sequences"):
        EngineConfig(max_num_sequences=4)  # type: ignore[call-arg]
    with pytest.raises(msgspec.ValidationError, match="max_num_sequences"):
        msgspec.convert({"max_num_sequences": 4}, EngineConfig)
    with pytest.raises(AttributeError):
        EngineConfig().max_num_seqs = 4  # type: ignore[misc]


def test_config_survives_the_wire() -> None:
    config = EngineConfig(encoder_graph_budgets=(64, 128), memory_bytes=1 << 30, num_threads=2)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"max_model_len": 200000}, "max_model_len is 200000; the model's positions end at 128000"),
        ({"max_pixels": 700}, "max_pixels is 700; one output token covers 784 pixels"),
        ({"min_pixels": 401408}, r"min_pixels \(401408\) is above max_pixels \(200704\)"),
        ({"encoder_cache_tokens": 255}, "encoder_cache_tokens is 255, but one image of max_pixels .* has 256 tokens"),
        ({"decoder_graph_sizes": (1, 32)}, r"decoder_graph_sizes end at 32.*max_num_seqs is 16"),
    ],
)
def test_what_contradicts_the_checkpoint_is_refused_by_name(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(**knobs)


def test_open_settings_come_from_the_checkpoint() -> None:
    resolved = resolve()
    assert resolved.max_model_len == 32768
    assert (resolved.min_pixels, resolved.max_pixels) == (3136, 200704)
    assert resolved.max_tokens_per_image == 256
    assert resolved.encoder_cache_tokens == 2048  # a whole step's tokens
    assert resolved.encoder_graph_budgets == (64, 96, 128, 192, 256)
    assert resolved.decoder_graph_sizes == (1, 2, 4, 8, 16)


def test_set_values_stand() -> None:
    resolved = resolve(
        max_model_len=4096,
        max_pixels=784 * 100,
        encoder_cache_tokens=300,
        encoder_graph_budgets=(50, 100),
        decoder_graph_sizes=(3,),
    )
    assert resolved.max_model_len == 4096
    assert resolved.max_tokens_per_image == 100
    assert resolved.encoder_cache_tokens == 300
    assert resolved.encoder_graph_budgets == (50, 100)
    assert resolved.decoder_graph_sizes == (3,)


def test_encoder_cache_holds_an_image_larger_than_a_step() -> None:
    assert resolve(max_num_batched_tokens=128).encoder_cache_tokens == 256


def test_short_models_limit_the_default_length() -> None:
    short = replace(MODEL, text=replace(MODEL.text, max_position_embeddings=512))
    assert resolve_config(EngineConfig(), short, PROCESSOR).max_model_len == 512


@given(st.integers(1, 20000), st.integers(1, 20000))
def test_default_ladder_ascends_to_the_largest_picture_and_wastes_a_third_at_most(a: int, b: int) -> None:
    smallest, largest = min(a, b), max(a, b)
    ladder = default_encoder_budgets(smallest, largest)
    assert list(ladder) == sorted(set(ladder))
    assert ladder[-1] == min(max(largest, MIN_DEFAULT_BUDGET), MAX_DEFAULT_BUDGET)
    for budget, below in zip(ladder[1:], ladder, strict=False):
        assert (budget - below) / budget <= 1 / 2
        if below > MIN_DEFAULT_BUDGET:
            assert (budget - below - 1) / budget < 1 / 3 + 1e-9


@given(st.integers(1, 5000))
def test_default_decoder_sizes_are_powers_of_two_up_to_the_largest_batch(max_num_seqs: int) -> None:
    sizes = default_decoder_sizes(max_num_seqs)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == max_num_seqs
    assert all(size & (size - 1) == 0 for size in sizes[:-1])
