"""The fetcher against real sockets on this machine: names are resolved by the test, so that every host is near."""

import asyncio
import gc
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from ipaddress import ip_network
from typing import Any

import pytest

from server.image_decode import ImageError
from server.image_fetch import MAX_REDIRECTS, NOT_ALLOWED, UNREACHABLE, ImageFetcher
from server.media_url import parse_allowed_host

LOOPBACK = (ip_network("127.0.0.0/8"),)
Handler = Callable[[list[str], asyncio.StreamWriter], Awaitable[None]]


class Origin:
    """A server that hands the lines of each request's head to `handler`, and keeps them."""

    def __init__(self, handler: Handler) -> None:
        self.heads: list[list[str]] = []
        self.port = 0
        self._handler = handler

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            self.heads.append(head)
            await self._handler(head, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def origin(handler: Handler) -> AsyncGenerator[Origin, None]:
    one = Origin(handler)
    async with await asyncio.start_server(one.serve, "127.0.0.1", 0) as server:
        one.port = server.sockets[0].getsockname()[1]
        yield one


def answer(*headers: str, status: str = "200 OK", body: bytes = b"") -> Handler:
    async def handle(head: list[str], writer: asyncio.StreamWriter) -> None:
        writer.write("\r\n".join([f"HTTP/1.1 {status}", *headers, "connection: close", "", ""]).encode() + body)
        await writer.drain()

    return handle


def fetcher(port: int, *, hosts: Sequence[str] = ("img.example",), **fields: Any) -> ImageFetcher:
    values = {
        "allowed_hosts": [parse_allowed_host(f"{host}:{port}") for host in hosts],
        "allowed_networks": LOOPBACK,
        "max_bytes": 1000,
        "timeout_seconds": 5.0,
        "resolve": names({}),
        **fields,
    }
    return ImageFetcher(**values)


def names(addresses: dict[str, list[str]]) -> Callable[[str, int], Awaitable[list[str]]]:
    async def resolve(host: str, port: int) -> list[str]:
        return addresses.get(host, ["127.0.0.1"])

    return resolve


def fetch(handler: Handler, *, path: str = "/x.png", **fields: Any) -> tuple[bytes | ImageError, list[list[str]]]:
    """What comes of one URL of a server with this handler, and the requests that the server got."""

    async def run() -> tuple[bytes | ImageError, list[list[str]]]:
        async with origin(handler) as server:
            try:
                found: bytes | ImageError = await fetcher(server.port, **fields)(
                    f"http://img.example:{server.port}{path}"
                )
            except ImageError as error:
                found = error
            return found, server.heads

    return asyncio.run(run())


def message_of(found: bytes | ImageError) -> str:
    assert isinstance(found, ImageError)
    assert "127.0.0.1" not in found.message
    return found.message


def test_bytes_come_from_the_named_host() -> None:
    found, heads = fetch(answer(body=b"picture"), path="/a%20b.png?sig=1")
    assert found == b"picture"
    assert heads[0][0] == "GET /a%20b.png?sig=1 HTTP/1.1"
    headers = {line.partition(":")[0].lower(): line.partition(":")[2].strip() for line in heads[0][1:] if line}
    assert headers["host"].startswith("img.example:")
    assert headers["accept-encoding"] == "identity"
    assert "cookie" not in headers
    assert "authorization" not in headers


def test_other_hosts_get_no_request() -> None:
    found, heads = fetch(answer(body=b"picture"), hosts=["other.example"])
    assert message_of(found) == NOT_ALLOWED
    assert heads == []


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["::ffff:127.0.0.1"], ["8.8.8.8", "127.0.0.1"], ["10.0.0.1"]])
def test_forbidden_addresses_get_no_request(addresses: list[str]) -> None:
    found, heads = fetch(
        answer(body=b"picture"), allowed_networks=(), resolve=names({"img.example": addresses}), timeout_seconds=60.0
    )
    assert message_of(found) == UNREACHABLE
    assert heads == []


def test_a_name_is_resolved_once_for_check_and_connection() -> None:
    asked = []

    async def rebind(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else ["169.254.169.254"]

    found, heads = fetch(answer(body=b"picture"), resolve=rebind)
    assert found == b"picture"
    assert asked == ["img.example"]
    assert len(heads) == 1


def test_redirect_is_resolved_and_checked_anew() -> None:
    asked = []

    async def rebind(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else ["169.254.169.254"]

    found, heads = fetch(answer("location: /again", status="302 Found"), resolve=rebind)
    assert message_of(found) == UNREACHABLE
    assert len(asked) == 2
    assert len(heads) == 1


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"])
def test_redirects_are_followed(status: str) -> None:
    async def handle(head: list[str], writer: asyncio.StreamWriter) -> None:
        is_first = "/x.png" in head[0]
        await (answer("location: /y.png", status=status) if is_first else answer(body=b"picture"))(head, writer)

    found, heads = fetch(handle)
    assert found == b"picture"
    assert len(heads) == 2


@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.1/", "http://other.example/", "http://169.254.169.254/latest", "file:///etc/passwd", "//evil/",
        "http://img.example\\@127.0.0.1/", "http://img.example:22/", "",
    ],
)  # fmt: skip
def test_redirects_elsewhere_are_not_followed(location: str) -> None:
    found, heads = fetch(answer(f"location: {location}", status="302 Found"))
    assert isinstance(found, ImageError)
    assert found.code == "invalid_image_url"
    assert "169.254" not in message_of(found)
    assert len(heads) == 1


def test_endless_redirects_end() -> None:
    found, heads = fetch(answer("location: /x.png", status="302 Found"))
    assert "redirects more than" in message_of(found)
    assert len(heads) == MAX_REDIRECTS + 1


def test_endless_body_is_cut_off() -> None:
    async def handle(head: list[str], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(b"x" * 4096)
            await writer.drain()

    found, _ = fetch(handle)
    assert isinstance(found, ImageError)
    assert found.code == "image_too_large"


def test_announced_length_is_believed_only_where_it_is_too_large() -> None:
    async def drip(head: list[str], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(60)

    assert "more than 1000 bytes" in message_of(fetch(drip)[0])
    short, _ = fetch(answer("content-length: 5", body=b"picture and more"))
    assert short == b"pictu"
    chunked = b"1000\r\n" + b"x" * 4096 + b"\r\n0\r\n\r\n"
    found, _ = fetch(answer("transfer-encoding: chunked", body=chunked))
    assert "more than 1000 bytes" in message_of(found)


def test_slow_server_is_left_after_the_deadline() -> None:
    async def drip(head: list[str], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)

    found, heads = fetch(drip, timeout_seconds=0.2)
    assert "within 0.2 seconds" in message_of(found)
    assert len(heads) == 1


def test_silent_server_and_silent_resolver_meet_the_deadline() -> None:
    async def silent(head: list[str], writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    async def hang(host: str, port: int) -> list[str]:
        await asyncio.sleep(60)
        return []

    assert "within 0.1 seconds" in message_of(fetch(silent, timeout_seconds=0.1)[0])
    assert "within 0.1 seconds" in message_of(fetch(silent, timeout_seconds=0.1, resolve=hang)[0])


def test_compressed_bodies_are_not_unpacked() -> None:
    found, _ = fetch(answer("content-encoding: gzip", body=b"\x1f\x8b" + b"\0" * 100))
    assert "compressed" in message_of(found)


@pytest.mark.parametrize("status", ["404 Not Found", "500 Error", "204 No Content", "206 Partial"])
def test_other_statuses_are_told_and_not_tried_again(status: str) -> None:
    found, heads = fetch(answer(status=status, body=b""))
    assert f"status {status[:3]}" in message_of(found)
    assert len(heads) == 1


def test_what_cannot_be_reached_gives_one_message() -> None:
    async def refuse(head: list[str], writer: asyncio.StreamWriter) -> None:
        writer.write(b"not http at all\r\n\r\n")

    async def unknown(host: str, port: int) -> list[str]:
        raise OSError("no such name")

    assert message_of(fetch(refuse)[0]) == UNREACHABLE
    assert message_of(fetch(refuse, resolve=unknown)[0]) == UNREACHABLE
    assert message_of(fetch(refuse, resolve=names({"img.example": []}))[0]) == UNREACHABLE


def test_second_address_is_tried_when_the_first_does_not_answer() -> None:
    # Only 127.0.0.1 listens.
    found, _ = fetch(answer(body=b"picture"), resolve=names({"img.example": ["127.0.0.9", "127.0.0.1"]}))
    assert found == b"picture"


def test_tls_asks_for_the_name_and_checks_it() -> None:
    class Recorder(ssl.SSLContext):
        server_names: list[Any]

        def wrap_bio(self, *arguments: Any, **keywords: Any) -> Any:
            self.server_names.append(keywords.get("server_hostname", arguments[3] if len(arguments) > 3 else None))
            return super().wrap_bio(*arguments, **keywords)

    context = Recorder(ssl.PROTOCOL_TLS_CLIENT)
    context.server_names = []

    async def run(port: int) -> None:
        with pytest.raises(ImageError):
            await fetcher(port, ssl_context=context, timeout_seconds=0.3)(f"https://img.example:{port}/x.png")

    async def with_server() -> None:
        async with origin(answer()) as server:
            await run(server.port)

    asyncio.run(with_server())
    gc.collect()  # a socket that was left open would be a warning now
    assert context.check_hostname
    assert context.server_names == [b"img.example"]


def test_log_has_no_path_and_no_query(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger="server")
    fetch(answer(status="404 Not Found"), path="/private/x.png?sig=secret")
    fetch(answer(), path="/private/x.png?sig=secret", allowed_networks=())
    text = caplog.text
    assert "http://img.example" in text
    assert "secret" not in text
    assert "private" not in text
