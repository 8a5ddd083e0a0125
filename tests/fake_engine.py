"""An engine client that replays tokens: the HTTP layer's tests and benchmarks run on it instead of a model.

A whole `EngineClient`, not a mock: it keeps the protocol's promises about order, aborts and death. It has no process.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from runtime.client import EngineDeadError, EngineState
from runtime.request import FinishReason, Request, RequestOutput, TokenLogprobs
from runtime.stats import (
    MEMORY_COMPONENTS,
    BucketInfo,
    EngineInfo,
    EngineStats,
    GraphCounts,
    GraphFamilyInfo,
    MemoryLedger,
)

MIB = 1 << 20


def engine_info(*, max_model_len: int = 4096) -> EngineInfo:
    """A plausible engine on a CPU; the ledger's rows sum to what was requested."""
    components = dict.fromkeys(MEMORY_COMPONENTS, MIB)
    components["kv"] = 512 * MIB - (len(MEMORY_COMPONENTS) - 1) * MIB
    bucket = BucketInfo(
        name="64", tokens=64, max_items=4, state="captured", graph_bytes=MIB, capture_seconds=0.1, self_test="passed"
    )
    return EngineInfo(
        model="fake",
        device="cpu",
        dtype="float32",
        attention_backend="none",
        encoder_attention_backend="none",
        max_model_len=max_model_len,
        encoder_cache_tokens=2048,
        memory=MemoryLedger(
            requested_bytes=512 * MIB, components=components, num_blocks=100, block_size=16, block_bytes=4096,
            unplanned_bytes=-MIB,
        ),
        graphs=(
            GraphFamilyInfo(
                family="encoder", backend="emulated", buckets=(bucket,), reserved_bytes=2 * MIB,
                measured_bytes=2 * MIB, captured_bytes=MIB,
            ),
            GraphFamilyInfo(family="decoder", backend="none"),
        ),
        startup_phase_seconds={"load_weights": 0.5, "capture": 0.25},
    )  # fmt: skip


@dataclass(kw_only=True)
class Replay:
    """What the engine answers: tokens with a pause before each, and then how it ends.

    `hang_after`: gives so many tokens and then nothing more. `fail_after`: gives so many and then an error.
    `rejection`: why the request is refused at once.
    `logprob` is that of each token; the likeliest are the token itself and its successors.
    """

    token_ids: Sequence[int] = (1, 2, 3)
    delay_seconds: float = 0.0
    tokens_per_output: int = 1
    finish_reason: FinishReason = "stop"
    hang_after: int | None = None
    fail_after: int | None = None
    rejection: str | None = None
    logprob: float = -0.5
    num_cached_tokens: int = 0


@dataclass(kw_only=True)
class FakeEngineClient:
    """Replays `replay`, or what `script` makes of a request. Records requests and which of them were aborted.

    `is_start_held`: the start waits for `release_start`. `start_error`: it fails. `die` ends the engine as a crash
    would.
    """

    replay: Replay = field(default_factory=Replay)
    script: Callable[[Request], Replay] | None = None
    is_start_held: bool = False
    start_error: str | None = None
    max_model_len: int = 4096
    heartbeat_age: float = 0.0
    requests: list[Request] = field(default_factory=list)
    pixels: list[list[NDArray[np.uint8]]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    num_running: int = 0
    num_shutdowns: int = 0

    def __post_init__(self) -> None:
        self._state: EngineState = "starting"
        self._info: EngineInfo | None = None
        self._released = asyncio.Event()
        self._dead = asyncio.Event()
        self._reason = ""
        self._counts = GraphCounts(hits=3, misses={"too_large": 1}, replays={"64": 2}, padded_tokens=10)

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def info(self) -> EngineInfo | None:
        return self._info

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=self.num_running, num_blocks=100, num_blocks_used=25, graphs={"encoder": self._counts}
        )

    @property
    def seconds_since_heartbeat(self) -> float:
        return self.heartbeat_age

    async def start(self) -> None:
        if self.is_start_held:
            await self._released.wait()
        if self.start_error is not None:
            self._state = "dead"
            raise EngineDeadError(self.start_error)
        self._info = engine_info(max_model_len=self.max_model_len)
        self._state = "ready"

    async def generate(
        self, request: Request, pixels: Sequence[NDArray[np.uint8]]
    ) -> AsyncGenerator[RequestOutput, None]:
        self.requests.append(request)
        self.pixels.append(list(pixels))
        self.num_running += 1
        is_done = False
        try:
            async for output in self._outputs(request):
                is_done = output.finish_reason is not None
                yield output
        finally:
            self.num_running -= 1
            if not is_done and self._state != "dead":
                self.aborted.append(request.request_id)

    async def _outputs(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        replay = self.script(request) if self.script else self.replay
        token_ids = list(replay.token_ids)[: request.sampling.max_tokens]
        finish_reason = replay.finish_reason if len(token_ids) == len(replay.token_ids) else "length"
        if replay.rejection is not None:
            yield RequestOutput(
                request_id=request.request_id, finish_reason="error", error=replay.rejection, is_rejected=True
            )
            return
        scheduled_time = time.time()
        for start in range(0, len(token_ids), replay.tokens_per_output):
            if replay.hang_after is not None and start >= replay.hang_after:
                await self._pause(3600)
            if replay.fail_after is not None and start >= replay.fail_after:
                yield RequestOutput(request_id=request.request_id, finish_reason="error", error="secret detail")
                return
            await self._pause(replay.delay_seconds)
            new = token_ids[start : start + replay.tokens_per_output]
            is_last = start + replay.tokens_per_output >= len(token_ids)
            yield RequestOutput(
                request_id=request.request_id,
                new_token_ids=new,
                logprobs=self._logprobs(new, replay, request.sampling.num_logprobs),
                finish_reason=finish_reason if is_last else None,
                num_cached_tokens=replay.num_cached_tokens,
                scheduled_time=scheduled_time,
                first_token_time=scheduled_time,
            )

    def _logprobs(self, token_ids: list[int], replay: Replay, num_top: int | None) -> list[TokenLogprobs] | None:
        if num_top is None:
            return None
        return [TokenLogprobs(replay.logprob, [(t + i, replay.logprob - i) for i in range(num_top)]) for t in token_ids]

    async def _pause(self, seconds: float) -> None:
        """Sleeps, but no longer than the engine lives."""
        if seconds <= 0:
            await asyncio.sleep(0)
        else:
            try:
                async with asyncio.timeout(seconds):
                    await self._dead.wait()
            except TimeoutError:
                pass
        if self._dead.is_set():
            raise EngineDeadError(self._reason)

    def forget(self) -> None:
        """Replays the default, and has heard of no request."""
        self.replay, self.script = Replay(), None
        self.requests.clear()
        self.pixels.clear()
        self.aborted.clear()

    def release_start(self) -> None:
        """Call it in the event loop's thread."""
        self._released.set()

    def die(self, reason: str = "killed") -> None:
        """As if the engine's process had crashed. Call it in the event loop's thread."""
        self._reason = reason
        self._state = "dead"
        self._dead.set()

    async def wait_dead(self) -> str:
        await self._dead.wait()
        return self._reason

    async def shutdown(self) -> None:
        self.num_shutdowns += 1
        self._state = "dead"
