"""The load generator's HTTP/1.1 connection: sends a request and keeps what comes of the answer, with its time.

Knows no events and no JSON. What a general client does with each chunk takes time of the machine from the server that
is measured (docs/decisions.md), so this one looks at nothing before the load is over.
"""

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httptools

JSON_POST = "POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\naccept: */*\r\n{headers}"


@dataclass(kw_only=True)
class Answer:
    """A status, and the body in the pieces in which it came, with the seconds of `time.perf_counter`."""

    status: int = 0
    blocks: list[tuple[float, bytes]] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(block for _, block in self.blocks)


class LoadConnection:
    """One request at a time, over a connection that is kept as long as the server keeps it.

    Args:
        url: where the server is; a path stands before every request's.
        headers: of every request.
        timeout_seconds: of a request, connecting included.
    """

    def __init__(self, url: str, *, headers: dict[str, str], timeout_seconds: float) -> None:
        parts = urlsplit(url)
        self._is_secure = parts.scheme == "https"
        self._host, self._port = parts.hostname or "", parts.port or (443 if self._is_secure else 80)
        self._prefix = parts.path.rstrip("/")
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._head = JSON_POST.format(path="{path}", host=parts.netloc.rpartition("@")[2], headers=lines)
        self._timeout_seconds = timeout_seconds
        self._protocol: _Protocol | None = None

    async def post(self, path: str, body: bytes) -> Answer:
        """Posts JSON.

        Raises:
            OSError: the server cannot be reached, or ends the connection within an answer (`ConnectionError`).
            TimeoutError: the answer takes too long.
            httptools.HttpParserError: what comes is no HTTP.
        """
        head = self._head.replace("{path}", self._prefix + path, 1)
        try:
            async with asyncio.timeout(self._timeout_seconds):
                protocol = await self._connected()
                answer = await protocol.send(f"{head}content-length: {len(body)}\r\n\r\n".encode(), body)
        except BaseException:
            self.close()
            raise
        if not protocol.is_kept:
            self.close()
        return answer

    async def _connected(self) -> "_Protocol":
        if self._protocol is None or self._protocol.is_lost:
            context = ssl.create_default_context() if self._is_secure else None
            loop = asyncio.get_running_loop()
            _, self._protocol = await loop.create_connection(_Protocol, self._host, self._port, ssl=context)
        return self._protocol

    def close(self) -> None:
        """Ends the connection; the next request makes another."""
        if self._protocol is not None:
            self._protocol.close()
            self._protocol = None


class _Protocol(asyncio.Protocol):
    """What asyncio calls as bytes come, and what the parser calls as it finds what they are."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._answer = Answer()
        self._ended: asyncio.Future[Answer] | None = None
        self._now = 0.0
        self._has_length = False
        self.is_lost = False
        self.is_kept = False

    async def send(self, head: bytes, body: bytes) -> Answer:
        assert self._transport is not None
        self._parser, self._answer, self._has_length = httptools.HttpResponseParser(self), Answer(), False
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(head + body)
        return await self._ended

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        if self._parser is None:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(error)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        # An answer without a length ends with its connection.
        if error is None and self._answer.status and not self._has_length:
            self._end(None)
        else:
            self._end(error or ConnectionError("the server ended the connection"))

    # --- Of httptools.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._has_length = self._has_length or name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self._answer.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._answer.blocks.append((self._now, body))

    def on_message_complete(self) -> None:
        assert self._parser is not None
        self.is_kept = self._parser.should_keep_alive()
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        self._parser = None
        if self._ended is None or self._ended.done():
            return
        if error is None:
            self._ended.set_result(self._answer)
        else:
            self._ended.set_exception(error)
