"""Whole engines on a GPU: the ledger of both backings, capture failures at any bucket, memory that stays steady."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.config import GIB, MIB, ConfigError, EngineConfig
from runtime.executor.cuda_graphs import TorchCapture
from runtime.executor.encoder_runner import EncoderProgram
from runtime.offline import OfflineEngine, OfflineRequest
from runtime.request import SamplingParams

pytestmark = pytest.mark.gpu

SETTINGS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "load_format": "random",
    "max_model_len": 1024,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": GIB // 2,
    "encoder_graph_budgets": (64, 256),
    "compile": "off",
}


def start(directory: Path, **knobs: Any) -> OfflineEngine:
    return OfflineEngine(EngineConfig(model=str(directory), **{**SETTINGS, **knobs}))


def requests(engine: OfflineEngine, count: int, *, seed: int = 0) -> list[OfflineRequest]:
    """Text, and one to three pictures between the smallest and the largest, some beyond every budget."""
    model = engine.model_config
    found = []
    for index in range(count):
        generator = np.random.default_rng([seed, index])
        sampling = SamplingParams(
            max_tokens=int(generator.integers(1, 24)),
            ignore_eos=True,
            temperature=float(index % 3 == 0),
            top_p=0.9 if index % 6 == 0 else 1.0,
            num_logprobs=3 if index % 5 == 0 else None,
        )
        token_ids = generator.integers(0, 400, int(generator.integers(1, 60))).tolist()
        images = []
        for _ in range(index % 4):
            height, width = generator.integers(2, 16, 2) * 28
            images.append(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))
            token_ids += [model.vision_start_token_id, model.image_token_id, model.vision_end_token_id]
        found.append(OfflineRequest(prompt_token_ids=[*token_ids, 7], images=images, sampling=sampling))
    return found


@pytest.mark.parametrize("backing", ["vmm", "torch"])
@pytest.mark.parametrize("mode", ["none", "decode", "full"])
def test_the_ledger_sums_up_and_covers_what_the_device_says(
    small_model_directory: Path, backing: str, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        engine = start(small_model_directory, kv_backing=backing, decoder_graphs=mode)
    memory = engine.info.memory
    assert sum(memory.components.values()) == memory.requested_bytes
    assert memory.unplanned_bytes <= 0
    for family in engine.info.graphs:
        assert {bucket.state for bucket in family.buckets} <= {"captured"}
        assert family.num_captures == (1 if backing == "vmm" else 2)
        assert family.probe_segments_left_bytes == 0
        if backing == "vmm":
            assert family.segment_bytes + family.driver_bytes == family.captured_bytes == family.reserved_bytes
    engine.generate(requests(engine, 30))
    assert engine.stats().unplanned_bytes <= 0
    assert "took other than what was measured" not in caplog.text


def test_memory_is_steady_under_mixed_requests(small_model_directory: Path) -> None:
    engine = start(small_model_directory, decoder_graphs="full")
    reserved = torch.cuda.memory_reserved()
    free, _ = torch.cuda.mem_get_info()
    for seed in range(4):
        answers = engine.generate(requests(engine, 60, seed=seed))
        assert not [answer.error for answer in answers if answer.error and "max_model_len" not in answer.error]
        assert torch.cuda.memory_reserved() <= reserved
    assert free - torch.cuda.mem_get_info()[0] <= 64 * MIB
    assert torch.cuda.memory_stats()["num_ooms"] == 0


@pytest.mark.parametrize("kind", ["python", "oom", "invalidated"])
@pytest.mark.parametrize("index", [0, 1, 3, 4])
def test_a_capture_that_fails_costs_its_bucket_alone(
    small_model_directory: Path, monkeypatch: pytest.MonkeyPatch, kind: str, index: int
) -> None:
    """`index` 0 is the encoder's bootstrap, 1 and 2 are its buckets, 3 is the decoder's bootstrap, 4 its largest."""
    capture = TorchCapture.capture
    calls = iter(range(1000))

    def failing(self: TorchCapture, forward: Any, pool: Any) -> Any:
        if next(calls) != index:
            return capture(self, forward, pool)

        def fails() -> torch.Tensor:
            output: torch.Tensor = forward()
            if kind == "python":
                raise TypeError("planted")
            if kind == "oom":
                torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
            output.float().sum().item()
            return output

        return capture(self, fails, pool)

    monkeypatch.setattr(TorchCapture, "capture", failing)
    engine = start(small_model_directory, decoder_graphs="decode")
    states = [bucket.state for family in engine.info.graphs for bucket in family.buckets]
    assert states.count("capture_failed") == 1
    assert engine.info.memory.unplanned_bytes <= 0
    answers = engine.generate(requests(engine, 12))
    assert not [answer.error for answer in answers if answer.error]
    assert engine.stats().unplanned_bytes <= 0


def test_strict_graphs_stop_the_start(small_model_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: TorchCapture, forward: Any, pool: Any) -> Any:
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(TorchCapture, "capture", failing)
    with pytest.raises(ConfigError, match=r"encoder graph bucket 256 .*encoder_graph_budgets"):
        start(small_model_directory, strict_graphs=True)


def test_a_nan_in_the_padding_is_caught(small_model_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = EncoderProgram.forward

    def planted(self: EncoderProgram, bucket: Any, inputs: Any) -> torch.Tensor:
        rows = forward(self, bucket, inputs).clone()
        if bucket.name == "256":
            rows[-1:].fill_(float("nan"))
        return rows

    monkeypatch.setattr(EncoderProgram, "forward", planted)
    engine = start(small_model_directory)
    states = {bucket.name: bucket.state for bucket in engine.info.graphs[0].buckets}
    assert states == {"64": "captured", "256": "self_test_failed"}
