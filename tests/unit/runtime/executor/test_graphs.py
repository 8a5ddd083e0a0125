"""Graph sets on a program of a few lines: choosing, counting, bytes, self-test and failures."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from runtime.config import EngineConfig, ResolvedConfig, resolve_config
from runtime.device_errors import EngineFatalError
from runtime.executor.graph_backend import CapturedGraph, CaptureError, EmulatedBackend
from runtime.executor.graphs import (
    Bucket,
    GraphError,
    GraphSet,
    SelfTestFill,
    decoder_buckets,
    encoder_buckets,
    should_capture_decoder,
    should_capture_encoder,
)
from tests.unit.runtime.test_config import MODEL, PROCESSOR

WIDTH = 3
BUCKETS = (Bucket(name="4", tokens=4, max_items=2), Bucket(name="8", tokens=8, max_items=2))


@dataclass
class Rows:
    """Static inputs: rows of numbers, the first `length` of which are real."""

    rows_TW: Tensor

    def tensors(self) -> Sequence[Tensor]:
        return (self.rows_TW,)


class Doubling:
    """A program that doubles its input. `padding` is what the tail of the buffers holds; `fail_at` a bucket's name."""

    def __init__(self, *, padding: float = 0.0, fail_at: str | None = None, error: Exception | None = None) -> None:
        self.padding = padding
        self.fail_at = fail_at
        self.error = error or RuntimeError("no such kernel")
        self.num_forwards = 0

    def allocate(self, bucket: Bucket) -> Rows:
        return Rows(torch.zeros(bucket.tokens, WIDTH))

    def forward(self, bucket: Bucket, inputs: Rows) -> Tensor:
        self.num_forwards += 1
        if bucket.name == self.fail_at:
            raise self.error
        return inputs.rows_TW * 2

    def fill_for_self_test(self, bucket: Bucket, inputs: Rows, fill: SelfTestFill) -> None:
        length = 1 if fill == "small" else bucket.tokens
        inputs.rows_TW.fill_(self.padding)
        inputs.rows_TW[:length] = torch.arange(length * WIDTH).reshape(length, WIDTH)


def captured(program: Doubling | None = None, **kwargs: bool) -> GraphSet[Rows]:
    graphs: GraphSet[Rows] = GraphSet("encoder", BUCKETS, backend=EmulatedBackend(), **kwargs)
    graphs.capture(program or Doubling())
    return graphs


def states(graphs: GraphSet[Rows]) -> dict[str, str]:
    return {bucket.name: bucket.state for bucket in graphs.info(reserved_bytes=0).buckets}


def test_the_smallest_bucket_with_room_is_chosen() -> None:
    graphs = captured()
    assert graphs.choose(tokens=1, items=1) == BUCKETS[0]
    assert graphs.choose(tokens=4, items=2) == BUCKETS[0]
    assert graphs.choose(tokens=5, items=1) == BUCKETS[1]


def test_a_capture_that_leaves_the_device_unusable_is_the_end_of_the_start() -> None:
    error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(EngineFatalError, match="illegal memory access"):
        captured(Doubling(fail_at="8", error=error))


def test_misses_say_why() -> None:
    graphs = captured()
    assert graphs.choose(tokens=9, items=1) == "too_large"
    assert graphs.choose(tokens=3, items=3) == "too_many_items"
    disabled: GraphSet[Rows] = GraphSet("encoder", BUCKETS, backend=None)
    assert disabled.choose(tokens=1, items=1) == "disabled"
    assert not disabled.is_enabled


def test_decoder_step_with_a_prefill_needs_a_mixed_bucket() -> None:
    decode = Bucket(name="4", tokens=4, max_items=4)
    mixed = Bucket(name="mixed-8", tokens=8, max_items=2, is_mixed=True)
    only_decode: GraphSet[Rows] = GraphSet("decoder", [decode], backend=EmulatedBackend())
    only_decode.capture(Doubling())
    assert only_decode.choose(tokens=3, items=1, is_mixed=True) == "mixed_step"
    full: GraphSet[Rows] = GraphSet("decoder", [mixed, decode], backend=EmulatedBackend())
    full.capture(Doubling())
    assert full.choose(tokens=3, items=1, is_mixed=True) == mixed
    assert full.choose(tokens=3, items=3) == decode
    assert full.choose(tokens=5, items=3) == "too_large"  # the decoder knows no too_many_items


def test_replay_reads_the_filled_inputs_and_counts_items_and_padding() -> None:
    graphs = captured()
    inputs = graphs.inputs(BUCKETS[1])
    inputs.rows_TW.fill_(1.5)
    output = graphs.replay(BUCKETS[1], tokens=6, items=2)
    assert torch.equal(output, torch.full((8, WIDTH), 3.0))
    assert graphs.counts.hits == 2
    assert graphs.counts.replays == {"4": 0, "8": 1}
    assert graphs.counts.padded_tokens == 2


def test_replay_overwrites_the_output_of_the_one_before() -> None:
    graphs = captured()
    inputs = graphs.inputs(BUCKETS[0])
    inputs.rows_TW.fill_(1)
    first = graphs.replay(BUCKETS[0], tokens=4, items=1)
    inputs.rows_TW.fill_(2)
    second = graphs.replay(BUCKETS[0], tokens=4, items=1)
    assert first.data_ptr() == second.data_ptr()
    assert float(first[0, 0]) == 4


def test_warm_up_and_self_test_count_nowhere() -> None:
    program = Doubling()
    graphs = captured(program)
    assert program.num_forwards > 0
    assert graphs.counts.hits == 0
    assert set(graphs.counts.replays.values()) == {0}
    assert graphs.counts.padded_tokens == 0


def test_every_miss_reason_exists_at_zero_and_counts_items() -> None:
    graphs = captured()
    assert set(graphs.counts.misses) == {
        "too_large",
        "too_many_items",
        "disabled",
        "capture_failed",
        "self_test_failed",
        "busy",
    }
    graphs.count_miss("too_large", items=3)
    assert graphs.counts.misses["too_large"] == 3
    assert sum(graphs.counts.misses.values()) == 3


def test_emulated_bytes_are_those_of_the_static_buffers() -> None:
    graphs = captured()
    float_bytes = 4
    assert graphs.graph_bytes == sum(2 * bucket.tokens * WIDTH * float_bytes for bucket in BUCKETS)
    info = graphs.info(reserved_bytes=7)
    assert info.captured_bytes == info.measured_bytes == graphs.graph_bytes
    assert info.reserved_bytes == 7
    assert info.backend == "emulated"


class SharedRows(Doubling):
    """All buckets slice one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self._rows_TW = torch.zeros(8, WIDTH)

    def allocate(self, bucket: Bucket) -> Rows:
        return Rows(self._rows_TW[: bucket.tokens])


def test_storage_that_buckets_share_is_counted_once() -> None:
    graphs = captured(SharedRows())
    assert graphs.graph_bytes == (8 + 8 + 4) * WIDTH * 4  # the buffer and two outputs


def test_storage_is_counted_again_once_its_graph_is_released() -> None:
    backend = EmulatedBackend()
    rows = torch.zeros(8, WIDTH)
    first = backend.capture(lambda: rows * 2, [rows])
    taken = first.graph_bytes
    assert backend.capture(lambda: rows * 2, [rows]).graph_bytes == taken - rows.nbytes
    first.release()
    assert first.graph_bytes == 0
    assert backend.capture(lambda: rows * 2, [rows]).graph_bytes == taken


def test_storage_that_is_counted_elsewhere_is_not_counted_here() -> None:
    rows = torch.zeros(8, WIDTH)
    assert EmulatedBackend(counted=[rows]).capture(lambda: rows * 2, [rows[:4]]).graph_bytes == rows.nbytes


@pytest.mark.parametrize("error", [RuntimeError("kernel"), MemoryError("full"), torch.OutOfMemoryError("full")])
@pytest.mark.parametrize("bucket", ["4", "8"])
def test_failed_capture_costs_one_bucket_its_graph(bucket: str, error: Exception) -> None:
    graphs = captured(Doubling(fail_at=bucket, error=error))
    other = "8" if bucket == "4" else "4"
    assert states(graphs) == {bucket: "capture_failed", other: "captured"}
    tokens = int(bucket)
    assert graphs.choose(tokens=tokens, items=1) == "capture_failed"
    failed = next(b for b in graphs.info(reserved_bytes=0).buckets if b.name == bucket)
    assert failed.graph_bytes == 0
    assert failed.error is not None
    assert str(error) in failed.error
    assert graphs.graph_bytes == 2 * int(other) * WIDTH * 4


def test_bytes_that_a_failed_capture_retains_are_counted() -> None:
    graphs = captured(Doubling(fail_at="8", error=CaptureError("invalidated", retained_bytes=4096)))
    assert graphs.graph_bytes == 4096 + 2 * 4 * WIDTH * 4


def test_failed_capture_is_logged_with_bucket_and_reason(caplog: pytest.LogCaptureFixture) -> None:
    captured(Doubling(fail_at="8"))
    record = next(r for r in caplog.records if r.message == "graph bucket runs eager")
    assert (record.__dict__["bucket"], record.__dict__["reason"]) == ("8", "capture_failed")


def test_strict_graphs_stop_the_start_with_bucket_bytes_and_knob() -> None:
    with pytest.raises(GraphError, match=r"bucket 8 .*96 bytes.*no such kernel.*strict_graphs.*encoder_graph_budgets"):
        captured(Doubling(fail_at="8"), strict=True)
    with pytest.raises(GraphError, match=r"failed its self-test.*strict_graphs"):
        captured(Doubling(padding=float("nan")), strict=True)


def test_nan_planted_in_the_padding_is_caught() -> None:
    graphs = captured(Doubling(padding=float("nan")))
    assert states(graphs) == {"4": "self_test_failed", "8": "self_test_failed"}
    assert graphs.choose(tokens=2, items=1) == "self_test_failed"
    assert graphs.graph_bytes == 0
    for bucket in graphs.info(reserved_bytes=0).buckets:
        assert bucket.self_test == "failed"
        assert bucket.error is not None
        assert "not finite" in bucket.error


class Lingering(Doubling):
    """Keeps the largest value it ever saw: the mark of a stale buffer."""

    def __init__(self) -> None:
        super().__init__()
        self._seen = torch.zeros(())

    def forward(self, bucket: Bucket, inputs: Rows) -> Tensor:
        self._seen = torch.maximum(self._seen, inputs.rows_TW.max())
        return inputs.rows_TW + self._seen


def test_what_lingers_from_a_large_input_is_caught() -> None:
    graphs: GraphSet[Rows] = GraphSet("encoder", BUCKETS[:1], backend=EmulatedBackend())
    graphs.capture(Lingering())
    assert states(graphs) == {"4": "self_test_failed"}


class SkewedBackend:
    """A backend whose replays are a little off, as a graph with a baked input would be."""

    name = "emulated"
    replays_eagerly = False
    segment_bytes = 0

    def __init__(self, skew: float) -> None:
        self._skew = skew
        self._backend = EmulatedBackend()

    def capture(self, forward: Callable[[], Tensor], static_tensors: Sequence[Tensor]) -> CapturedGraph:
        num_calls = 0

        def skewed() -> Tensor:
            nonlocal num_calls
            num_calls += 1
            return forward() + (self._skew if num_calls > 1 else 0.0)

        return RecordedGraph(self._backend.capture(skewed, static_tensors))


class RecordedGraph:
    """A graph whose capture ran nothing, as on a GPU."""

    captured_output = None

    def __init__(self, graph: CapturedGraph) -> None:
        self._graph = graph
        self.replay, self.release = graph.replay, graph.release
        self.driver_bytes = graph.driver_bytes

    @property
    def graph_bytes(self) -> int:
        return self._graph.graph_bytes


@pytest.mark.parametrize(("skew", "state"), [(0.0, "captured"), (0.1, "self_test_failed")])
def test_replay_that_differs_from_eager_on_the_same_padded_input_is_caught(skew: float, state: str) -> None:
    graphs: GraphSet[Rows] = GraphSet("encoder", BUCKETS, backend=SkewedBackend(skew))
    graphs.capture(Doubling())
    assert set(states(graphs).values()) == {state}


def test_released_graphs_hold_nothing() -> None:
    graphs = captured()
    graphs.release()
    assert graphs.graph_bytes == 0
    assert graphs.choose(tokens=1, items=1) == "capture_failed"


def resolved(**knobs: object) -> ResolvedConfig:
    return resolve_config(EngineConfig(**knobs), MODEL, PROCESSOR)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("knobs", "supports", "encoder", "decoder"),
    [
        ({}, True, True, True),
        ({"decoder_graphs": "none"}, True, True, False),
        ({}, False, False, True),
        ({"encoder_graphs": False}, True, False, True),
        ({"enforce_eager": True}, True, False, False),
        ({"encoder_graph_policy": "follow-decoder"}, True, True, True),
        ({"encoder_graph_policy": "follow-decoder", "decoder_graphs": "none"}, True, False, False),
        ({"encoder_graph_policy": "follow-decoder", "encoder_graphs": False}, True, False, True),
    ],
)
def test_graphs_are_captured_when_enabled_supported_and_not_eager(
    knobs: dict[str, object], supports: bool, encoder: bool, decoder: bool
) -> None:
    config = resolved(**knobs).engine
    assert should_capture_encoder(config, encoder_supports_graphs=supports) is encoder
    assert should_capture_decoder(config) is decoder


def test_encoder_has_one_bucket_a_budget() -> None:
    buckets = encoder_buckets(resolved(encoder_graph_budgets=(2, 64), encoder_graph_max_items=4))
    assert [(b.name, b.tokens, b.max_items) for b in buckets] == [("2", 2, 2), ("64", 64, 4)]


def test_decoder_buckets_follow_the_mode() -> None:
    assert decoder_buckets(resolved(decoder_graphs="none")) == ()
    decode = decoder_buckets(resolved(decoder_graphs="decode", max_num_seqs=6))
    assert [(b.name, b.max_items, b.is_mixed) for b in decode] == [
        ("1", 1, False),
        ("2", 2, False),
        ("4", 4, False),
        ("6", 6, False),
    ]
    full = decoder_buckets(resolved(decoder_graphs="full", max_num_seqs=2, max_num_batched_tokens=200))
    assert [(b.name, b.max_items) for b in full if b.is_mixed] == [("mixed-64", 2), ("mixed-128", 2), ("mixed-200", 2)]
