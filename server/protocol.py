"""uvicorn's HTTP protocol with a bound on the head of a request and on how long it may take. Knows bytes, no routes.

The parser below collects a header's value whatever its length, and waits for its end for ever.
"""

import asyncio
from http import HTTPStatus
from typing import Any, ClassVar

from prometheus_client import Counter
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.errors import ApiError, HeadersTooLargeError, InvalidRequestError
from server.metrics import Metrics
from server.security import new_request_id

# From the first byte of a request to the end of its head.
HEAD_TIMEOUT_SECONDS = 30.0


def bounded_protocol(max_header_bytes: int, metrics: Metrics) -> type[asyncio.Protocol]:
    """The protocol class for `uvicorn.Config(http=...)`, with its limit in bytes. Refusals are counted."""

    class BoundedHttpProtocol(_BoundedHttpProtocol):
        max_bytes = max_header_bytes
        rejected = metrics.rejected

    return BoundedHttpProtocol


class _BoundedHttpProtocol(HttpToolsProtocol):
    """Ends a connection with 431 once the line and headers (or trailers) of a request are longer than `max_bytes`, and
    without a word when a head does not end in time. What is no HTTP is a 400 in the shape of all errors."""

    max_bytes: ClassVar[int]
    rejected: ClassVar[dict[str, Counter]]

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        # Bytes since something ended: a head, a part of a body. Within one thing that grows they only grow too.
        self._num_pending = 0
        self._num_head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._num_pending += len(data)
        super().data_received(data)
        if self._num_pending > self.max_bytes and not self.transport.is_closing():
            self._end(HeadersTooLargeError(self.max_bytes))

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls when the parser, or one of the methods below, gives up."""
        if self._num_head_bytes > self.max_bytes:
            self._end(HeadersTooLargeError(self.max_bytes))
        else:
            self._end(InvalidRequestError("The request is not valid HTTP."))

    def on_message_begin(self) -> None:
        self._num_head_bytes = 0
        self._start_head_timer()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + len(": \r\n"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_head_timer()
        self._num_pending = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_pending = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_pending = 0
        super().on_message_complete()

    def _count(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > self.max_bytes:
            raise ValueError("the head is too large")  # ends the parser's work; `send_400_response` says why

    def _end(self, error: ApiError) -> None:
        self.rejected[error.reason].inc()
        if self.cycle is None or self.cycle.response_complete:
            body = error.body()
            head = (
                f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\nx-request-id: {new_request_id()}\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        # Else it came within a body: the answer to that request may have begun, and ends with the connection.
        self.transport.close()

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_SECONDS, self._on_head_timeout)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_head_timeout(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
