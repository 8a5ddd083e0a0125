"""The engine: schedule, run, update. Knows no sockets, no HTTP and no text.

Errors stop here for the engine's part: a step that raises ends the requests of that step, and the others go on.
"""

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.executor.encoder_runner import EncoderRunner
from runtime.executor.graphs import GraphCounter
from runtime.executor.model_runner import ModelRunner
from runtime.request import Request, RequestOutput
from runtime.scheduler.output import StepResult
from runtime.scheduler.scheduler import Scheduler
from runtime.stats import EngineInfo, EngineStats

log = logging.getLogger(__name__)

# How old the reading of unplanned memory in a snapshot may be: it costs a millisecond or two.
READING_SECONDS = 2.0


class Engine:
    """Requests in, outputs out, one step at a time. Made by `runtime.startup.build_engine`."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        info: EngineInfo,
        *,
        encoder: EncoderRunner,
        graphs: Sequence[GraphCounter],
        read_unplanned_bytes: Callable[[], int],
    ) -> None:
        self.info = info
        self._scheduler = scheduler
        self._runner = runner
        self._encoder = encoder
        self._graphs = graphs
        self._read_unplanned_bytes = read_unplanned_bytes
        self._unplanned_bytes = info.memory.unplanned_bytes
        self._read_at = time.monotonic()
        self._num_steps = 0
        self._step_seconds = 0.0

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return self._scheduler.has_work

    def add(self, request: Request, pixels: Sequence[NDArray[np.uint8]]) -> None:
        """Takes a request; its outputs come from `step`.

        Args:
            pixels: one array [height, width, 3] for each of `request.images`, in order.

        Raises:
            ValueError: the request can never be served, is malformed, or its id is in use.
        """
        self._scheduler.add(request)
        try:
            self._runner.add(request, pixels)
        except ValueError:
            self._scheduler.abort(request.request_id)
            raise

    def abort(self, request_id: str) -> None:
        """Ends a request without an output and frees what it holds; an unknown id is no error."""
        self._scheduler.abort(request_id)
        self._runner.remove(request_id)

    def step(self) -> list[RequestOutput]:
        """One step: what it added to each request."""
        started = time.perf_counter()
        output = self._scheduler.schedule()
        if output.is_empty:
            return self._scheduler.update(output, StepResult(tokens={}, failed={}))
        try:
            outputs = self._scheduler.update(output, self._runner.run(output))
        except Exception as error:  # this step's requests fail, the others live
            log.exception("step failed", extra={"requests": [part.request_id for part in output.requests]})
            outputs = self._scheduler.fail_step(output, f"{type(error).__name__}: {error}")
        for ended in outputs:
            if ended.finish_reason is not None:  # at once, not with the next step: pictures are large
                self._runner.remove(ended.request_id)
        self._num_steps += 1
        self._step_seconds += time.perf_counter() - started
        return outputs

    def stats(self) -> EngineStats:
        """A snapshot of everything that is counted."""
        if time.monotonic() - self._read_at >= READING_SECONDS:
            self._unplanned_bytes = self._read_unplanned_bytes()
            self._read_at = time.monotonic()
        stats = EngineStats(
            unplanned_bytes=self._unplanned_bytes,
            num_steps=self._num_steps,
            step_seconds=self._step_seconds,
            num_images_encoded=self._encoder.num_images,
            num_image_tokens_encoded=self._encoder.num_tokens,
            encode_seconds=self._encoder.encode_seconds,
            encode_batches=self._encoder.num_batches,
            graphs={graphs.family: graphs.counts for graphs in self._graphs},
        )
        self._scheduler.write_stats(stats)
        return stats
