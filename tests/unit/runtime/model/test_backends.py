"""What is chosen for which device, and that the reason is told."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.checkpoint import TextConfig, VisionConfig, read_model_config
from runtime.config import ConfigError, EngineConfig, OneRowBackend
from runtime.model import packed
from runtime.model.backends import (
    DeviceFacts,
    OneRowChoice,
    build_encoder_attention,
    choose_attention,
    choose_encoder_attention,
    choose_kernels,
    choose_one_row,
    should_compile,
    should_fuse,
    should_pack,
)
from runtime.model.sdpa import SdpaEncoderAttention

HOPPER = DeviceFacts(device="cuda", capability=(9, 0), num_multiprocessors=132, has_flashinfer=True, has_triton=True)
CPU = DeviceFacts.of(torch.device("cpu"))
ONE_THREAD = replace(CPU, num_threads=1)


@pytest.fixture(scope="module")
def published(tiny_checkpoint: Path) -> tuple[TextConfig, VisionConfig]:
    """The tiny model with the published models' head widths."""
    config = read_model_config(tiny_checkpoint)
    return replace(config.text, head_dim=128), replace(config.vision, hidden_size=1280, num_heads=16)


def test_hopper_runs_flashinfer_and_varlen(published: tuple[TextConfig, VisionConfig]) -> None:
    text, vision = published
    attention = choose_attention("auto", facts=HOPPER, dtype=torch.bfloat16, text=text)
    assert (attention.backend, attention.can_capture) == ("flashinfer-fa2", True)
    encoder = choose_encoder_attention("auto", facts=HOPPER, dtype=torch.bfloat16, vision=vision)
    assert (encoder.backend, encoder.can_capture) == ("varlen", True)
    assert "80" in encoder.reason
    assert choose_attention("flashinfer-fa3", facts=HOPPER, dtype=torch.bfloat16, text=text).backend == "flashinfer-fa3"


def test_cpu_runs_sdpa_which_its_emulated_graphs_may_hold(published: tuple[TextConfig, VisionConfig]) -> None:
    text, vision = published
    for choice in (
        choose_attention("auto", facts=CPU, dtype=torch.float32, text=text),
        choose_encoder_attention("auto", facts=CPU, dtype=torch.float32, vision=vision),
    ):
        assert (choice.backend, choice.can_capture, choice.reason) == ("sdpa", True, "the device is a CPU")


@pytest.mark.parametrize(
    ("facts", "dtype", "head_dim", "why"),
    [
        (replace(HOPPER, has_flashinfer=False), torch.bfloat16, 128, "not installed"),
        (HOPPER, torch.float32, 128, "not float32"),
        (replace(HOPPER, capability=(7, 5)), torch.float16, 128, "7.5"),
        (HOPPER, torch.bfloat16, 80, "are 80"),
        (CPU, torch.bfloat16, 128, "CPU"),
    ],
)
def test_what_flashinfer_cannot_serve_falls_back_aloud_and_fails_when_asked_for(
    facts: DeviceFacts, dtype: torch.dtype, head_dim: int, why: str, published: tuple[TextConfig, VisionConfig]
) -> None:
    arguments: dict[str, Any] = {"facts": facts, "dtype": dtype, "text": replace(published[0], head_dim=head_dim)}
    choice = choose_attention("auto", **arguments)
    assert choice.backend == "sdpa"
    assert why in choice.reason
    assert choice.can_capture == (facts.device == "cpu")
    with pytest.raises(ConfigError, match="attention_backend is 'flashinfer-fa2'"):
        choose_attention("flashinfer-fa2", **arguments)


def test_fa3_is_for_hopper_alone(published: tuple[TextConfig, VisionConfig]) -> None:
    with pytest.raises(ConfigError, match=r"9\.0"):
        choose_attention(
            "flashinfer-fa3", facts=replace(HOPPER, capability=(10, 0)), dtype=torch.bfloat16, text=published[0]
        )


def test_encoder_in_float32_falls_back_and_varlen_is_refused(published: tuple[TextConfig, VisionConfig]) -> None:
    choice = choose_encoder_attention("auto", facts=HOPPER, dtype=torch.float32, vision=published[1])
    assert (choice.backend, choice.can_capture) == ("sdpa", False)
    assert isinstance(build_encoder_attention(choice), SdpaEncoderAttention)
    with pytest.raises(ConfigError, match="encoder_attention_backend is 'varlen'"):
        choose_encoder_attention("varlen", facts=HOPPER, dtype=torch.float32, vision=published[1])


def test_plain_twins_are_one_flag_away(published: tuple[TextConfig, VisionConfig]) -> None:
    text, vision = published
    assert choose_attention("sdpa", facts=HOPPER, dtype=torch.bfloat16, text=text).backend == "sdpa"
    assert choose_encoder_attention("sdpa", facts=HOPPER, dtype=torch.bfloat16, vision=vision).backend == "sdpa"
    assert not should_compile("off", facts=HOPPER)
    assert should_compile("auto", facts=HOPPER)
    assert not should_compile("auto", facts=CPU)
    assert should_compile("on", facts=CPU)


def test_one_row_goes_through_triton_where_its_tiles_were_measured() -> None:
    assert one_row("auto", HOPPER, torch.bfloat16).backend == "triton"
    ampere = replace(HOPPER, capability=(8, 0))
    choice = one_row("auto", ampere, torch.bfloat16)
    assert (choice.backend, "measured" in choice.reason) == ("torch", True)
    assert one_row("triton", ampere, torch.bfloat16).backend == "triton"


def test_one_row_stays_with_torch_where_no_graph_replays_it() -> None:
    choice = choose_one_row("auto", facts=HOPPER, dtype=torch.bfloat16, has_graphs=False)
    assert (choice.backend, "without decoder graphs" in choice.reason) == ("torch", True)


@pytest.mark.parametrize(
    ("knobs", "backend"),
    [
        ({}, "triton"),
        ({"decoder_graphs": "none"}, "torch"),
        ({"enforce_eager": True}, "torch"),
        ({"attention_backend": "sdpa"}, "torch"),
    ],
)
def test_a_start_without_decoder_graphs_has_no_kernels_for_them_whatever_the_reason(
    knobs: dict[str, Any],
    backend: str,
    tiny_checkpoint: Path,
    published: tuple[TextConfig, VisionConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DeviceFacts, "of", lambda device: HOPPER)
    text, vision = published
    model = replace(read_model_config(tiny_checkpoint), text=text, vision=vision)
    config = EngineConfig(model="any", **knobs)
    kernels = choose_kernels(config, model, device=torch.device("cuda", 0), dtype=torch.bfloat16)
    assert kernels.one_row.backend == backend


def test_one_row_goes_through_numpy_on_one_thread_of_a_cpu() -> None:
    assert one_row("auto", ONE_THREAD, torch.float32).backend == "numpy"
    two_threads = replace(ONE_THREAD, num_threads=2)
    choice = one_row("auto", two_threads, torch.float32)
    assert (choice.backend, "threads" in choice.reason) == ("torch", True)
    assert one_row("numpy", two_threads, torch.float32).backend == "numpy"


@pytest.mark.parametrize(
    ("asked", "facts", "dtype", "why"),
    [
        ("triton", replace(HOPPER, has_triton=False), torch.bfloat16, "not installed"),
        ("triton", HOPPER, torch.float32, "not float32"),
        ("triton", replace(HOPPER, capability=(7, 5)), torch.float16, "7.5"),
        ("triton", CPU, torch.bfloat16, "CPU"),
        ("numpy", ONE_THREAD, torch.bfloat16, "not bfloat16"),
        ("numpy", HOPPER, torch.float32, "GPU"),
    ],
)
def test_what_cannot_run_one_row_is_refused(
    asked: OneRowBackend, facts: DeviceFacts, dtype: torch.dtype, why: str
) -> None:
    with pytest.raises(ConfigError, match=rf"one_row_backend is '{asked}': .*{why}"):
        one_row(asked, facts, dtype)


@pytest.mark.parametrize(
    ("facts", "dtype", "why"),
    [
        (replace(HOPPER, has_triton=False), torch.bfloat16, "not installed"),
        (HOPPER, torch.float32, "not float32"),
        (replace(HOPPER, capability=(7, 5)), torch.float16, "7.5"),
        (ONE_THREAD, torch.bfloat16, "not bfloat16"),
    ],
)
def test_one_row_stays_with_torch_and_the_reason_is_told(facts: DeviceFacts, dtype: torch.dtype, why: str) -> None:
    choice = one_row("auto", facts, dtype)
    assert choice.backend == "torch"
    assert why in choice.reason


@pytest.mark.parametrize(("facts", "dtype"), [(HOPPER, torch.bfloat16), (ONE_THREAD, torch.float32)])
def test_one_row_is_the_layers_own_where_that_was_asked_for(facts: DeviceFacts, dtype: torch.dtype) -> None:
    assert one_row("torch", facts, dtype).backend == "torch"


def one_row(wanted: OneRowBackend, facts: DeviceFacts, dtype: torch.dtype) -> OneRowChoice:
    return choose_one_row(wanted, facts=facts, dtype=dtype, has_graphs=True)


def test_products_are_packed_on_a_cpu_in_float32_unless_plain_ones_are_asked_for() -> None:
    assert should_pack("auto", facts=CPU, dtype=torch.float32) == packed.is_available()
    assert not should_pack("off", facts=CPU, dtype=torch.float32)
    assert not should_pack("on", facts=CPU, dtype=torch.float32)
    assert not should_pack("auto", facts=CPU, dtype=torch.bfloat16)
    assert not should_pack("auto", facts=HOPPER, dtype=torch.float32)


def test_decoder_is_fused_on_a_gpu_unless_compiled_or_plain_layers_are_asked_for() -> None:
    assert should_fuse("auto", facts=HOPPER, dtype=torch.bfloat16)
    assert should_fuse("auto", facts=replace(HOPPER, capability=(8, 0)), dtype=torch.float16)
    assert not should_fuse("off", facts=HOPPER, dtype=torch.bfloat16)
    assert not should_fuse("on", facts=HOPPER, dtype=torch.bfloat16)
    assert not should_fuse("auto", facts=replace(HOPPER, has_triton=False), dtype=torch.bfloat16)
    assert not should_fuse("auto", facts=HOPPER, dtype=torch.float32)
    assert not should_fuse("auto", facts=CPU, dtype=torch.float32)
