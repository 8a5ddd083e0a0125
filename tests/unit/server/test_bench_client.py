"""The load generator's connection, against servers that answer byte by byte as they are told."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress

import httptools
import pytest

from server.bench_client import Answer, LoadConnection

CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class Server:
    """Says the pieces of `answers` in turn, a pause between two; counts connections and keeps what it was asked."""

    def __init__(self, *answers: list[bytes], closes: bool = False) -> None:
        self._answers = iter(answers)
        self._closes = closes
        self._open: list[asyncio.StreamWriter] = []
        self.num_connections = 0
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._open.append(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length"))
                self.heads.append(head)
                self.bodies.append(await reader.readexactly(int(length.split(b":")[1])))
                for piece in next(self._answers):
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.01)
                if self._closes:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()

    async def wait_closed(self) -> None:
        """Until all connections are gone: the client ends its own."""
        for writer in self._open:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


@asynccontextmanager
async def connected(server: Server, *, path: str = "", seconds: float = 10) -> AsyncIterator[LoadConnection]:
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{port}{path}"
    async with listening:
        try:
            with closing(LoadConnection(url, headers={"x-key": "secret"}, timeout_seconds=seconds)) as connection:
                yield connection
        finally:
            await server.wait_closed()


def run(server: Server, use: Callable[[LoadConnection], object], **options: object) -> object:
    async def main() -> object:
        async with connected(server, **options) as connection:  # type: ignore[arg-type]
            return await use(connection)  # type: ignore[misc]

    return asyncio.run(main())


async def post_twice(connection: LoadConnection) -> tuple[Answer, Answer]:
    return await connection.post("/v1/x", b"[1]"), await connection.post("/v1/x", b"[22]")


def test_pieces_are_kept_with_their_times_on_one_connection() -> None:
    first = [CHUNKED, b"3\r\nabc\r\n", b"2\r\nde\r\n", b"0\r\n\r\n"]
    second = [b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\nno"]
    server = Server(first, second)
    answers = run(server, post_twice, path="/below/")
    assert isinstance(answers, tuple)
    assert [(answer.status, answer.body) for answer in answers] == [(200, b"abcde"), (404, b"no")]
    times = [time for time, _ in answers[0].blocks]
    assert len(times) == 2
    assert times[0] < times[1]
    assert server.num_connections == 1
    assert server.bodies == [b"[1]", b"[22]"]
    assert server.heads[0].startswith(b"POST /below/v1/x HTTP/1.1\r\n")
    assert b"x-key: secret\r\n" in server.heads[0]


def test_a_connection_that_the_server_does_not_keep_is_made_anew() -> None:
    server = Server([b"HTTP/1.1 200 OK\r\n\r\n", b"to the end"], [CHUNKED + b"1\r\nx\r\n0\r\n\r\n"], closes=True)
    answers = run(server, post_twice)
    assert isinstance(answers, tuple)
    assert [answer.body for answer in answers] == [b"to the end", b"x"]
    assert server.num_connections == 2


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ([CHUNKED, b"5\r\nab"], ConnectionError),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nab"], ConnectionError),
        ([], ConnectionError),
        ([b"SSH-2.0-server\r\n\r\n"], httptools.HttpParserError),
    ],
)
def test_an_answer_that_breaks_off_or_is_none_is_an_error(pieces: list[bytes], error: type[Exception]) -> None:
    with pytest.raises(error):
        run(Server(pieces, closes=True), post_twice)


def test_a_request_that_takes_too_long_is_given_up() -> None:
    with pytest.raises(TimeoutError):
        run(Server([CHUNKED, *[b"1\r\nx\r\n"] * 1000]), post_twice, seconds=0.2)


def test_nobody_there_is_an_error() -> None:
    async def main() -> None:
        await LoadConnection("http://127.0.0.1:9", headers={}, timeout_seconds=5).post("/", b"")

    with pytest.raises(ConnectionRefusedError):
        asyncio.run(main())
