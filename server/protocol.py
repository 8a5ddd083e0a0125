"""uvicorn's HTTP protocol with bounds on the head of a request, on how long it may take, and on how long a client may
not read. Knows bytes, no routes.

The parser below collects a header's value whatever its length, and waits for its end for ever; so does its transport
for a client that does not read what is written. A client that ends only its own sending is answered, and so is one that
would rather speak another protocol.
"""

import asyncio
import contextlib
import fcntl
import socket
import struct
import sys
import termios
from http import HTTPStatus
from typing import Any, ClassVar

import httptools
from prometheus_client import Counter
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.errors import ApiError, HeadersTooLargeError, InvalidRequestError
from server.metrics import Metrics
from server.security import new_request_id
from server.settings import Settings

# From the first byte of a request to the end of its head.
HEAD_TIMEOUT_SECONDS = 30.0
# Key of the state in a request's scope: its client did not read, and was cut off.
STALLED = "stalled"

# The end of what a client sends looks the same whether it has left or waits for its answer. Whoever has left refuses
# what is written to him; so something is, that those who wait ignore (RFC 9110, 15.2), after this and then ever longer.
FIRST_PROBE_SECONDS = 0.05
PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"


def bounded_protocol(settings: Settings, metrics: Metrics) -> type[asyncio.Protocol]:
    """The protocol class for `uvicorn.Config(http=...)`, with its limits. Refusals are counted."""

    class BoundedHttpProtocol(_BoundedHttpProtocol):
        max_bytes = settings.max_header_bytes
        write_timeout_seconds = settings.write_timeout_seconds
        rejected = metrics.rejected

    return BoundedHttpProtocol


class _BoundedHttpProtocol(HttpToolsProtocol):
    """Ends a connection with 431 once the line and headers (or trailers) of a request are longer than `max_bytes`, and
    without a word when a head does not end in time, or nothing of an answer is read for `write_timeout_seconds`. What
    is no HTTP is a 400 in the shape of all errors, unless it comes behind a whole request: that one gets its answer."""

    max_bytes: ClassVar[int]
    write_timeout_seconds: ClassVar[float]
    rejected: ClassVar[dict[str, Counter]]

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        # Bytes since something ended: a head, a part of a body. Within one thing that grows they only grow too.
        self._num_pending = 0
        self._num_head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        # Bytes that waited to be read when the timer was started: fewer are progress, for nothing is added meanwhile.
        self._num_unread = 0
        self._write_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._is_half_closed = False
        # What comes is no HTTP, and nothing of it is looked at any more.
        self._is_deaf = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_write_timer()
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more. Returns whether it still gets an answer: to a request that came whole, in a version
        of HTTP in which we can find out that nobody is there."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body or cycle.scope["http_version"] != "1.1":
            return False
        self._is_half_closed = True
        if not cycle.response_started:
            cycle.keep_alive = False
        self._probe_later(FIRST_PROBE_SECONDS)
        return True

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_write_timer()

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_half_closed and (self.cycle is None or self.cycle.response_complete):
            self.transport.close()
        self._start_write_timer()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing() or self._is_deaf:
            return
        self._num_pending += len(data)
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("")
        if self._num_pending > self.max_bytes and not (self.transport.is_closing() or self._is_deaf):
            self._end(HeadersTooLargeError(self.max_bytes))

    def _decline_upgrade(self, rest: bytes) -> None:
        """Reads the request anew without its wish for another protocol, which is ours to ignore (RFC 9110, 7.8). The
        parser takes what follows such a head for that protocol's, and would lose the body: Java's client, for one,
        asks for HTTP/2 in front of each.

        Args:
            rest: what came behind the head.
        """
        method = self.parser.get_method()
        if method == b"CONNECT":
            self.send_400_response("")
            return
        lines = [b"%b %b HTTP/%b" % (method, self.url, self.parser.get_http_version().encode())]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
        self.data_received(b"\r\n".join((*lines, b"", rest)))

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
        if self.parser.should_upgrade():
            return  # the same head comes again, see `_decline_upgrade`
        self._stop_head_timer()
        self._num_pending = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_pending = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._num_pending = 0
        super().on_message_complete()

    def _count(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > self.max_bytes:
            raise ValueError("the head is too large")  # ends the parser's work; `send_400_response` says why

    def _end(self, error: ApiError) -> None:
        self.rejected[error.reason].inc()
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if not cycle.more_body:
                # The request that is being answered came whole; what is wrong comes behind it.
                cycle.keep_alive = False
                self._is_deaf = True
                return
            # Its own body is wrong. Too late for an answer that has begun, and no place for one behind another's.
            if cycle.response_started or self.pipeline:
                self.transport.close()
                return
            cycle.disconnected = True
            cycle.message_event.set()
        body = error.body()
        head = (
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\nx-request-id: {new_request_id()}\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
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

    def _start_write_timer(self) -> None:
        if self.transport.get_write_buffer_size() and self._write_timer is None:
            self._num_unread = self._count_unread()
            self._write_timer = self.loop.call_later(self.write_timeout_seconds, self._on_write_timeout)

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _on_write_timeout(self) -> None:
        self._write_timer = None
        if self._count_unread() < self._num_unread:
            self._start_write_timer()
            return
        if self.cycle is not None:
            self.cycle.scope["state"][STALLED] = True
        # The kernel drops what it holds for this client, too, instead of waiting for it.
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _count_unread(self) -> int:
        """Bytes written that the client has not taken, here and in the kernel. The latter lets us write more only once
        a third of its megabytes is gone: a slow reader would look like none."""
        num_bytes = self.transport.get_write_buffer_size()
        with contextlib.suppress(OSError):  # not every system tells of sockets
            queued = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
            num_bytes += int.from_bytes(queued, sys.byteorder)
        return num_bytes

    def _probe_later(self, seconds: float) -> None:
        self._probe_timer = self.loop.call_later(seconds, self._probe, seconds)

    def _probe(self, seconds: float) -> None:
        # Within an answer there is enough that is written, and between answers is no place for it.
        if self.transport.is_closing() or self.cycle is None or self.cycle.response_started or self.pipeline:
            return
        self.transport.write(PROBE)
        self._probe_later(2 * seconds)
