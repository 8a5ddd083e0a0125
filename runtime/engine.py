"""The engine: schedule, run, update. Knows no sockets, no HTTP, no text, and of the executor only its outside.

One of the three walls at which errors are caught: of a step that raises, each request is run alone, and those that
raise again end; the others live. An error after which the device cannot be used is the engine's end.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.device_errors import raise_if_device_lost
from runtime.grammar_queue import Compiler, GrammarQueue
from runtime.request import Request, RequestOutput
from runtime.scheduler.output import SampledToken, SchedulerOutput, StepResult
from runtime.scheduler.scheduler import Scheduler
from runtime.stats import EngineInfo, EngineStats, GraphCounts, GraphFamily

log = logging.getLogger(__name__)

# How old the reading of unplanned memory in a snapshot may be: it costs a millisecond or two.
READING_SECONDS = 2.0

# How long a step without other work waits for a grammar or an image: messages wait as long.
MAX_WAIT_SECONDS = 0.005


class Runner(Protocol):
    """The executor as the engine sees it."""

    def add(self, request: Request, pixels: Sequence[NDArray[np.uint8]]) -> None:
        """Keeps a request until `remove`, or until a step says that it ended.

        Raises:
            ValueError: the request cannot be served.
        """
        ...

    def remove(self, request_id: str) -> None:
        """Forgets a request; an unknown one is no error."""
        ...

    def run(self, output: SchedulerOutput) -> StepResult:
        """Does one step.

        Raises:
            EngineFatalError: nothing can be run any more. After anything else that it raises, the same requests may
                be run again, together or not: what it computed of a step before it raised is computed anew.
        """
        ...


class EncodesAhead(Protocol):
    """Encodes images beside the steps and keeps them, for the runner to find."""

    def begin(self, request: Request, pixels: Sequence[NDArray[np.uint8]], indices: Sequence[int]) -> bool:
        """Begins with the images of these indices; says whether the request must wait for them."""
        ...

    def take_ready(self, *, timeout_seconds: float) -> list[str]:
        """The requests that need no longer wait, each once. Waits for the first of them, but no longer than that."""
        ...

    def forget(self, request_id: str) -> None:
        """The request has ended; an unknown one is no error."""
        ...


class EncoderCounts(Protocol):
    """What the encoder did since the start."""

    @property
    def num_images(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_batches(self) -> int: ...
    @property
    def encode_seconds(self) -> float: ...


class GraphCounter(Protocol):
    """A graph set as those see it who only read its counts."""

    @property
    def family(self) -> GraphFamily: ...
    @property
    def counts(self) -> GraphCounts: ...


class Engine:
    """Requests in, outputs out, one step at a time. Made by `runtime.startup.build_engine`.

    Args:
        scheduler, runner: who decides, and who does.
        info: what the engine says of itself.
        encoder, graphs, read_unplanned_bytes: where a snapshot takes the executor's numbers from.
        grammars: what compiles requests' grammars, for the runner to find; without it the runner sees to that.
        encodes_ahead: what encodes requests' images beside the steps, for the runner to find; without it steps do.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        info: EngineInfo,
        *,
        encoder: EncoderCounts | None = None,
        graphs: Sequence[GraphCounter] = (),
        read_unplanned_bytes: Callable[[], int] | None = None,
        grammars: Compiler | None = None,
        encodes_ahead: EncodesAhead | None = None,
    ) -> None:
        self.info = info
        self._scheduler = scheduler
        self._runner = runner
        self._encoder = encoder
        self._graphs = graphs
        self._read_unplanned_bytes = read_unplanned_bytes
        self._unplanned_bytes = info.memory.unplanned_bytes
        self._read_at = time.monotonic()
        self._grammar_queue = GrammarQueue(grammars) if grammars is not None else None
        self._encodes_ahead = encodes_ahead
        self._num_steps = 0
        self._num_failed_steps = 0
        self._num_step_sequences = 0
        self._step_seconds = 0.0

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return self._scheduler.has_work or bool(self._grammar_queue)

    def add(self, request: Request, pixels: Sequence[NDArray[np.uint8]]) -> None:
        """Takes a request; its outputs come from `step`.

        Args:
            pixels: uint8 [height, width, 3], one for each of `request.images`, in order.

        Raises:
            ValueError: the request can never be served, is malformed, or its id is in use. Of a request whose grammar
                must be compiled first, `step` says so.
        """
        if self._grammar_queue is not None:
            if request.request_id in self._grammar_queue or self._scheduler.has(request.request_id):
                raise ValueError(f"request_id {request.request_id!r} is in use")
            if self._grammar_queue.must_wait(request):
                self._grammar_queue.put(request, pixels)
                return
        self._add_now(request, pixels)

    def _add_now(self, request: Request, pixels: Sequence[NDArray[np.uint8]]) -> None:
        self._scheduler.add(request)
        try:
            self._runner.add(request, pixels)
        except BaseException:
            self._scheduler.abort(request.request_id)
            raise
        if self._encodes_ahead is not None and request.images:
            missing = self._scheduler.missing_images(request.request_id)
            if missing and self._encodes_ahead.begin(request, pixels, missing):
                self._scheduler.hold(request.request_id)

    def abort(self, request_id: str) -> None:
        """Ends a request without an output and frees what it holds; an unknown id is no error."""
        if self._grammar_queue is not None:
            self._grammar_queue.discard(request_id)
        self._scheduler.abort(request_id)
        self._forget(request_id)

    def step(self) -> list[RequestOutput]:
        """One step: what it added to each request.

        Raises:
            EngineFatalError: the engine is beyond use.
        """
        refused = self._add_compiled()
        self._resume_encoded()
        started = time.perf_counter()
        output = self._scheduler.schedule()
        outputs = refused + self._run(output)
        self._forget_finished(outputs)
        self._step_seconds += time.perf_counter() - started
        return outputs

    def stats(self) -> EngineStats:
        """A snapshot of everything that is counted."""
        stats = EngineStats(
            unplanned_bytes=self._recent_unplanned_bytes(),
            num_steps=self._num_steps,
            num_failed_steps=self._num_failed_steps,
            num_step_sequences=self._num_step_sequences,
            step_seconds=self._step_seconds,
            graphs={graphs.family: graphs.counts for graphs in self._graphs},
        )
        self._scheduler.write_stats(stats)
        if self._encoder is not None:
            stats.num_images_encoded = self._encoder.num_images
            stats.num_image_tokens_encoded = self._encoder.num_tokens
            stats.encode_batches = self._encoder.num_batches
            stats.encode_seconds = self._encoder.encode_seconds
        return stats

    def _add_compiled(self) -> list[RequestOutput]:
        """Adds the requests whose grammar is compiled by now; says which could not be. Without other work it waits a
        little, instead of looking again and again."""
        if not self._grammar_queue:
            return []
        outputs: list[RequestOutput] = []
        wait_seconds = 0.0 if self._scheduler.has_work else MAX_WAIT_SECONDS
        for waiting in self._grammar_queue.take_ready(timeout_seconds=wait_seconds):
            request_id = waiting.request.request_id
            try:
                if waiting.error is not None:
                    raise waiting.error
                self._add_now(waiting.request, waiting.pixels)
            except Exception as error:
                raise_if_device_lost(error)
                is_rejected = isinstance(error, ValueError)
                if not is_rejected:
                    log.exception("a request could not be added", extra={"request_id": request_id})
                message = str(error) if is_rejected else type(error).__name__
                outputs.append(
                    RequestOutput(request_id=request_id, finish_reason="error", error=message, is_rejected=is_rejected)
                )
        return outputs

    def _resume_encoded(self) -> None:
        """Lets the requests go on whose images are encoded by now. Without other work it waits a little."""
        if self._encodes_ahead is None or not self._scheduler.has_held:
            return
        has_other_work = self._scheduler.has_ready or bool(self._grammar_queue)
        timeout_seconds = 0.0 if has_other_work else MAX_WAIT_SECONDS
        for request_id in self._encodes_ahead.take_ready(timeout_seconds=timeout_seconds):
            self._scheduler.resume(request_id)

    def _run(self, output: SchedulerOutput) -> list[RequestOutput]:
        if output.is_empty:
            return self._scheduler.update(output, StepResult(tokens={}, failed={}))
        self._num_steps += 1
        self._num_step_sequences += len(output.requests)
        try:
            result = self._runner.run(output)
        except Exception as error:
            raise_if_device_lost(error)
            self._num_failed_steps += 1
            log.exception("a step failed", extra={"request_ids": [part.request_id for part in output.requests]})
            if len(output.requests) == 1:
                return self._scheduler.fail_step(output, _failure(error))
            return self._scheduler.update_again(output, self._run_alone(output))
        return self._scheduler.update(output, result)

    def _run_alone(self, output: SchedulerOutput) -> StepResult:
        """Runs each request of a step by itself, to tell the one that makes it raise from those beside it.

        Nothing is dropped first: the step may have done that before it raised. Images that it did not come to encode
        are encoded with the first request that needs them.
        """
        tokens: dict[str, SampledToken] = {}
        failed: dict[str, str] = {}
        refused: dict[str, str] = {}
        for part in output.requests:
            images = tuple(image for image in output.images if image.request_id == part.request_id)
            alone = SchedulerOutput(requests=(part,), images=images, num_scheduled_tokens=part.num_scheduled_tokens)
            try:
                result = self._runner.run(alone)
            except Exception as error:
                raise_if_device_lost(error)
                log.warning("a request failed alone, too", extra={"request_id": part.request_id})
                failed[part.request_id] = _failure(error)
            else:
                tokens.update(result.tokens)
                failed.update(result.failed)
                refused.update(result.refused)
        return StepResult(tokens=tokens, failed=failed, refused=refused)

    def _forget_finished(self, outputs: list[RequestOutput]) -> None:
        """The executor lets go of pixels now, not with the next step: there may be none for hours."""
        for request_output in outputs:
            if request_output.finish_reason is not None:
                self._forget(request_output.request_id)

    def _forget(self, request_id: str) -> None:
        self._runner.remove(request_id)
        if self._encodes_ahead is not None:
            self._encodes_ahead.forget(request_id)

    def _recent_unplanned_bytes(self) -> int:
        if self._read_unplanned_bytes is not None and time.monotonic() - self._read_at >= READING_SECONDS:
            self._unplanned_bytes = self._read_unplanned_bytes()
            self._read_at = time.monotonic()
        return self._unplanned_bytes


def _failure(error: Exception) -> str:
    return f"the step failed: {type(error).__name__}"
