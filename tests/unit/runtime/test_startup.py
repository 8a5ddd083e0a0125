"""The start of a real engine on the tiny checkpoint: phases, the plan's rows, graphs, and an answer."""

import hashlib
import json
import logging
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from runtime.checkpoint import CheckpointError, read_model_config
from runtime.config import MIB, ConfigError, EngineConfig
from runtime.engine import Engine
from runtime.executor.device import CpuDevice, trim_heap
from runtime.executor.encoder_runner import EncoderProgram
from runtime.executor.memory import MemoryPlanError
from runtime.readings import BLOCK_NUMBER_BYTES
from runtime.request import ImageInput, PlaceholderRange, Request, RequestOutput, SamplingParams
from runtime.scheduler.block_manager import BlockManager
from runtime.startup import Phases, build_engine
from runtime.stats import MEMORY_COMPONENTS, MISS_REASONS
from tests.process_memory import memory_beside_this_process

SIDE = 28
PHASES = [
    "baseline",
    "load_weights",
    "reserve_kv",
    "profile",
    "capture_encoder",
    "capture_decoder",
    "prove_transient",
    "plan",
    "back_kv",
    "keep_transient",
    "final_reading",
]
SMALL: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 4,
    "max_pixels": SIDE * SIDE * 64,
    "encoder_graph_budgets": (32, 64),
}


@pytest.fixture(autouse=True, scope="module")
def same_threads() -> Iterator[None]:
    """A start sets torch's threads for the process; other tests keep theirs."""
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def build(directory: Path, **knobs: Any) -> Engine:
    knobs = {"memory_bytes": memory_beside_this_process(), **SMALL, **knobs}
    return build_engine(EngineConfig(model=str(directory), num_threads=1, **knobs))


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Engine:
    return build(tiny_checkpoint)


def request_with_image(directory: Path, request_id: str, height: int, width: int) -> tuple[Request, NDArray[np.uint8]]:
    """A picture of noise of `height` x `width` tokens between a few tokens of text."""
    config = read_model_config(directory)
    pixels = np.random.default_rng(height).integers(0, 256, (height * SIDE, width * SIDE, 3), dtype=np.uint8)
    num_tokens = height * width
    before, after = [5, 6, 7, config.vision_start_token_id], [config.vision_end_token_id, 8, 9]
    image = ImageInput(
        image_hash=hashlib.sha256(pixels.tobytes()).digest(),
        height=height * SIDE,
        width=width * SIDE,
        placeholder=PlaceholderRange(len(before), num_tokens),
    )
    request = Request(
        request_id=request_id,
        prompt_token_ids=[*before, *[config.image_token_id] * num_tokens, *after],
        images=(image,),
        sampling=SamplingParams(max_tokens=12, ignore_eos=True),
        arrival_time=0.0,
    )
    return request, pixels


def answer(engine: Engine, *requests: tuple[Request, NDArray[np.uint8]]) -> dict[str, list[int]]:
    for request, pixels in requests:
        engine.add(request, [pixels])
    tokens: dict[str, list[int]] = {request.request_id: [] for request, _ in requests}
    last: dict[str, RequestOutput] = {}
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.new_token_ids
            last[output.request_id] = output
    assert {output.finish_reason for output in last.values()} == {"length"}
    return tokens


def test_every_phase_is_timed_in_order(engine: Engine) -> None:
    assert list(engine.info.startup_phase_seconds) == PHASES
    assert all(seconds >= 0 for seconds in engine.info.startup_phase_seconds.values())


def test_phases_are_logged_as_records_that_json_can_hold(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="runtime.startup")
    phases = Phases()
    with phases("load_weights"):
        pass
    (record,) = caplog.records
    assert record.message == "startup phase"
    assert (
        json.loads(json.dumps({key: record.__dict__[key] for key in ("phase", "seconds")}))["phase"] == "load_weights"
    )


def test_rows_sum_to_the_request_and_each_was_measured(engine: Engine) -> None:
    memory = engine.info.memory
    rows = memory.components
    assert tuple(rows) == MEMORY_COMPONENTS
    assert sum(rows.values()) == memory.requested_bytes
    assert rows["kv"] == (memory.num_blocks + 1) * memory.block_bytes
    assert rows["margin"] == 64 * MIB
    assert 0 <= rows["rounding"] < memory.block_bytes
    for row in ("context", "weights", "static_buffers", "embedding_store", "encoder_graphs", "decoder_graphs"):
        assert rows[row] > 0, row
    assert rows["weights"] < rows["context"]  # an interpreter with torch beside half a million parameters


def test_room_for_requests_is_planned_and_told_to_those_who_keep_to_it(tiny_checkpoint: Path) -> None:
    info = build(tiny_checkpoint, request_memory_bytes=48 * MIB).info
    assert info.max_request_bytes == info.memory.components["requests"] == 48 * MIB
    assert sum(info.memory.components.values()) == info.memory.requested_bytes
    with pytest.raises(ConfigError, match="request_memory_bytes is 1000, but one request"):
        build(tiny_checkpoint, request_memory_bytes=1000)


def test_what_the_allocator_merely_keeps_is_given_back_before_it_counts() -> None:
    """The pieces that go are small enough for the heap, and each has one before and behind it that stays."""
    device = CpuDevice()
    pieces = [bytearray(b"x" * 100_000) for _ in range(1000)]
    del pieces[1::2]
    kept = device.used_bytes()
    assert trim_heap()
    assert kept - device.used_bytes() > 40 * MIB
    assert len(pieces) == 500


def test_the_process_uses_no_more_than_was_planned(engine: Engine) -> None:
    assert engine.info.memory.unplanned_bytes <= 0


def test_graphs_are_captured_and_their_bytes_reserved(engine: Engine) -> None:
    encoder, decoder = engine.info.graphs
    assert (encoder.family, decoder.family) == ("encoder", "decoder")
    assert [bucket.name for bucket in encoder.buckets] == ["32", "64"]
    assert [bucket.name for bucket in decoder.buckets] == ["1", "2", "4"]
    for family in (encoder, decoder):
        assert {bucket.state for bucket in family.buckets} == {"captured"}
        assert {bucket.self_test for bucket in family.buckets} == {"passed"}
        assert family.backend == "emulated"
        assert family.reserved_bytes == family.measured_bytes == family.captured_bytes > 0
        assert family.reserved_bytes == sum(bucket.graph_bytes for bucket in family.buckets)
        assert family.reserved_bytes == engine.info.memory.components[f"{family.family}_graphs"]


def test_start_counts_nothing(tiny_checkpoint: Path) -> None:
    stats = build(tiny_checkpoint).stats()
    assert set(stats.graphs) == {"encoder", "decoder"}
    for family, counts in stats.graphs.items():
        assert counts.hits == counts.padded_tokens == 0
        assert set(counts.misses) == set(MISS_REASONS[family])  # type: ignore[index]
        assert sum(counts.misses.values()) == sum(counts.replays.values()) == 0
    assert stats.num_images_encoded == stats.num_steps == stats.num_prompt_tokens == 0
    assert stats.encode_seconds == stats.step_seconds == 0


def test_an_engine_answers_and_counts(tiny_checkpoint: Path) -> None:
    engine = build(tiny_checkpoint)
    tokens = answer(
        engine,
        request_with_image(tiny_checkpoint, "a", 4, 6),
        request_with_image(tiny_checkpoint, "b", 5, 5),
    )
    assert [len(ids) for ids in tokens.values()] == [12, 12]
    assert tokens["a"] != tokens["b"]
    stats = engine.stats()
    assert stats.graphs["encoder"].hits == 2
    assert stats.graphs["decoder"].hits > 0
    assert stats.graphs["decoder"].misses["mixed_step"] > 0
    assert stats.num_images_encoded == 2
    assert stats.num_image_tokens_encoded == 24 + 25
    assert stats.num_generation_tokens == 24
    assert stats.num_steps > 1
    assert stats.encode_seconds > 0
    assert stats.num_blocks == engine.info.memory.num_blocks


def test_answers_do_not_depend_on_graphs(tiny_checkpoint: Path) -> None:
    requests = [request_with_image(tiny_checkpoint, f"r{n}", 3 + n, 6) for n in range(3)]
    baseline = answer(build(tiny_checkpoint, enforce_eager=True), *requests)
    assert len({tuple(ids) for ids in baseline.values()}) == 3
    for knobs in ({}, {"decoder_graphs": "full"}, {"decoder_graphs": "none"}, {"encoder_graphs": False}):
        assert answer(build(tiny_checkpoint, **knobs), *requests) == baseline, knobs


def test_unplanned_memory_is_read_again_after_serving(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.engine.READING_SECONDS", 0.0)
    engine = build(tiny_checkpoint)
    answer(engine, *(request_with_image(tiny_checkpoint, f"r{n}", 1 + n % 7, 8) for n in range(20)))
    assert engine.stats().unplanned_bytes <= 0
    ballast = np.ones(256 * MIB, dtype=np.uint8)
    assert engine.stats().unplanned_bytes > 64 * MIB
    assert ballast[-1] == 1


def test_eager_and_following_encoders_capture_and_reserve_nothing(tiny_checkpoint: Path) -> None:
    for knobs in (
        {"enforce_eager": True},
        {"encoder_graph_policy": "follow-decoder", "decoder_graphs": "none"},
    ):
        info = build(tiny_checkpoint, **knobs).info
        assert [(family.backend, family.buckets, family.captured_bytes) for family in info.graphs] == [
            ("none", (), 0)
        ] * 2
        assert info.memory.components["encoder_graphs"] == info.memory.components["decoder_graphs"] == 0


def test_encoder_graphs_live_without_decoder_graphs(tiny_checkpoint: Path) -> None:
    encoder, decoder = build(tiny_checkpoint, decoder_graphs="none").info.graphs
    assert encoder.captured_bytes > 0
    assert decoder.backend == "none"


@pytest.mark.parametrize(("mode", "is_measured"), [("off", True), ("skip", False)])
def test_graph_memory_that_is_not_reserved_is_reported_all_the_same(
    tiny_checkpoint: Path, mode: str, is_measured: bool
) -> None:
    info = build(tiny_checkpoint, reserve_graph_memory=mode).info
    for family in info.graphs:
        assert family.reserved_bytes == 0
        assert (family.measured_bytes > 0) is is_measured
        assert family.captured_bytes > 0
    assert info.memory.components["encoder_graphs"] == 0


def test_kv_cache_memory_bytes_sets_the_blocks_outright(tiny_checkpoint: Path) -> None:
    memory = build(tiny_checkpoint, kv_cache_memory_bytes=8 * MIB).info.memory
    assert memory.num_blocks + 1 == 8 * MIB // memory.block_bytes
    assert sum(memory.components.values()) == memory.requested_bytes


def test_default_request_stops_where_more_kv_is_of_no_use(tiny_checkpoint: Path) -> None:
    memory = build(tiny_checkpoint, memory_bytes=None).info.memory
    assert (memory.num_blocks + 1) * memory.block_size <= 1 << 20
    assert memory.num_blocks * memory.block_size >= 4 * 512
    assert memory.requested_bytes <= 4096 * MIB


def test_too_little_memory_names_the_knob(tiny_checkpoint: Path) -> None:
    with pytest.raises(MemoryPlanError, match=r"no KV block fits: memory_bytes gives 100\.0 MiB.*context"):
        build(tiny_checkpoint, memory_bytes=100 * MIB)
    with pytest.raises(MemoryPlanError, match=r"max_model_len is 512 tokens.*raise kv_cache_memory_bytes"):
        build(tiny_checkpoint, kv_cache_memory_bytes=MIB // 8)


@pytest.mark.parametrize("family", ["encoder", "decoder"])
def test_a_bucket_that_fails_runs_eager_and_the_engine_answers(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    from runtime.executor.decoder_program import DecoderProgram

    program = EncoderProgram if family == "encoder" else DecoderProgram
    name = "32" if family == "encoder" else "1"
    forward = program.forward

    def failing(self: Any, bucket: Any, inputs: Any) -> torch.Tensor:
        if bucket.name == name:
            raise RuntimeError("injected")
        return forward(self, bucket, inputs)

    baseline = answer(build(tiny_checkpoint), request_with_image(tiny_checkpoint, "a", 4, 6))
    monkeypatch.setattr(program, "forward", failing)
    engine = build(tiny_checkpoint)
    assert answer(engine, request_with_image(tiny_checkpoint, "a", 4, 6)) == baseline
    assert engine.stats().graphs[family].misses["capture_failed"] > 0
    with pytest.raises(ConfigError, match=rf"{family} graph bucket {name} .*injected.*strict_graphs"):
        build(tiny_checkpoint, strict_graphs=True)


def test_a_failing_step_ends_its_requests_alone(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(tiny_checkpoint)
    request, pixels = request_with_image(tiny_checkpoint, "a", 4, 6)
    engine.add(request, [pixels])
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "run", lambda output: 1 / 0)
        (output,) = engine.step()
    assert output.finish_reason == "error"
    assert output.error is not None
    assert not engine.has_work
    answer(engine, request_with_image(tiny_checkpoint, "b", 4, 6))


def test_pixels_that_do_not_match_are_refused_and_leave_nothing(engine: Engine, tiny_checkpoint: Path) -> None:
    request, pixels = request_with_image(tiny_checkpoint, "a", 4, 6)
    for wrong in ([], [pixels[:SIDE]]):
        with pytest.raises(ValueError, match="pixels"):
            engine.add(request, wrong)
    assert not engine.has_work
    engine.abort("never heard of")


def test_an_aborted_request_gives_everything_back(tiny_checkpoint: Path) -> None:
    engine = build(tiny_checkpoint)
    request, pixels = request_with_image(tiny_checkpoint, "a", 4, 6)
    engine.add(request, [pixels])
    engine.step()
    assert engine.stats().num_blocks_used > 0
    engine.abort("a")
    assert not engine.has_work
    assert engine.stats().num_blocks_used == 0


def test_a_device_that_is_not_served_is_refused(tiny_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="device is 'cuda'"):
        build(tiny_checkpoint, device="cuda")


def test_a_missing_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        build(tmp_path)


def test_what_the_scheduler_keeps_of_a_block_is_planned() -> None:
    num_blocks = 4096
    tracemalloc.start()
    try:
        blocks = BlockManager(num_blocks, 16)
        table = blocks.allocate(num_blocks - 1)
        for block_id in table:
            blocks.name(block_id, hashlib.sha256(str(block_id).encode()).digest())
        blocks.release(table)
        del table
        kept_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert kept_bytes / num_blocks <= BLOCK_NUMBER_BYTES
