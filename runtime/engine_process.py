"""The engine's process: builds the engine, then takes messages, steps, and sends outputs. The server's process starts
it with `python -m runtime.engine_process`; a person never does.

The loop is one thread: while there is work it looks at the socket without waiting, otherwise it sleeps there. The
process ends on `Shutdown`, when the server's process is gone, or when the engine is beyond use. SIGINT and SIGTERM,
which a terminal or a supervisor may send to the whole group, are ignored: the server drains first and then says so.
"""

import argparse
import contextlib
import gc
import importlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from runtime.config import EngineConfig
from runtime.device_errors import raise_if_device_lost
from runtime.log import configure_logging
from runtime.messages import (
    Aborted,
    AbortRequest,
    AddRequest,
    FromEngine,
    Heartbeat,
    MessageError,
    Outputs,
    Pixels,
    Ready,
    Shutdown,
    StartFailed,
    decode_to_engine,
    encode,
)
from runtime.request import Request, RequestOutput
from runtime.stats import EngineInfo, EngineStats
from runtime.threads import switch_often, wait_without_spinning

log = logging.getLogger("runtime.engine_process")

DEFAULT_FACTORY = "runtime.startup:build"

# Snapshots: no more often than this while busy (the server's metrics are scraped every few seconds) ...
MIN_HEARTBEAT_SECONDS = 0.05
# ... and no less often than this in idleness, well within the second that the client promises.
IDLE_HEARTBEAT_SECONDS = 0.5

EXIT_START_FAILED = 1
EXIT_ENGINE_DIED = 2
EXIT_PARENT_GONE = 3


class EngineLike(Protocol):
    """An engine as the loop sees it: `runtime.engine.Engine`, or a test's."""

    @property
    def info(self) -> EngineInfo: ...
    @property
    def has_work(self) -> bool: ...
    def add(self, request: Request, pixels: Sequence[Pixels]) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> list[RequestOutput]: ...
    def stats(self) -> EngineStats: ...


class EngineLoop:
    """Serves one engine on one socket until it is told to stop."""

    def __init__(self, engine: EngineLike, socket: "zmq.Socket[bytes]") -> None:
        self._engine = engine
        self._socket = socket
        self._is_stopping = False
        self._was_busy = False
        self._heartbeat_at = 0.0

    def run(self) -> None:
        """Returns after `Shutdown`."""
        while not self._is_stopping:
            self._receive()
            if self._engine.has_work:
                self._was_busy = True
                outputs = self._engine.step()
                if outputs:
                    self._send(Outputs(outputs))
            self._send_heartbeat_if_due()

    def _receive(self) -> None:
        """Takes all messages that are there; waits for one only when there is no work."""
        wait_seconds = 0.0
        if not self._engine.has_work:
            wait_seconds = max(0.0, self._heartbeat_at + IDLE_HEARTBEAT_SECONDS - time.monotonic())
        if not self._socket.poll(timeout=int(wait_seconds * 1000) + (wait_seconds > 0)):
            return
        while not self._is_stopping:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._handle([frame.buffer for frame in frames])

    def _handle(self, frames: list[memoryview]) -> None:
        try:
            message, pixels = decode_to_engine(frames)
        except MessageError as error:
            log.error("a message was malformed: %s", error)
            if error.request_id is not None:
                self._refuse(error.request_id, str(error), is_rejected=False)
            return
        match message:
            case AddRequest(request=request):
                self._add(request, pixels)
            case AbortRequest(request_id=request_id):
                self._engine.abort(request_id)
                self._send(Aborted(request_id))
            case Shutdown():
                self._is_stopping = True

    def _add(self, request: Request, pixels: Sequence[Pixels]) -> None:
        try:
            self._engine.add(request, pixels)
        except ValueError as error:
            self._refuse(request.request_id, str(error), is_rejected=True)
        except Exception as error:
            raise_if_device_lost(error)
            log.exception("a request could not be added", extra={"request_id": request.request_id})
            self._refuse(request.request_id, type(error).__name__, is_rejected=False)

    def _refuse(self, request_id: str, error: str, *, is_rejected: bool) -> None:
        output = RequestOutput(request_id=request_id, finish_reason="error", error=error, is_rejected=is_rejected)
        self._send(Outputs([output]))

    def _send_heartbeat_if_due(self) -> None:
        age = time.monotonic() - self._heartbeat_at
        has_just_become_idle = self._was_busy and not self._engine.has_work
        if has_just_become_idle:
            self._was_busy = False
        elif age < (MIN_HEARTBEAT_SECONDS if self._was_busy else IDLE_HEARTBEAT_SECONDS):
            return
        self._heartbeat_at = time.monotonic()
        self._send(Heartbeat(self._engine.stats()))

    def _send(self, message: FromEngine) -> None:
        self._socket.send_multipart(encode(message))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the engine's process; the exit status says how it ended (see `EXIT_*`)."""
    parser = argparse.ArgumentParser(prog="runtime.engine_process", description=__doc__)
    parser.add_argument("--address", required=True, help="ipc:// address of the server's socket")
    parser.add_argument("--factory", default=DEFAULT_FACTORY, help="module:function that builds an engine of a config")
    parser.add_argument("--log-level", default="info", help="least severe lines logged")
    parser.add_argument("--log-format", choices=("json", "text"), default="json", help="form of the lines logged")
    options = parser.parse_args(arguments)
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, signal.SIG_IGN)
    configure_logging(options.log_level, options.log_format)
    wait_without_spinning()
    switch_often()
    config_line = _read_line(sys.stdin.fileno())
    socket_path = Path(options.address.removeprefix("ipc://"))
    threading.Thread(target=_die_with_parent, args=(sys.stdin.fileno(), socket_path), daemon=True).start()
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        # No limit: what is on the way is bounded by the requests in flight, and a step must not wait for the server.
        socket.set_hwm(0)
        socket.linger = 1000
        socket.connect(options.address)
        return _serve(socket, options.factory, config_line)


def _serve(socket: "zmq.Socket[bytes]", factory: str, config_line: bytes) -> int:
    try:
        engine = _factory(factory)(msgspec.json.decode(config_line, type=EngineConfig))
    except Exception as error:
        is_for_people = isinstance(error, ValueError)
        message = str(error) if is_for_people else f"{type(error).__name__}: {error}"
        if not is_for_people:  # what is for people they are told by the process that started this one
            log.error("the engine cannot start: %s", message, exc_info=error)
        socket.send_multipart(encode(StartFailed(message)))
        return EXIT_START_FAILED
    # What the start made stays: the collector need not look at it again during steps.
    gc.collect()
    gc.freeze()
    socket.send_multipart(encode(Ready(engine.info)))
    try:
        EngineLoop(engine, socket).run()
    except Exception:
        log.exception("the engine died")
        return EXIT_ENGINE_DIED
    return 0


def _factory(name: str) -> Callable[[EngineConfig], EngineLike]:
    module, _, function = name.partition(":")
    factory: Callable[[EngineConfig], EngineLike] = getattr(importlib.import_module(module), function)
    return factory


def _read_line(descriptor: int) -> bytes:
    """The first line, read without a buffer that would swallow what the watching thread waits for."""
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(descriptor, 65536)
        if not piece:
            raise SystemExit(EXIT_PARENT_GONE)
        line += piece
    return line


def _die_with_parent(descriptor: int, socket_path: Path) -> None:
    """Ends the process when the pipe's other end is closed, which the kernel does however the server dies, and tidies
    up after a server that had no time to: its socket and the directory made for it.

    A thread, so that it works while weights load or a step runs too; and not PR_SET_PDEATHSIG, which the end of the
    server's *thread* that started us would trigger.
    """
    while os.read(descriptor, 1):
        pass
    with contextlib.suppress(OSError):
        socket_path.unlink(missing_ok=True)
        socket_path.parent.rmdir()
    os._exit(EXIT_PARENT_GONE)


if __name__ == "__main__":
    status = main()
    if status == EXIT_ENGINE_DIED:
        # A lost device may keep the destructors of what lies on it from ever ending.
        logging.shutdown()
        os._exit(status)
    sys.exit(status)
