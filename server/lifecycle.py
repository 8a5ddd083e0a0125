"""Where the service stands (starting, ready, draining, dead) and what is in flight. No HTTP, no signals."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Literal

ServicePhase = Literal["starting", "ready", "draining", "dead"]
PHASES: tuple[ServicePhase, ...] = ("starting", "ready", "draining", "dead")
AbortReason = Literal["disconnect", "stalled", "timeout", "drain", "engine_dead"]
ABORT_REASONS: tuple[AbortReason, ...] = ("disconnect", "stalled", "timeout", "drain", "engine_dead")

# What is cut off at the end of a drain still writes its last event.
FAREWELL_SECONDS = 2.0


class RequestEndedError(Exception):
    """The request ended before its answer was complete; `reason` says why."""

    def __init__(self, reason: AbortReason) -> None:
        super().__init__(reason)
        self.reason: AbortReason = reason


class RequestLife:
    """One request in flight, bound to the task that entered `Lifecycle.request`."""

    def __init__(self, task: asyncio.Task[object]) -> None:
        self.reason: AbortReason | None = None
        self._task = task

    def end(self, reason: AbortReason) -> None:
        """Ends the request at its next await, as `RequestEndedError`. The first reason counts."""
        if self.reason is None:
            self.reason = reason
            self._task.cancel()


class Lifecycle:
    """One per application. Phases only move forward: starting, ready, draining, dead.

    `failure` is why the service died; the process then exits non-zero. `ended` is set when there is nothing to wait for
    any more: the drain is over, or the engine is dead.
    """

    def __init__(self) -> None:
        self.phase: ServicePhase = "starting"
        self.failure: str | None = None
        self.ended = asyncio.Event()
        self._lives: set[RequestLife] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_in_flight(self) -> int:
        return len(self._lives)

    def become_ready(self) -> None:
        if self.phase == "starting":
            self.phase = "ready"

    def die(self, reason: str) -> None:
        """The engine is gone, or never came up. Requests in flight learn it from the engine client itself."""
        self.failure = self.failure or reason
        self.phase = "dead"
        self.ended.set()

    @asynccontextmanager
    async def request(self, timeout_seconds: float) -> AsyncGenerator[RequestLife, None]:
        """Counts a request as in flight, and lets others end it.

        Raises:
            RequestEndedError: its time was up, or `RequestLife.end` was called.
        """
        task = asyncio.current_task()
        assert task is not None
        life = RequestLife(task)
        timer = asyncio.get_running_loop().call_later(timeout_seconds, life.end, "timeout")
        self._lives.add(life)
        self._idle.clear()
        try:
            yield life
            if life.reason is not None:
                # The end came after the last await: take the cancellation here, so that it strikes nobody else.
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            if life.reason is None:
                raise
            task.uncancel()
            raise RequestEndedError(life.reason) from None
        finally:
            timer.cancel()
            self._lives.discard(life)
            if not self._lives:
                self._idle.set()

    async def drain(self, timeout_seconds: float) -> None:
        """Refuses new requests from now on, waits for those in flight, and cuts off what is left at the end."""
        if self.phase == "dead":
            return
        self.phase = "draining"
        if not await self._becomes_idle(timeout_seconds):
            for life in list(self._lives):
                life.end("drain")
            await self._becomes_idle(FAREWELL_SECONDS)
        self.ended.set()

    async def _becomes_idle(self, timeout_seconds: float) -> bool:
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
