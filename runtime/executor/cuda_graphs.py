"""CUDA graphs behind the graph set: capture into one private pool a family, and what each bucket took of the device.

Knows the order of capture and readings, and what is left of a capture that failed; knows no buckets and no model.

    warm up | settle, read | capture, replay once | settle, read        taken = second reading - first
                                                                         of it: the pool's new segments
                                                                                the driver (the difference)

A capture that fails leaves no live block. The segments that it took stay in the pool, where the next capture finds
them; they are counted in the bucket that took them. torch up to 2.13 keeps the pool of a capture that was invalidated
for the life of the process (pytorch/pytorch#190308): its segments are counted, the graph object is kept, since
torch's allocators still refer to it, and later captures take a new pool: before 2.12 the allocator of pinned memory
thinks that it still records into the old one (#180395), and nothing public tells it otherwise.
"""

import contextlib
import ctypes
import gc
import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from runtime.executor.graph_backend import CaptureError

log = logging.getLogger(__name__)

# Calls before a capture: kernels load and workspaces are made in the first, autotuners settle in the second.
NUM_WARM_UPS = 2

PoolId = tuple[int, int]


class Replayable(Protocol):
    """A graph that the device holds."""

    def replay(self) -> None: ...

    def reset(self) -> None:
        """Gives back what the device holds for it."""
        ...


class CudaCapture(Protocol):
    """What a device does to capture; torch's on a GPU, a fake's in tests."""

    def new_pool(self) -> PoolId: ...

    def bootstrap(self) -> None:
        """A first capture of next to nothing, which loads what every later one needs."""
        ...

    def warm_up(self, forward: Callable[[], Tensor], count: int) -> None:
        """Runs `forward` on the stream that captures use."""
        ...

    def capture(self, forward: Callable[[], Tensor], pool: PoolId) -> tuple[Replayable, Tensor]:
        """One captured call of `forward` and its static output.

        Raises:
            Exception: whatever went wrong. Nothing is being captured any more then.
        """
        ...

    def is_reusable(self, pool: PoolId) -> bool:
        """Whether another capture may go into the pool: not after one of its captures was invalidated."""
        ...

    def pool_segments(self, pool: PoolId) -> tuple[int, int]:
        """Bytes of the pool's segments, and how many of them belong to live blocks."""
        ...

    def resting_bytes(self) -> int:
        """What this process uses of the device at rest."""
        ...


class CudaGraphBackend:
    """One family's backend. `is_measuring` false: bytes are those of the pool's segments; the device is not read."""

    name: Literal["cuda"] = "cuda"
    replays_eagerly = False

    def __init__(self, device: CudaCapture, *, is_measuring: bool = True) -> None:
        self._device = device
        self._is_measuring = is_measuring
        self._pool: PoolId | None = None
        self._pools: list[PoolId] = []
        self._num_live = 0  # graphs in the present pool
        # What the bootstrap took of the driver; the first bucket that is captured answers for it.
        self._bootstrap_bytes = 0

    @property
    def segment_bytes(self) -> int:
        """The pools' segments now; 0 once all graphs are released and nothing was retained."""
        return sum(self._device.pool_segments(pool)[0] for pool in self._pools)

    def capture(self, forward: Callable[[], Tensor], static_tensors: Sequence[Tensor]) -> "CudaGraph":
        """Captures `forward` as the module's picture says.

        Raises:
            CaptureError: the capture, its first replay, or the bootstrap before the first one failed.
        """
        pool = self._bootstrapped()
        segments_before, live_before = self._device.pool_segments(pool)
        graph: Replayable | None = None
        output: Tensor | None = None
        problem: str | None = None
        try:
            self._device.warm_up(forward, NUM_WARM_UPS)
            used_before = self._read()
            segments_before, live_before = self._device.pool_segments(pool)
            graph, output = self._device.capture(forward, pool)
            graph.replay()
            used = self._read()
        except Exception as error:  # the graph set decides what a failure costs
            problem = _first_line(error)
            # The frames of the failed forward hold its tensors, which would stay live blocks of the pool.
            _clear(error)
        if problem is not None or graph is None or output is None:
            _dropped(graph)
            graph = output = None
            raise self._failure(problem or "no output", pool, segments_before, live_before)
        self._num_live += 1
        segments = self._device.pool_segments(pool)[0] - segments_before
        taken = used - used_before if self._is_measuring else segments
        if taken < segments:
            # Somebody else's memory moved, or the driver gave some back: the segments are certain.
            log.info("a capture took less than its segments", extra={"taken_bytes": taken, "segment_bytes": segments})
        driver = max(taken - segments, 0) + self._bootstrap_bytes
        self._bootstrap_bytes = 0
        return CudaGraph(
            graph,
            output,
            graph_bytes=segments + driver,
            driver_bytes=driver,
            retained_bytes=lambda: self._released(pool, segments_before),
        )

    def _bootstrapped(self) -> PoolId:
        if self._pool is not None:
            return self._pool
        problem: str | None = None
        try:
            used_before = self._read()
            self._device.bootstrap()
            self._bootstrap_bytes = max(0, self._read() - used_before)
            self._pool = self._new_pool()
        except Exception as error:
            problem = _first_line(error)
            # As below; and raised outside of this block, or the new error would keep this one as its context.
            _clear(error)
        if self._pool is None:
            raise CaptureError(f"capture could not be set up: {problem}")
        return self._pool

    def _failure(self, problem: str, pool: PoolId, segments_before: int, live_before: int) -> CaptureError:
        """The error to raise, once nothing of the failed capture lives."""
        retained_bytes = self._retained(pool, segments_before)
        live = self._device.pool_segments(pool)[1]
        if live > live_before:
            log.error("a failed capture left live blocks", extra={"live_bytes": live - live_before})
        if not self._device.is_reusable(pool):
            self._leave_pool(pool)
        self._leave_empty_pool(pool)
        return CaptureError(problem, retained_bytes=retained_bytes)

    def _released(self, pool: PoolId, segments_before: int) -> int:
        retained_bytes = self._retained(pool, segments_before)
        if pool == self._pool:
            self._num_live -= 1
        self._leave_empty_pool(pool)
        return retained_bytes

    def _leave_empty_pool(self, pool: PoolId) -> None:
        """torch refuses captures into a pool that has lost its last graph as long as a block of it is left."""
        if self._num_live == 0:
            self._leave_pool(pool)

    def _leave_pool(self, pool: PoolId) -> None:
        """Later captures go into another one."""
        if pool == self._pool:
            self._pool, self._num_live = self._new_pool(), 0

    def _new_pool(self) -> PoolId:
        pool = self._device.new_pool()
        self._pools.append(pool)
        return pool

    def _retained(self, pool: PoolId, segments_before: int) -> int:
        """Segments that the pool keeps of what came after `segments_before`."""
        gc.collect()
        with contextlib.suppress(Exception):  # a device in trouble says so at the next step
            self._device.resting_bytes()
        return max(0, self._device.pool_segments(pool)[0] - segments_before)

    def _read(self) -> int:
        return self._device.resting_bytes() if self._is_measuring else 0


class CudaGraph:
    """What `CudaGraphBackend` captured."""

    def __init__(
        self,
        graph: Replayable,
        output: Tensor,
        *,
        graph_bytes: int,
        driver_bytes: int,
        retained_bytes: Callable[[], int],
    ) -> None:
        """`retained_bytes`: asked after the release, what the pool keeps of this graph's segments."""
        self._captured: tuple[Replayable, Tensor] | None = (graph, output)
        self._retained_bytes = retained_bytes
        self.graph_bytes = graph_bytes
        self.driver_bytes = driver_bytes

    # A capture records; the replay after it is the first run.
    captured_output: Tensor | None = None

    def replay(self) -> Tensor:
        assert self._captured is not None, "replay of a released graph"
        graph, output = self._captured
        graph.replay()
        return output

    def release(self) -> None:
        """Destroys the graph. `graph_bytes` is then what the pool keeps of its segments: the pool goes with its last
        graph."""
        if self._captured is None:
            return
        self._captured[0].reset()
        self._captured = None
        self.graph_bytes, self.driver_bytes = self._retained_bytes(), 0


class TorchCapture:
    """Captures through torch on one stream. Drives capture_begin and capture_end itself: `torch.cuda.graph` leaves the
    capture's stream current when capture_end raises."""

    def __init__(self, device: torch.device, resting_bytes: Callable[[], int]) -> None:
        self._device = device
        self._cuda: Any = torch.cuda
        self._stream = self._cuda.Stream(device)
        self.resting_bytes = resting_bytes
        self._invalidated: set[PoolId] = set()

    def new_pool(self) -> PoolId:
        pool: PoolId = torch.cuda.graph_pool_handle()
        return pool

    def bootstrap(self) -> None:
        cell = torch.zeros(1, device=self._device)
        self.warm_up(lambda: cell + 1, 1)
        graph, _ = self.capture(lambda: cell + 1, self.new_pool())
        graph.replay()
        torch.cuda.synchronize(self._device)
        graph.reset()

    def warm_up(self, forward: Callable[[], Tensor], count: int) -> None:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(count):
                forward()
        current.wait_stream(self._stream)
        torch.cuda.synchronize(self._device)

    def capture(self, forward: Callable[[], Tensor], pool: PoolId) -> tuple[Replayable, Tensor]:
        graph: Any = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        try:
            with _collector_paused(), torch.cuda.stream(self._stream):
                # Other threads of this process may allocate meanwhile: only this one's calls are checked.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    output = forward()
                except BaseException:
                    with contextlib.suppress(RuntimeError):
                        self._end(graph, pool)
                    raise
                self._end(graph, pool)
        except BaseException:
            self._abandon(graph, pool)
            raise
        return graph, output

    def is_reusable(self, pool: PoolId) -> bool:
        return pool not in self._invalidated

    def _end(self, graph: Any, pool: PoolId) -> None:
        try:
            graph.capture_end()
        except RuntimeError:
            self._invalidated.add(pool)
            raise

    def pool_segments(self, pool: PoolId) -> tuple[int, int]:
        total = live = 0
        for segment in self._cuda.memory_snapshot():
            if tuple(segment["segment_pool_id"]) == pool:
                total += segment["total_size"]
                live += segment["allocated_size"]
        return total, live

    def _abandon(self, graph: Any, pool: PoolId) -> None:
        """Ends what a failed capture left open in torch's allocator, which would refuse to empty its cache."""
        end_allocate = getattr(torch._C, "_cuda_endAllocateToPool", None)
        if end_allocate is not None:
            # It raises when the pool is closed already, as after most failures.
            with contextlib.suppress(RuntimeError):
                end_allocate(self._device.index or 0, pool)
        with contextlib.suppress(RuntimeError):
            graph.reset()
        if self.is_reusable(pool):
            return  # the capture ended, and torch let go of it
        # For the life of the process, longer than any object's of ours: one more reference than there are.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(graph))
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize(self._device)


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Objects that a collection happens to find give memory back to the driver, which may invalidate a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _first_line(error: Exception) -> str:
    """What went wrong, without the advice of how to debug it that CUDA's errors bring along."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _dropped(graph: Replayable | None) -> None:
    if graph is not None:
        with contextlib.suppress(RuntimeError):
            graph.reset()


def _clear(error: BaseException | None) -> None:
    """Empties the frames of an error and of those that it came from."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
