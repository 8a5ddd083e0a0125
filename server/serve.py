"""Runs the application in uvicorn: signals, drain, exit code. Knows no routes."""

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Generator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from runtime.client import EngineClient
from server.allocator import give_back_large_buffers
from server.app import create_app
from server.lifecycle import Lifecycle
from server.listener import ListenError, base_url, listen
from server.metrics_port import listen_for_metrics
from server.protocol import bounded_protocol
from server.service import Service
from server.settings import Settings

logger = logging.getLogger(__name__)

# After the drain every answer is out; what is left are idle keep-alive connections.
GRACEFUL_SHUTDOWN_SECONDS = 3

# Longer than the 60 s after which usual proxies drop an idle connection, so that it is never us who drop it first.
KEEP_ALIVE_SECONDS = 75


class DrainingServer(uvicorn.Server):
    """uvicorn stops listening at the first signal. This one goes on, refusing requests, until the drain is over; a
    second signal cuts off what is in flight."""

    def __init__(self, config: uvicorn.Config, lifecycle: Lifecycle, drain_timeout_seconds: float) -> None:
        super().__init__(config)
        self._lifecycle = lifecycle
        self._drain_timeout_seconds = drain_timeout_seconds
        self._drain: asyncio.Task[None] | None = None

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        # uvicorn's own raises the signal again at the end, and the exit code would not be 0.
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)
        for number in signals:
            loop.add_signal_handler(number, self._on_signal)
        ending = loop.create_task(self._end_with_lifecycle())
        try:
            yield
        finally:
            ending.cancel()
            for number in signals:
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        seconds = self._drain_timeout_seconds
        if self._drain is not None:
            logger.warning("second signal: not waiting for requests in flight")
            self._drain.cancel()
            seconds = 0
        logger.info("draining", extra={"phase": "draining", "seconds": seconds})
        self._drain = asyncio.get_running_loop().create_task(self._lifecycle.drain(seconds))

    async def _end_with_lifecycle(self) -> None:
        await self._lifecycle.ended.wait()
        if self._lifecycle.phase == "dead":
            # Requests in flight are writing their errors.
            await asyncio.sleep(0.2)
        self.should_exit = True


def serve(client: EngineClient, settings: Settings) -> int:
    """Serves until a signal or the engine's death. Returns the exit code of the process: 0 after a drain, else 1.
    Ports that cannot be had are told on standard error before the engine is started."""
    listeners: list[socket.socket] = []
    try:
        listeners = listen(settings.host, settings.port)
        metrics_listeners = listen_for_metrics(settings)
    except ListenError as error:
        for listener in listeners:
            listener.close()
        print(f"fovea serve: {error}", file=sys.stderr)
        return 1
    give_back_large_buffers()
    app = create_app(client, settings)
    service = app.state.service
    assert isinstance(service, Service)
    service.metrics_sockets = metrics_listeners
    config = uvicorn_config(app, settings)
    server = DrainingServer(config, service.lifecycle, settings.drain_timeout_seconds)
    service.url = base_url(settings.host, listeners[0].getsockname()[1])
    logger.info("listening on %s; loading the model", service.url)
    try:
        server.run(sockets=listeners)
    finally:
        for listener in listeners:
            listener.close()
    return 1 if service.lifecycle.failure is not None or not server.started else 0


def uvicorn_config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    """How the application is served; tests serve it in the same way."""
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http=bounded_protocol(settings, app.state.service.metrics),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        # Nothing here depends on a client's address or scheme, and so nothing has to be believed of a proxy.
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=GRACEFUL_SHUTDOWN_SECONDS,
    )
