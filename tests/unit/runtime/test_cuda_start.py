"""The start on a GPU that is made of numbers: the ledger, both backings, failures at every place, other tenants."""

import gc
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.config import GIB, MIB, ConfigError, EngineConfig
from runtime.cuda_hardware import CudaHardware
from runtime.engine import Engine
from runtime.executor.encoder_runner import EncoderProgram
from runtime.executor.kv_cache import KVCache
from runtime.executor.vmm import VirtualMemoryError
from runtime.startup import build_encoder_engine, build_engine
from tests.fake_cuda import Failure, FakeGpu, fake_device, fake_hardware
from tests.unit.runtime.test_startup import SMALL, answer, request_with_image

BACKINGS = ("vmm", "torch")
BUCKETS = {"encoder": ["64", "32"], "decoder": ["4", "2", "1"]}  # in the order of their captures


def config(directory: Path, **knobs: Any) -> EngineConfig:
    return EngineConfig(model=str(directory), **{**SMALL, "gpu_memory_utilization": 0.055, **knobs})


def build(directory: Path, gpu: FakeGpu, **knobs: Any) -> Engine:
    return build_engine(config(directory, **knobs), open_hardware=fake_hardware(gpu))


@pytest.mark.parametrize("backing", BACKINGS)
def test_rows_sum_to_the_request_and_cover_what_the_device_says(tiny_checkpoint: Path, backing: str) -> None:
    gpu = FakeGpu()
    engine = build(tiny_checkpoint, gpu, kv_backing=backing)
    memory, rows = engine.info.memory, engine.info.memory.components
    assert sum(rows.values()) == memory.requested_bytes == math.ceil(gpu.total_bytes * 0.055)
    assert rows["kv"] == (memory.num_blocks + 1) * memory.block_bytes
    assert rows["kv"] % (2 * MIB) == 0
    assert rows["transient"] == gpu.transient_bytes + gpu.small_transient_bytes
    assert rows["encoder_graphs"] == 2 * gpu.segment_bytes
    assert rows["decoder_graphs"] == 3 * gpu.segment_bytes
    assert rows["graph_driver"] == 5 * gpu.driver_bytes_per_graph + MIB
    if backing == "vmm":
        assert rows["context"] == gpu.context_bytes
        assert memory.unplanned_bytes <= 0
        assert sum(gpu.mapped.values()) == rows["kv"]


def test_an_engine_that_nobody_refers_to_gives_its_kv_cache_back(tiny_checkpoint: Path) -> None:
    gpu = FakeGpu()
    engine = build(tiny_checkpoint, gpu)
    answer(engine, request_with_image(tiny_checkpoint, "a", 4, 6))
    assert sum(gpu.mapped.values()) == engine.info.memory.components["kv"]
    del engine
    gc.collect()
    assert not gpu.mapped


def test_virtual_memory_captures_each_bucket_once_and_pools_account_for_the_reservation(tiny_checkpoint: Path) -> None:
    gpu = FakeGpu()
    engine = build(tiny_checkpoint, gpu)
    assert gpu.num_captures == 5
    rows = engine.info.memory.components
    assert sum(gpu.pools.values()) + rows["graph_driver"] == sum(family.reserved_bytes for family in engine.info.graphs)
    for family in engine.info.graphs:
        assert family.backend == "cuda"
        assert family.num_captures == 1
        assert family.reserved_bytes == family.measured_bytes == family.captured_bytes > 0
        assert {bucket.self_test for bucket in family.buckets} == {"passed"}


@pytest.mark.parametrize("driver_keeps", [False, True])
def test_the_torch_twin_measures_releases_and_captures_again(
    tiny_checkpoint: Path, caplog: pytest.LogCaptureFixture, driver_keeps: bool
) -> None:
    gpu = FakeGpu(driver_keeps=driver_keeps)
    engine = build(tiny_checkpoint, gpu, kv_backing="torch")
    assert gpu.num_captures == 10
    assert not gpu.mapped
    assert sum(len(graphs) for graphs in gpu.graphs.values()) == 5  # the probe's are gone
    for family in engine.info.graphs:
        assert family.num_captures == 2
        assert family.probe_segments_left_bytes == 0
        assert family.reserved_bytes == family.captured_bytes  # what the driver kept of the probe is in both
    assert "recapture" in engine.info.startup_phase_seconds
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_second_capture_that_takes_more_is_warned_of(
    tiny_checkpoint: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu()
    capture = gpu.capture

    def growing(forward: Any, pool: Any) -> Any:
        if gpu.num_captures >= 5:
            gpu.segment_bytes = 20 * MIB
        return capture(forward, pool)

    monkeypatch.setattr(gpu, "capture", growing)
    build(tiny_checkpoint, gpu, kv_backing="torch")
    assert caplog.text.count("took other than what was measured") == 2


@pytest.mark.parametrize("backing", BACKINGS)
def test_answers_do_not_depend_on_graphs_nor_on_the_backing(tiny_checkpoint: Path, backing: str) -> None:
    requests = [request_with_image(tiny_checkpoint, f"r{n}", 3 + n, 6) for n in range(2)]
    baseline = answer(build(tiny_checkpoint, FakeGpu(), graph_backend="emulated"), *requests)
    assert len({tuple(ids) for ids in baseline.values()}) == 2
    for mode in ("decode", "full", "none"):
        gpu = FakeGpu(segment_bytes=3 * MIB)
        assert answer(build(tiny_checkpoint, gpu, kv_backing=backing, decoder_graphs=mode), *requests) == baseline


def test_a_start_keeps_the_profile_s_segments_and_lets_torch_hold_no_more(tiny_checkpoint: Path) -> None:
    gpu = FakeGpu()
    engine = build(tiny_checkpoint, gpu)
    assert gpu.arena_bytes == gpu.transient_bytes
    row = gpu.transient_bytes + gpu.small_transient_bytes
    assert gpu.limit_bytes == gpu.reserved_bytes() - gpu.cached_bytes + row
    assert engine.stats().graphs["decoder"].misses["mixed_step"] == 0  # running the worst case counts nowhere


def test_a_start_runs_the_encoder_as_requests_do(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of inference mode a compiler would compile it once more."""
    eager, modes = EncoderProgram.eager, []

    def watched(self: EncoderProgram, pixels: Any) -> Tensor:
        modes.append(torch.is_inference_mode_enabled())
        return eager(self, pixels)

    monkeypatch.setattr(EncoderProgram, "eager", watched)
    build(tiny_checkpoint, FakeGpu())
    assert len(modes) > 1
    assert all(modes)


@pytest.mark.parametrize("backing", BACKINGS)
def test_the_transient_s_row_grows_until_forwards_fit_into_it(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, backing: str
) -> None:
    gpu = FakeGpu()
    limit_reserved = gpu.limit_reserved
    needed_bytes = gpu.transient_bytes + 20 * MIB

    def refusing(num_bytes: int, *, arena_bytes: int) -> None:
        limit_reserved(num_bytes, arena_bytes=arena_bytes)
        if 0 < arena_bytes < needed_bytes:
            raise torch.OutOfMemoryError("injected")

    monkeypatch.setattr(gpu, "limit_reserved", refusing)
    memory = build(tiny_checkpoint, gpu, kv_backing=backing).info.memory
    # Eight MiB at a time, three times.
    assert gpu.arena_bytes == gpu.transient_bytes + 24 * MIB
    assert memory.components["transient"] == gpu.arena_bytes + gpu.small_transient_bytes
    assert sum(memory.components.values()) == memory.requested_bytes
    assert memory.unplanned_bytes <= 0


@pytest.mark.parametrize(
    ("index", "kind"), [(1, "invalidated"), (2, "oom"), (3, "python"), (4, "invalidated"), (5, "replay")]
)
def test_a_capture_that_fails_anywhere_costs_its_bucket_alone(tiny_checkpoint: Path, kind: Failure, index: int) -> None:
    gpu = FakeGpu(fail={index: kind})
    engine = build(tiny_checkpoint, gpu)
    family, name = (
        ("encoder", BUCKETS["encoder"][index - 1]) if index < 3 else ("decoder", BUCKETS["decoder"][index - 3])
    )
    states = {(info.family, bucket.name): bucket.state for info in engine.info.graphs for bucket in info.buckets}
    assert states.pop((family, name)) == "capture_failed"  # type: ignore[arg-type]
    assert set(states.values()) == {"captured"}
    assert sum(engine.info.memory.components.values()) == engine.info.memory.requested_bytes
    assert engine.info.memory.unplanned_bytes <= 0
    answer(engine, request_with_image(tiny_checkpoint, "a", 4, 6), request_with_image(tiny_checkpoint, "b", 7, 6))
    answer(engine, request_with_image(tiny_checkpoint, "c", 2, 2))
    if name != "4":  # a batch size that two requests do not reach
        assert engine.stats().graphs[family].misses["capture_failed"] > 0
    assert engine.stats().unplanned_bytes <= 0


@pytest.mark.parametrize("kind", ["python", "oom", "invalidated"])
def test_strict_graphs_stop_the_start_with_bucket_bytes_and_knob(tiny_checkpoint: Path, kind: Failure) -> None:
    with pytest.raises(ConfigError, match=r"encoder graph bucket 64 \(64 tokens, \d+ bytes\).*encoder_graph_budgets"):
        build(tiny_checkpoint, FakeGpu(fail={1: kind}), strict_graphs=True)
    with pytest.raises(ConfigError, match=r"decoder graph bucket 4 .*decoder_graph_sizes"):
        build(tiny_checkpoint, FakeGpu(fail={3: kind}), strict_graphs=True)


def test_a_bootstrap_that_fails_leaves_a_server_without_graphs(tiny_checkpoint: Path) -> None:
    gpu = FakeGpu(fail_setup=True)
    engine = build(tiny_checkpoint, gpu)
    assert {bucket.state for family in engine.info.graphs for bucket in family.buckets} == {"capture_failed"}
    rows = engine.info.memory.components
    assert rows["encoder_graphs"] == rows["decoder_graphs"] == rows["graph_driver"] == 0
    answer(engine, request_with_image(tiny_checkpoint, "a", 4, 6))


def test_a_pool_that_an_invalidated_capture_keeps_is_in_the_ledger_of_the_twin(tiny_checkpoint: Path) -> None:
    gpu = FakeGpu(fail={1: "invalidated", 6: "invalidated"})
    engine = build(tiny_checkpoint, gpu, kv_backing="torch")
    left = engine.info.graphs[0].probe_segments_left_bytes
    assert left == gpu.segment_bytes  # torch keeps the pool; the bucket after it went into another one
    rows = engine.info.memory.components
    assert rows["graph_driver"] == left + 4 * gpu.driver_bytes_per_graph + MIB
    assert sum(gpu.pools.values()) <= rows["encoder_graphs"] + rows["decoder_graphs"] + left


@pytest.mark.parametrize(("name", "is_retained"), [("64", False), ("32", True)])
def test_padding_that_becomes_no_number_is_caught_and_its_bucket_runs_eager(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_retained: bool
) -> None:
    forward = EncoderProgram.forward

    def planted(self: EncoderProgram, bucket: Any, inputs: Any) -> Tensor:
        rows = forward(self, bucket, inputs)
        if bucket.name == name:
            rows = rows.clone()
            rows[-1] = float("nan")
        return rows

    monkeypatch.setattr(EncoderProgram, "forward", planted)
    engine = build(tiny_checkpoint, FakeGpu())
    encoder = {bucket.name: bucket for bucket in engine.info.graphs[0].buckets}
    broken = encoder.pop(name)
    assert broken.state == "self_test_failed"
    assert "not finite" in (broken.error or "")
    assert {bucket.state for bucket in encoder.values()} == {"captured"}
    # With another graph in the pool its segments stay there, and in the ledger; without one they are given back.
    assert broken.graph_bytes == (FakeGpu().segment_bytes if is_retained else 0)
    assert engine.info.memory.unplanned_bytes <= 0


@pytest.mark.parametrize("mode", ["off", "skip"])
def test_graphs_that_are_not_reserved_are_reported_and_exceed_the_plan(tiny_checkpoint: Path, mode: str) -> None:
    engine = build(tiny_checkpoint, FakeGpu(), reserve_graph_memory=mode, memory_margin_bytes=0)
    for family in engine.info.graphs:
        assert family.reserved_bytes == 0
        assert (family.measured_bytes > 0) is (mode == "off")
        assert family.captured_bytes > 0
    assert engine.info.memory.unplanned_bytes > 0


def test_eager_and_following_encoders_capture_nothing(tiny_checkpoint: Path) -> None:
    for knobs in (
        {"enforce_eager": True},
        {"encoder_graph_policy": "follow-decoder", "decoder_graphs": "none"},
    ):
        gpu = FakeGpu()
        rows = build(tiny_checkpoint, gpu, **knobs).info.memory.components
        assert gpu.num_captures == 0
        assert rows["encoder_graphs"] == rows["decoder_graphs"] == rows["graph_driver"] == 0


def test_kv_cache_memory_bytes_sets_kv_in_whole_pieces(tiny_checkpoint: Path) -> None:
    rows = build(tiny_checkpoint, FakeGpu(), kv_cache_memory_bytes=33 * MIB).info.memory.components
    assert rows["kv"] == 30 * MIB  # 2 MiB are no whole number of blocks; 6 MiB are
    assert rows["rounding"] == 3 * MIB


def test_other_tenants_that_come_and_go_during_the_start_never_stop_it(
    tiny_checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for start, change in ((0, 2 * GIB), (3 * GIB, -2 * GIB)):
        caplog.clear()
        gpu = FakeGpu(others_bytes=start)
        changes = iter([0, 0, 0, change])

        def tenant(gpu: FakeGpu = gpu, changes: Any = changes) -> None:
            gpu.others_bytes += next(changes, 0)

        gpu.on_settle = tenant
        engine = build(tiny_checkpoint, gpu)
        assert "another process" in caplog.text
        assert engine.info.memory.components["context"] == gpu.context_bytes
        assert engine.info.memory.unplanned_bytes <= 0


def test_a_tenant_that_takes_our_share_leaves_a_smaller_cache(
    tiny_checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gpu = FakeGpu(total_bytes=GIB)
    changes = iter([0, 0, 0, GIB // 2])

    def tenant() -> None:
        gpu.others_bytes += next(changes, 0)

    gpu.on_settle = tenant
    engine = build(tiny_checkpoint, gpu, gpu_memory_utilization=0.75)
    assert "makes do with the rest" in caplog.text
    assert engine.info.memory.requested_bytes == GIB // 2
    assert engine.info.memory.unplanned_bytes <= 0


def test_memory_that_is_taken_between_plan_and_mapping_is_planned_around(
    tiny_checkpoint: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu(total_bytes=GIB)
    resize = KVCache.resize

    def taken(self: KVCache, num_blocks: int) -> None:
        if num_blocks > 2 and not gpu.others_bytes:
            gpu.others_bytes = GIB // 2
        resize(self, num_blocks)

    monkeypatch.setattr(KVCache, "resize", taken)
    engine = build(tiny_checkpoint, gpu, gpu_memory_utilization=0.75)
    assert "planned again" in caplog.text
    assert engine.info.memory.requested_bytes == GIB // 2
    assert engine.info.memory.unplanned_bytes <= 0
    gpu = FakeGpu(total_bytes=GIB)
    with pytest.raises(ConfigError, match=r"KV cache of .* cannot be had .*OUT_OF_MEMORY.*lower gpu_memory_util"):
        build(tiny_checkpoint, gpu, gpu_memory_utilization=0.2, kv_cache_memory_bytes=GIB // 2)


def test_a_gpu_without_virtual_memory_is_told_to_use_the_twin() -> None:
    def refused() -> Any:
        raise VirtualMemoryError("cuMemGetAllocationGranularity failed: CUDA_ERROR_NOT_SUPPORTED")

    gpu = FakeGpu()
    with pytest.raises(ConfigError, match=r"kv_backing is 'vmm'.*NOT_SUPPORTED.*use 'torch'"):
        CudaHardware(
            EngineConfig(),
            fake_device(gpu),
            torch.device("cpu"),
            dtype=torch.float32,
            virtual_memory=refused,
            capture=gpu,
        )


def test_cuda_without_a_gpu_is_an_error_for_people(tiny_checkpoint: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        build_engine(config(tiny_checkpoint, device="cuda"))


def test_an_encoder_alone_needs_no_decoder_and_no_cache(tiny_checkpoint: Path) -> None:
    gpu = FakeGpu()
    engine = build_encoder_engine(config(tiny_checkpoint, mm_encoder_only=True), open_hardware=fake_hardware(gpu))
    rows = engine.info.memory.components
    assert rows["kv"] == rows["decoder_graphs"] == rows["attention_workspace"] == 0
    assert rows["encoder_graphs"] == 2 * gpu.segment_bytes
    assert sum(rows.values()) == engine.info.memory.requested_bytes
    assert engine.info.memory.unplanned_bytes <= 0
    assert not gpu.mapped
