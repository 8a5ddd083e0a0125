"""The engine in a process of its own, as the server's event loop sees it. Imports no torch and knows no HTTP.

One task reads what the engine sends and hands each output to the generator that waits for it; another waits for the
child's end. The engine's death is an error for every generator at once: nobody waits on a dead engine.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import zmq
import zmq.asyncio
from numpy.typing import NDArray

from runtime.client import EngineDeadError, EngineState
from runtime.config import EngineConfig
from runtime.log import LogFormat
from runtime.messages import (
    Aborted,
    AbortRequest,
    AddRequest,
    FromEngine,
    Heartbeat,
    MessageError,
    Outputs,
    Ready,
    Shutdown,
    StartFailed,
    ToEngine,
    decode_from_engine,
    encode,
)
from runtime.request import Request, RequestOutput
from runtime.request_budget import RequestBudget, request_bytes
from runtime.stats import EngineInfo, EngineStats
from runtime.threads import keep_numpy_on_one_thread

log = logging.getLogger(__name__)

# Where the child finds this very package.
PACKAGE_ROOT = str(Path(__file__).resolve().parent.parent)

# What a socket's path may have on Linux (sockaddr_un), less the closing zero.
MAX_SOCKET_PATH_BYTES = 107

# After the child's end its last messages may still be on the way through the socket's thread.
LAST_MESSAGES_SECONDS = 0.2
# How long a child that was told to end may take to do so by itself.
SHUTDOWN_SECONDS = 5.0


class OutputQueue:
    """One request's outputs, from the reading task to one generator. Several may wait; the generator takes all."""

    __slots__ = ("_error", "_outputs", "_waiter")

    def __init__(self) -> None:
        self._outputs: list[RequestOutput] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: str | None = None

    def put(self, output: RequestOutput) -> None:
        self._outputs.append(output)
        self._wake()

    def fail(self, reason: str) -> None:
        """Lets `take` raise once what has arrived is taken."""
        self._error = reason
        self._wake()

    async def take(self) -> list[RequestOutput]:
        """All outputs that have arrived, at least one.

        Raises:
            EngineDeadError: there are none, and none will come.
        """
        while not self._outputs:
            if self._error is not None:
                raise EngineDeadError(self._error)
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        outputs, self._outputs = self._outputs, []
        return outputs

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class ProcessEngineClient:
    """An `EngineClient` that starts `runtime.engine_process` and talks to it through a socket in a private directory.

    Args:
        config: what the engine is told.
        factory: `module:function` that builds the engine in the child, for tests; `None`: the real one.
        log_format: form of the child's log lines, so that a terminal shows one form only.
        shutdown_seconds: how long the child may take to end by itself.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        factory: str | None = None,
        log_format: LogFormat = "json",
        shutdown_seconds: float = SHUTDOWN_SECONDS,
    ) -> None:
        self._config = config
        self._factory = factory
        self._log_format = log_format
        self._shutdown_seconds = shutdown_seconds
        self._state: EngineState = "starting"
        self._info: EngineInfo | None = None
        self._stats = EngineStats()
        self._heartbeat_at = time.monotonic()
        self._queues: dict[str, OutputQueue] = {}
        self._budget = RequestBudget()
        # Requests that wait for room in the budget, in order.
        self._held_back: deque[asyncio.Event] = deque()
        self._process: asyncio.subprocess.Process | None = None
        self._directory: Path | None = None
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._start_is_settled = asyncio.Event()
        self._has_died = asyncio.Event()
        self._death: str | None = None
        self._is_closing = False
        self._close_lock = asyncio.Lock()

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def info(self) -> EngineInfo | None:
        return self._info

    @property
    def stats(self) -> EngineStats:
        """Those that wait for room in the engine wait for the engine, as those do that wait in it."""
        if not self._held_back:
            return self._stats
        return msgspec.structs.replace(self._stats, num_waiting=self._stats.num_waiting + len(self._held_back))

    @property
    def pid(self) -> int | None:
        """Process id of the engine; `None` before `start`."""
        return None if self._process is None else self._process.pid

    @property
    def seconds_since_heartbeat(self) -> float:
        return time.monotonic() - self._heartbeat_at

    async def start(self) -> None:
        """Starts the process and returns when it is ready.

        Raises:
            EngineDeadError: it cannot become so; says why. Everything is cleaned up.
        """
        assert self._process is None, "started before"
        try:
            await self._spawn()
            await self._start_is_settled.wait()
        except (OSError, zmq.ZMQError) as error:
            self._die(f"the engine process cannot be started: {error}")
        except BaseException:
            await self.shutdown()
            raise
        if self._state != "ready":
            await self._close(is_graceful=False)
            raise EngineDeadError(self._death or "the engine was shut down")

    async def generate(
        self, request: Request, pixels: Sequence[NDArray[np.uint8]]
    ) -> AsyncGenerator[RequestOutput, None]:
        """See `EngineClient.generate`. The arrays are not copied: they must not change until the first output. While
        the requests in the engine hold all that its memory plan has for them, a new one waits here.

        Raises:
            EngineDeadError: the engine is not ready, or dies before the last output.
            ValueError: the id is in use, or the request cannot be encoded.
        """
        if self._state != "ready":
            raise EngineDeadError(self._death or f"the engine is not ready (state {self._state!r})")
        if request.request_id in self._queues:
            raise ValueError(f"request_id {request.request_id!r} is in use")
        queue = self._queues[request.request_id] = OutputQueue()
        is_in_engine = False
        try:
            await self._take_room(request.request_id, request_bytes(request, pixels))
            try:
                self._send(AddRequest(request), pixels)
            except ValueError:
                self._release(request.request_id)
                raise
            is_in_engine = True
            while is_in_engine:
                for output in await queue.take():
                    is_in_engine = output.finish_reason is None
                    yield output
        finally:
            del self._queues[request.request_id]
            if is_in_engine and self._state == "ready":
                self._budget.abort(request.request_id)
                self._send(AbortRequest(request.request_id))

    async def _take_room(self, request_id: str, num_bytes: int) -> None:
        """Waits its turn until the engine has room for the request.

        Raises:
            EngineDeadError: the engine died meanwhile.
        """
        if not self._held_back and self._budget.take(request_id, num_bytes):
            return
        turn = asyncio.Event()
        self._held_back.append(turn)
        try:
            while self._held_back[0] is not turn or not self._budget.take(request_id, num_bytes):
                turn.clear()
                await turn.wait()
                if self._state != "ready":
                    raise EngineDeadError(self._death or "the engine was shut down")
        finally:
            self._held_back.remove(turn)
            self._wake_next()

    def _release(self, request_id: str) -> None:
        self._budget.release(request_id)
        self._wake_next()

    def _wake_next(self) -> None:
        if self._held_back:
            self._held_back[0].set()

    async def wait_dead(self) -> str:
        await self._has_died.wait()
        assert self._death is not None
        return self._death

    async def shutdown(self) -> None:
        """Ends the engine and waits for it: it may end by itself, then it is killed. Safe to call twice and in any
        state. Requests in flight end with `EngineDeadError`."""
        await self._close(is_graceful=self._state == "ready")

    async def _spawn(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="fovea-"))
        path = self._directory / "engine.sock"
        if len(bytes(path)) > MAX_SOCKET_PATH_BYTES:
            raise OSError(
                f"socket path {path} is longer than {MAX_SOCKET_PATH_BYTES} bytes: set TMPDIR to a shorter one"
            )
        address = f"ipc://{path}"
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [PACKAGE_ROOT, os.environ.get("PYTHONPATH")]))
        keep_numpy_on_one_thread(environment)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        # No limit: what is on the way is bounded by the requests in flight, which the server admits.
        self._socket.set_hwm(0)
        self._socket.bind(address)
        self._process = await asyncio.create_subprocess_exec(
            # -P and the path: the child runs this very package, whatever lies in the current directory.
            *[sys.executable, "-P", "-m", "runtime.engine_process", "--address", address],
            *(["--factory", self._factory] if self._factory else []),
            *["--log-level", logging.getLevelName(logging.getLogger().getEffectiveLevel()).lower()],
            *["--log-format", self._log_format],
            stdin=asyncio.subprocess.PIPE,
            env=environment,
        )
        # The pipe stays open for as long as this process lives: its end tells the engine that nobody is here any more.
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(self._config) + b"\n")
        reader = asyncio.create_task(self._read(self._socket))
        self._tasks = [reader, asyncio.create_task(self._watch(self._process, reader))]

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        """Hands on what the engine sends."""
        try:
            while True:
                frames = await socket.recv_multipart()
                try:
                    message = decode_from_engine(frames)
                except MessageError as error:
                    log.error("the engine sent no message: %s", error)
                    continue
                self._heartbeat_at = time.monotonic()
                self._handle(message)
        except Exception as error:
            # Without a reader nobody would ever get an answer: as good as dead.
            log.exception("reading from the engine failed")
            self._die(f"reading from the engine failed: {type(error).__name__}")

    def _handle(self, message: FromEngine) -> None:
        match message:
            case Outputs(outputs=outputs):
                queues = self._queues
                for output in outputs:
                    if output.finish_reason is not None:
                        self._release(output.request_id)
                    # Those of a request whose generator was closed have no queue any more.
                    queue = queues.get(output.request_id)
                    if queue is not None:
                        queue.put(output)
            case Aborted(request_id=request_id):
                self._budget.release_aborted(request_id)
                self._wake_next()
            case Heartbeat(stats=stats):
                self._stats = stats
            case Ready(info=info):
                self._info = info
                self._budget.max_bytes = info.max_request_bytes
                if self._state == "starting":
                    self._state = "ready"
                self._start_is_settled.set()
            case StartFailed(message=reason):
                self._die(reason)

    async def _watch(self, process: asyncio.subprocess.Process, reader: asyncio.Task[None]) -> None:
        """Waits for the child's end, which is the engine's death unless it was asked for."""
        status = await process.wait()
        await asyncio.wait([reader], timeout=LAST_MESSAGES_SECONDS)
        if not self._is_closing:
            self._die(f"the engine process {_how_it_ended(status)}")

    def _die(self, reason: str) -> None:
        """The engine is gone by itself: tells everybody who waits. The first reason counts."""
        if self._death is not None or self._is_closing:
            return
        self._death = reason
        self._has_died.set()
        self._fail_requests(reason)

    def _fail_requests(self, reason: str) -> None:
        self._state = "dead"
        self._start_is_settled.set()
        for queue in self._queues.values():
            queue.fail(reason)
        for turn in self._held_back:
            turn.set()

    async def _close(self, *, is_graceful: bool) -> None:
        self._is_closing = True
        self._fail_requests("the engine was shut down")
        async with self._close_lock:
            await self._end_process(is_graceful=is_graceful)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._tasks = []
            if self._socket is not None:
                self._socket.close(linger=0)
                self._socket = None
            if self._context is not None:
                self._context.term()
                self._context = None
            if self._directory is not None:
                shutil.rmtree(self._directory, ignore_errors=True)
                self._directory = None

    async def _end_process(self, *, is_graceful: bool) -> None:
        process = self._process
        if process is None:
            return
        if process.returncode is None and is_graceful:
            self._send(Shutdown())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), self._shutdown_seconds)
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if process.stdin is not None:
            process.stdin.close()

    def _send(self, message: ToEngine, pixels: Sequence[NDArray[np.uint8]] = ()) -> None:
        """Queues a message, at once and in order: the socket has no limit, so nothing is to be awaited."""
        assert self._socket is not None
        self._socket.send_multipart(encode(message, pixels), copy=False)


def _how_it_ended(status: int) -> str:
    if status < 0:
        try:
            return f"was killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"was killed by signal {-status}"
    return f"ended with status {status}"
