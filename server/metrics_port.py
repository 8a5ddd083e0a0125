"""Serves the metrics on a port of their own, so that the API's port can be shown to the world without them.

Knows uvicorn; the metrics are those of the service.
"""

import asyncio
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from server.listener import listen
from server.service import Service
from server.settings import Settings


class BesideServer(uvicorn.Server):
    """A server beside another one, whose signals it leaves alone."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@asynccontextmanager
async def metrics_listener(service: Service) -> AsyncGenerator[None, None]:
    """Listens while the block runs, if the settings name a port. `service.metrics_port` is then the real one.

    Raises:
        ListenError: the port is taken, and nobody opened `service.metrics_sockets` before.
    """
    settings = service.settings
    if settings.metrics_port is None:
        yield
        return

    async def exposition(request: Request) -> Response:
        return Response(service.metrics.exposition(), headers={"content-type": CONTENT_TYPE_LATEST})

    config = uvicorn.Config(
        Starlette(routes=[Route("/metrics", exposition)]),
        http="httptools", ws="none", lifespan="off", log_config=None, access_log=False, server_header=False,
        proxy_headers=False, timeout_graceful_shutdown=1,
    )  # fmt: skip
    listeners = service.metrics_sockets or listen_for_metrics(settings)
    service.metrics_port = listeners[0].getsockname()[1]
    server = BesideServer(config)
    task = asyncio.create_task(server.serve(sockets=listeners))
    try:
        yield
    finally:
        server.should_exit = True
        await task
        for listener in listeners:
            listener.close()


def listen_for_metrics(settings: Settings) -> list[socket.socket]:
    """Sockets on the metrics' own port; none without one.

    Raises:
        ListenError: the port is taken or forbidden.
    """
    if settings.metrics_port is None:
        return []
    return listen(settings.host, settings.metrics_port, knob="--metrics-port")
