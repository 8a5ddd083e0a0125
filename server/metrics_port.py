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

from server.service import Service


class BesideServer(uvicorn.Server):
    """A server beside another one, whose signals it leaves alone."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@asynccontextmanager
async def metrics_listener(service: Service) -> AsyncGenerator[None, None]:
    """Listens while the block runs, if the settings name a port. `service.metrics_port` is then the real one.

    Raises:
        OSError: the port is taken.
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
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.create_server((settings.host, settings.metrics_port), family=family) as listener:
        service.metrics_port = listener.getsockname()[1]
        server = BesideServer(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield
        finally:
            server.should_exit = True
            await task
