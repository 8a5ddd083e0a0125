"""Captures that fail on a real GPU, at any bucket of either family and at the bootstraps before them.

    call of a start   0          1    2   3          4  5  6
    what it captures  bootstrap  256  64  bootstrap  4  2  1
                      encoder             decoder

A bootstrap that fails costs the bucket that wanted it; the next bucket tries again.
"""

import itertools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from runtime.config import MIB, ConfigError
from runtime.executor.cuda_graphs import CudaGraphBackend, TorchCapture
from tests.gpu.engines import private_bytes, serve, start

pytestmark = pytest.mark.gpu

Kind = Literal["python", "oom", "invalidated"]
KINDS: tuple[Kind, ...] = ("python", "oom", "invalidated")
BUCKETS = {
    0: ("encoder", "256"), 1: ("encoder", "256"), 2: ("encoder", "64"),
    3: ("decoder", "4"), 4: ("decoder", "4"), 5: ("decoder", "2"), 6: ("decoder", "1"),
}  # fmt: skip
BOOTSTRAPS = (0, 3)


def failing(forward: Callable[[], Tensor], kind: Kind) -> Callable[[], Tensor]:
    """`forward` that goes wrong once all its kernels are in the graph."""

    def fails() -> Tensor:
        output = forward()
        if kind == "python":
            raise TypeError("planted")
        if kind == "oom":
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        output.float().sum().item()  # waits for the device, which invalidates the capture
        return output

    return fails


def plant(monkeypatch: pytest.MonkeyPatch, kind: Kind, index: int) -> list[int]:
    """Lets capture number `index` fail. Gives a list that gets, for each bucket that failed, by how many bytes live
    blocks of private pools grew."""
    capture, bucket_capture = TorchCapture.capture, CudaGraphBackend.capture
    calls = itertools.count()
    grown: list[int] = []

    def planted(self: TorchCapture, forward: Callable[[], Tensor], pool: Any) -> Any:
        return capture(self, failing(forward, kind) if next(calls) == index else forward, pool)

    def watched(self: CudaGraphBackend, forward: Callable[[], Tensor], static_tensors: Sequence[Tensor]) -> Any:
        before = private_bytes()[1]
        try:
            return bucket_capture(self, forward, static_tensors)
        except Exception:
            grown.append(private_bytes()[1] - before)
            raise

    monkeypatch.setattr(TorchCapture, "capture", planted)
    monkeypatch.setattr(CudaGraphBackend, "capture", watched)
    return grown


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index", BUCKETS)
def test_a_capture_that_fails_costs_its_bucket_alone(
    small_model_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: Kind,
    index: int,
) -> None:
    segments_before = private_bytes()[0]
    grown = plant(monkeypatch, kind, index)
    with caplog.at_level(logging.WARNING):
        engine = start(small_model_directory, decoder_graphs="decode")
    assert len(grown) == 1
    assert grown[0] <= 0, "a live block of the failed capture is left"
    assert "left live blocks" not in caplog.text

    family, name = BUCKETS[index]
    states = {(info.family, one.name): one.state for info in engine.info.graphs for one in info.buckets}
    assert states.pop((family, name)) == "capture_failed"  # type: ignore[arg-type]
    assert set(states.values()) == {"captured"}

    memory = engine.info.memory
    assert sum(memory.components.values()) == memory.requested_bytes
    assert memory.unplanned_bytes <= 0
    # Of a bootstrap that fails torch may keep the one segment; it has no bucket, and is in `static_buffers`.
    in_rows = memory.components["encoder_graphs"] + memory.components["decoder_graphs"]
    assert private_bytes()[0] - segments_before <= in_rows + (2 * MIB if index in BOOTSTRAPS else 0)

    serve(engine, 16)
    stats = engine.stats()
    assert stats.graphs[family].misses["capture_failed"] > 0
    assert stats.unplanned_bytes <= 0
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("index", "knob"), [(0, "encoder_graph_budgets"), (5, "decoder_graph_sizes")])
def test_strict_graphs_stop_the_start_with_bucket_bytes_and_knob(
    small_model_directory: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, index: int, knob: str
) -> None:
    plant(monkeypatch, kind, index)
    family, name = BUCKETS[index]
    with pytest.raises(ConfigError, match=rf"{family} graph bucket {name} \({name} tokens, \d+ bytes\).*{knob}"):
        start(small_model_directory, decoder_graphs="decode", strict_graphs=True)
    monkeypatch.undo()
    # The process is not spoilt: what failed can be had now.
    engine = start(small_model_directory, decoder_graphs="decode", strict_graphs=True)
    assert {one.state for info in engine.info.graphs for one in info.buckets} == {"captured"}
