"""What happens to every request whatever its route: an id, a count, a log line. Pure ASGI: streams pass untouched."""

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.lifecycle import Lifecycle
from server.metrics import HANDLERS, Metrics
from server.security import request_id_of

logger = logging.getLogger("server.access")

# nginx's number for a client that left before its answer; it is never sent.
CLIENT_CLOSED_REQUEST = 499
# Scraped and probed every few seconds: a line for each would drown the others.
QUIET_HANDLERS = frozenset(
    {"/metrics", "/health", "/health/live", "/health/ready", "/livez", "/readyz", "/web/status", "/web/{name}"}
)


class RequestContextMiddleware:
    """Adds `x-request-id` to every answer, and `connection: close` while draining; counts and logs by route template.

    The id is in `scope["state"]["request_id"]`. `root_path` is the prefix under which a proxy shows the server; it may
    strip it or not.
    """

    def __init__(self, app: ASGIApp, *, metrics: Metrics, lifecycle: Lifecycle, root_path: str = "") -> None:
        self._app = app
        self._metrics = metrics
        self._lifecycle = lifecycle
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        if self._root_path:
            scope["root_path"] = self._root_path
            if not scope["path"].startswith(self._root_path + "/"):
                scope["path"] = self._root_path + scope["path"]
        start = time.perf_counter()
        status = CLIENT_CLOSED_REQUEST

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                nonlocal status
                status = message["status"]
                headers = message.setdefault("headers", [])
                headers.append((b"x-request-id", request_id.encode("latin-1")))
                headers.append((b"openai-processing-ms", b"%d" % ((time.perf_counter() - start) * 1000)))
                if self._lifecycle.phase == "draining" and not any(key == b"connection" for key, _ in headers):
                    headers.append((b"connection", b"close"))
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            status = 500
            raise
        finally:
            route = scope.get("route")
            handler = getattr(route, "path_format", None) if route is not None else None
            handler = handler if handler in HANDLERS else "other"
            seconds = time.perf_counter() - start
            self._metrics.count_http(handler, status, seconds)
            logger.log(
                logging.DEBUG if handler in QUIET_HANDLERS and status < 400 else logging.INFO,
                "request",
                extra={
                    "request_id": request_id,
                    "method": scope["method"] if handler != "other" else None,
                    "handler": handler,
                    "status": status,
                    "seconds": round(seconds, 6),
                },
            )
