"""How requests lie on a connection: what is no HTTP costs nobody else an answer, and is told what it is.

Each case is bytes on a socket, for the clients that send them do so below the level of any library here.
"""

import json
import re
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.http_server import RunningServer, chat, data_url, exchange, picture, running_server, wait_until

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
LAST_HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
BODY = json.dumps(chat([{"type": "image_url", "image_url": {"url": data_url(picture())}}])).encode()
JAVA = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAA\r\n"


@pytest.fixture(scope="module")
def server(tiny_checkpoint: Path) -> Generator[RunningServer, None, None]:
    with running_server(tiny_checkpoint) as server:
        yield server


def with_length(body: bytes) -> bytes:
    return b"content-length: %d\r\n\r\n%b" % (len(body), body)


def in_chunks(body: bytes, size: int) -> bytes:
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    return b"transfer-encoding: chunked\r\n\r\n" + b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in parts) + b"0\r\n\r\n"


def statuses(answer: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", answer)]


@pytest.mark.parametrize("body", [with_length(BODY), in_chunks(BODY, 7), in_chunks(BODY, 10**6)])
@pytest.mark.parametrize(
    "header", [JAVA, b"connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"]
)
@pytest.mark.parametrize("piece", [13, 10**6])
def test_wish_for_another_protocol_is_ignored_and_the_body_read(
    server: RunningServer, header: bytes, body: bytes, piece: int
) -> None:
    request = HEAD + header + body
    # Twice on one connection, as Java's client sends them, and then without.
    sent = request + request + LAST_HEALTH
    num_before = len(server.engine.requests)
    answer = exchange(server, *(sent[start : start + piece] for start in range(0, len(sent), piece)))
    assert statuses(answer) == [200, 200, 200], answer
    assert [len(request.images) for request in server.engine.requests[num_before:]] == [1, 1]


def test_heads_with_such_a_wish_are_bounded_too(server: RunningServer) -> None:
    assert statuses(exchange(server, HEAD + JAVA + b"x: y\r\n" * 20_000 + b"\r\n")) in ([431], [])
    assert statuses(
        exchange(server, HEAD + JAVA + b"x: " + b"y" * 60_000 + b"\r\n" + with_length(BODY) + LAST_HEALTH)
    ) == [
        200,
        200,
    ]


@pytest.mark.parametrize("target", [b"example.com:80", b"/v1/models", b"*"])
def test_connect_is_no_request_here(server: RunningServer, target: bytes) -> None:
    (status,) = statuses(exchange(server, b"CONNECT %b HTTP/1.1\r\nhost: x\r\n\r\n" % target, LAST_HEALTH))
    assert status == 400


BAD_BODIES = {
    "length that is none": b"transfer-encoding: chunked\r\n\r\n-1\r\n",
    "length beyond all numbers": b"transfer-encoding: chunked\r\n\r\nfffffffffffffffffff\r\nabc",
    "length that is wrong": b"transfer-encoding: chunked\r\n\r\n3\r\nabcdef\r\n0\r\n\r\n",
    "in the second chunk": b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\nx\r\n",
    "coding that is not ours": b"transfer-encoding: gzip\r\n\r\n" + BODY,
    "two lengths": b"content-length: 3\r\n" + with_length(BODY),
    "length and chunks": b"content-length: 3\r\n" + in_chunks(BODY, 100),
}


@pytest.mark.parametrize("name", BAD_BODIES)
@pytest.mark.parametrize("is_split", [False, True])
def test_body_that_cannot_be_read_is_told_so(server: RunningServer, name: str, is_split: bool) -> None:
    bad = BAD_BODIES[name]
    cut = bad.index(b"\r\n\r\n") + 4
    answer = exchange(server, HEAD, bad[:cut], bad[cut:]) if is_split else exchange(server, HEAD + bad)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request"), answer
    assert b"connection: close" in head
    assert json.loads(body)["error"]["message"] == "The request is not valid HTTP."
    wait_until(lambda: server.service.lifecycle.num_in_flight == 0)
    assert server.service.body_budget.num_bytes == 0


def test_giant_trailers_are_told_so(server: RunningServer) -> None:
    body = in_chunks(BODY, 100)[:-2] + b"x: y\r\n" * 20_000
    assert statuses(exchange(server, HEAD + body)) in ([431], [])
    wait_until(lambda: server.service.lifecycle.num_in_flight == 0)


@pytest.mark.parametrize("rubbish", [b"rubbish\r\n\r\n", b"\x00" * 1000, b"GET / HTTP/1.1\r\nx: " + b"y" * 10**6])
def test_rubbish_behind_a_request_does_not_cost_its_answer(server: RunningServer, rubbish: bytes) -> None:
    for stream in (False, True):
        body = with_length(json.dumps(chat(stream=stream)).encode())
        answer = exchange(server, HEAD + body + rubbish, rubbish)
        assert statuses(answer) == [200]
        assert b"[DONE]" in answer if stream else b'"usage"' in answer
        assert b"connection: close" in answer
    # Two requests came whole: both are answered.
    assert statuses(exchange(server, LAST_HEALTH.replace(b"close", b"keep-alive") + HEAD + body + rubbish)) == [
        200,
        200,
    ]


def test_body_without_a_length_is_none(server: RunningServer) -> None:
    answer = exchange(server, HEAD + b"\r\n" + BODY)
    assert statuses(answer) == [400]
    assert b"The request body is not valid JSON." in answer


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "gzip, identity"])
def test_compressed_bodies_are_refused_by_their_header(server: RunningServer, coding: str) -> None:
    response = server.post(chat(), headers={"content-encoding": coding})
    assert response.status_code == 400
    assert "Content-Encoding" in response.json()["error"]["message"]
    assert server.post(chat(), headers={"content-encoding": "Identity"}).status_code == 200
