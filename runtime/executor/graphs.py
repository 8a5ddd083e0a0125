"""Graphs of both families: buckets, static inputs, capture, self-test, choose, replay, bytes, counts.

Knows no model, no requests and no device API: a family brings a `GraphProgram` (what to run on which static inputs), a
device brings a `GraphBackend` (how to capture and replay). The encoder's set never looks at the decoder's.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from runtime.config import MIB, ConfigError, EngineConfig, ResolvedConfig
from runtime.device_errors import raise_if_device_lost
from runtime.executor.graph_backend import CapturedGraph, CaptureError, GraphBackend
from runtime.stats import (
    MISS_REASONS,
    BucketInfo,
    BucketState,
    GraphCounts,
    GraphFamily,
    GraphFamilyInfo,
    MissReason,
)

log = logging.getLogger(__name__)

# Mixed prefill+decode buckets of `--decoder-graphs full` start at this many tokens and double.
MIN_MIXED_TOKENS = 64

# How far a replay may be from eager on the same padded input, relative to the largest value: the same kernels on the
# same shapes agree to a few units in the last place.
SELF_TEST_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}

SelfTestFill = Literal["small", "large"]


class GraphError(ConfigError):
    """A bucket could not be captured, or failed its self-test, and `strict_graphs` forbids running it eager."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """One captured shape: room for `tokens` tokens of at most `max_items` items (images, or sequences of a step).

    `is_mixed`: serves decoder steps that hold prefills too. The encoder's tokens are output (post-merge) tokens.
    """

    name: str
    tokens: int
    max_items: int
    is_mixed: bool = False


class StaticInputs(Protocol):
    """The input buffers of one bucket. Their addresses are baked into a graph; their contents are not."""

    def tensors(self) -> Sequence[Tensor]:
        """Every buffer. Storage that buckets share is counted once, for the largest of them."""
        ...


InputsT = TypeVar("InputsT", bound=StaticInputs)


class GraphProgram(Protocol[InputsT]):
    """What a family captures. `forward` must read nothing that changes but `inputs` (and memory that graphs may bake,
    such as the KV cache's addresses)."""

    def allocate(self, bucket: Bucket) -> InputsT:
        """The bucket's static buffers, holding padding only, so that a forward over them is defined."""
        ...

    def forward(self, bucket: Bucket, inputs: InputsT) -> Tensor:
        """The bucket's output [bucket.tokens or bucket.max_items, ...]; called for warm-up, capture and eager twin."""
        ...

    def fill_for_self_test(self, bucket: Bucket, inputs: InputsT, fill: SelfTestFill) -> None:
        """Reproducible contents: `small` leaves as much padding as there can be, `large` as little."""
        ...


@dataclass(kw_only=True)
class _Slot(Generic[InputsT]):
    """A bucket and what became of it."""

    inputs: InputsT | None = None
    graph: CapturedGraph | None = None
    miss_reason: MissReason | None = None


class GraphSet(Generic[InputsT]):
    """One family's graphs. Without a backend the family is disabled: every `choose` misses and nothing is captured."""

    def __init__(
        self,
        family: GraphFamily,
        buckets: Sequence[Bucket],
        *,
        backend: GraphBackend | None,
        strict: bool = False,
    ) -> None:
        self.family: GraphFamily = family
        self.buckets = tuple(sorted(buckets, key=lambda b: (b.tokens, b.is_mixed, b.max_items))) if backend else ()
        self._backend = backend
        self._strict = strict
        self._program: GraphProgram[InputsT] | None = None
        self._slots: dict[str, _Slot[InputsT]] = {}
        self._infos: dict[str, BucketInfo] = {}
        self._counts = GraphCounts(
            misses=dict.fromkeys(MISS_REASONS[family], 0), replays={bucket.name: 0 for bucket in self.buckets}
        )

    @property
    def is_enabled(self) -> bool:
        return self._backend is not None

    @property
    def counts(self) -> GraphCounts:
        """A copy of the cumulative counts; what happens in `capture` counts nowhere."""
        counts = self._counts
        return GraphCounts(
            hits=counts.hits,
            misses=dict(counts.misses),
            replays=dict(counts.replays),
            padded_tokens=counts.padded_tokens,
        )

    @property
    def graph_bytes(self) -> int:
        """What the family's graphs hold now, with what failed captures retain."""
        return sum(info.graph_bytes for info in self._infos.values())

    @property
    def driver_bytes(self) -> int:
        """The part of `graph_bytes` that lies outside of the allocator."""
        return sum(info.driver_bytes for info in self._infos.values())

    @property
    def segment_bytes(self) -> int:
        """What the backend's pool holds now."""
        return self._backend.segment_bytes if self._backend else 0

    def info(self, *, reserved_bytes: int) -> GraphFamilyInfo:
        """What the metrics and the ledger show. `reserved_bytes`: what KV sizing subtracted for this family."""
        return GraphFamilyInfo(
            family=self.family,
            backend=self._backend.name if self._backend else "none",
            buckets=tuple(self._infos[bucket.name] for bucket in self.buckets if bucket.name in self._infos),
            reserved_bytes=reserved_bytes,
            measured_bytes=self.graph_bytes,
            captured_bytes=self.graph_bytes,
            driver_bytes=self.driver_bytes,
            segment_bytes=self.segment_bytes,
        )

    def capture(self, program: GraphProgram[InputsT]) -> None:
        """Captures and self-tests every bucket, largest first. A bucket that fails runs eager from then on.

        Raises:
            GraphError: a bucket failed and the set is strict.
            EngineFatalError: a capture left the device unusable.
        """
        assert not self._infos, "capture runs once"
        self._program = program
        for bucket in reversed(self.buckets):
            self._slots[bucket.name], self._infos[bucket.name] = self._capture_bucket(bucket, program)

    def choose(self, *, tokens: int, items: int, is_mixed: bool = False) -> Bucket | MissReason:
        """The smallest bucket with room for `tokens` tokens of `items` items, or why there is no replay.

        A bucket that failed is not replaced by a larger one: the reason is given, and the caller runs eager.
        """
        if not self.buckets:
            return "disabled"
        fitting_kind = [bucket for bucket in self.buckets if bucket.is_mixed or not is_mixed]
        if not fitting_kind:
            return "mixed_step"
        fitting_tokens = [bucket for bucket in fitting_kind if bucket.tokens >= tokens]
        if not fitting_tokens:
            return "too_large"
        for bucket in fitting_tokens:
            if bucket.max_items >= items:
                return self._slots[bucket.name].miss_reason or bucket
        return "too_many_items" if "too_many_items" in MISS_REASONS[self.family] else "too_large"

    def inputs(self, bucket: Bucket) -> InputsT:
        """The static buffers of a captured bucket, to be filled, padding included, before `replay`."""
        inputs = self._slots[bucket.name].inputs
        assert inputs is not None, f"bucket {bucket.name} is not captured"
        return inputs

    def replay(self, bucket: Bucket, *, tokens: int, items: int) -> Tensor:
        """Replays over the filled static inputs and counts `items` hits. The output lives until the next replay."""
        graph = self._slots[bucket.name].graph
        assert graph is not None, f"bucket {bucket.name} is not captured"
        assert items <= bucket.max_items
        assert tokens <= bucket.tokens
        output = graph.replay()
        self._counts.hits += items
        self._counts.replays[bucket.name] += 1
        self._counts.padded_tokens += bucket.tokens - tokens
        return output

    def count_miss(self, reason: MissReason, *, items: int) -> None:
        """Counts `items` that ran eager."""
        self._counts.misses[reason] += items

    def release(self) -> None:
        """Gives back every graph; the family then misses as if its captures had failed."""
        for slot in self._slots.values():
            if slot.graph is not None:
                slot.graph.release()
        self._slots = {name: _Slot(miss_reason="capture_failed") for name in self._slots}
        self._infos = {}

    def _capture_bucket(self, bucket: Bucket, program: GraphProgram[InputsT]) -> tuple[_Slot[InputsT], BucketInfo]:
        assert self._backend is not None
        started = time.perf_counter()
        static_bytes = 0
        try:
            inputs = program.allocate(bucket)
            tensors = inputs.tensors()
            static_bytes = sum(tensor.nbytes for tensor in tensors)
            if self._backend.replays_eagerly:
                program.fill_for_self_test(bucket, inputs, "small")  # the capture is the self-test's first run
            graph = self._backend.capture(lambda: program.forward(bucket, inputs), tensors)
        except Exception as error:  # any failure of a capture costs this bucket its graph, not the server its start
            raise_if_device_lost(error)
            retained = error.retained_bytes if isinstance(error, CaptureError) else 0
            message = f"{type(error).__name__}: {error}"
            self._refuse_if_strict(bucket, "could not be captured", message, max(static_bytes, retained))
            return self._failed(bucket, "capture_failed", message, retained, time.perf_counter() - started)
        capture_seconds = time.perf_counter() - started
        problem = self._self_test(bucket, program, inputs, graph)
        if problem is not None:
            taken = graph.graph_bytes
            graph.release()
            self._refuse_if_strict(bucket, "failed its self-test", problem, taken)
            return self._failed(bucket, "self_test_failed", problem, graph.graph_bytes, capture_seconds)
        log.info(
            "graph captured",
            extra={
                "graph": self.family,
                "bucket": bucket.name,
                "mib": round(graph.graph_bytes / MIB, 3),
                "driver_mib": round(graph.driver_bytes / MIB, 3),
                "seconds": round(capture_seconds, 3),
                "self_test": "passed",
            },
        )
        info = self._info(
            bucket, "captured", graph.graph_bytes, capture_seconds, self_test="passed", driver_bytes=graph.driver_bytes
        )
        return _Slot(inputs=inputs, graph=graph), info

    def _self_test(
        self, bucket: Bucket, program: GraphProgram[InputsT], inputs: InputsT, graph: CapturedGraph
    ) -> str | None:
        """Small, large, small: what is wrong with the bucket, or `None`. Finite everywhere, padding included; equal to
        eager on the same padded input; and the second small equal to the first, so nothing of the large one lingers."""
        assert self._backend is not None
        first_small: Tensor | None = None
        fills: tuple[SelfTestFill, ...] = ("small", "large", "small")
        try:
            for index, fill in enumerate(fills):
                program.fill_for_self_test(bucket, inputs, fill)
                has_run = index == 0 and graph.captured_output is not None
                replayed = graph.captured_output if has_run else graph.replay()
                assert replayed is not None
                if not bool(torch.isfinite(replayed).all()):
                    return f"{fill} input: the replay holds values that are not finite"
                if fill == "small" and first_small is not None:
                    if (distance := _distance(replayed, first_small)) > _tolerance(replayed):
                        return f"small input after a large one: off by {distance:.2e} from before it"
                    continue
                if not self._backend.replays_eagerly:
                    eager = program.forward(bucket, inputs)
                    if (distance := _distance(replayed, eager)) > _tolerance(replayed):
                        return f"{fill} input: off by {distance:.2e} from eager on the same padded input"
                if fill == "small":
                    first_small = replayed.clone()
        except Exception as error:  # as for a failed capture: this bucket runs eager
            raise_if_device_lost(error)
            return f"{type(error).__name__}: {error}"
        return None

    def _refuse_if_strict(self, bucket: Bucket, what: str, why: str, taken_bytes: int) -> None:
        if self._strict:
            knob = "encoder_graph_budgets" if self.family == "encoder" else "decoder_graph_sizes"
            raise GraphError(
                f"{self.family} graph bucket {bucket.name} ({bucket.tokens} tokens, {taken_bytes} bytes) {what}: "
                f"{why}. strict_graphs is on: leave the bucket out of {knob}, or let it run eager without strict_graphs"
            )

    def _failed(
        self,
        bucket: Bucket,
        reason: Literal["capture_failed", "self_test_failed"],
        message: str,
        retained_bytes: int,
        seconds: float,
    ) -> tuple[_Slot[InputsT], BucketInfo]:
        log.warning(
            "graph bucket runs eager",
            extra={
                "graph": self.family,
                "bucket": bucket.name,
                "reason": reason,
                "error": message,
                "retained_bytes": retained_bytes,
            },
        )
        self_test: Literal["failed", "not_run"] = "failed" if reason == "self_test_failed" else "not_run"
        info = self._info(bucket, reason, retained_bytes, seconds, self_test=self_test, error=message)
        return _Slot(miss_reason=reason), info

    def _info(
        self,
        bucket: Bucket,
        state: BucketState,
        graph_bytes: int,
        seconds: float,
        *,
        self_test: Literal["passed", "failed", "not_run"],
        driver_bytes: int = 0,
        error: str | None = None,
    ) -> BucketInfo:
        return BucketInfo(
            name=bucket.name,
            tokens=bucket.tokens,
            max_items=bucket.max_items,
            state=state,
            graph_bytes=graph_bytes,
            driver_bytes=driver_bytes,
            capture_seconds=seconds,
            self_test=self_test,
            error=error,
        )


def should_capture_encoder(config: EngineConfig, *, encoder_supports_graphs: bool) -> bool:
    """Whether the encoder gets graphs: enabled, supported by the model's encoder, and not `enforce_eager`.

    Whether the decoder has graphs matters under the `follow-decoder` policy only, and is then read from the
    configuration: the decoder's graph set may not exist yet when this is asked.
    """
    if config.enforce_eager or not config.encoder_graphs or not encoder_supports_graphs:
        return False
    return config.encoder_graph_policy == "independent" or should_capture_decoder(config)


def should_capture_decoder(config: EngineConfig) -> bool:
    """Whether the decoder gets graphs, from the configuration alone."""
    return config.decoder_graphs != "none" and not config.enforce_eager


def should_run_ahead(config: EngineConfig, device: torch.device) -> bool:
    """Whether decode steps are launched before the tokens of those before them are read. Only replays are: what the
    host does for an eager step takes longer than the device."""
    if config.run_ahead == "off" or not should_capture_decoder(config):
        return False
    return config.run_ahead == "on" or device.type == "cuda"


def encoder_buckets(config: ResolvedConfig) -> tuple[Bucket, ...]:
    """One bucket a budget, named by its output tokens."""
    max_items = config.engine.encoder_graph_max_items
    return tuple(
        Bucket(name=str(tokens), tokens=tokens, max_items=min(max_items, tokens))
        for tokens in config.encoder_graph_budgets
    )


def decoder_buckets(config: ResolvedConfig) -> tuple[Bucket, ...]:
    """One bucket a batch size, and for `full` mixed ones by total tokens, up to a whole step."""
    engine = config.engine
    if engine.decoder_graphs == "none":
        return ()
    buckets = [Bucket(name=str(size), tokens=size, max_items=size) for size in config.decoder_graph_sizes]
    if engine.decoder_graphs == "full":
        tokens = min(MIN_MIXED_TOKENS, engine.max_num_batched_tokens)
        while True:
            max_items = min(engine.max_num_seqs, tokens)
            buckets.append(Bucket(name=f"mixed-{tokens}", tokens=tokens, max_items=max_items, is_mixed=True))
            if tokens == engine.max_num_batched_tokens:
                break
            tokens = min(tokens * 2, engine.max_num_batched_tokens)
    return tuple(buckets)


def _distance(value: Tensor, reference: Tensor) -> float:
    """Largest difference, relative to the reference's largest value; infinite when it is not finite."""
    difference = (value.float() - reference.float()).abs().max()
    scale = reference.float().abs().max().clamp_min(1e-6)
    distance = float(difference / scale)
    return distance if distance == distance else float("inf")


def _tolerance(value: Tensor) -> float:
    return SELF_TEST_TOLERANCE.get(value.dtype, 1e-4)
