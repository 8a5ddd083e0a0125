"""What requests hold: counted from the moment that it is there, and gone when they are answered, however that is."""

import asyncio
import gc
import json
import socket
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fake_engine import FakeEngineClient, Replay
from tests.http_server import (
    MODEL,
    RunningServer,
    chat,
    data_url,
    exchange,
    image_part,
    picture,
    raw_request,
    running_server,
    wait_until,
)

LARGE_BYTES = 100_000
PIXELS = 336 * 336 * 3
WIDE = image_part(picture(336, 336))
BAD = {"type": "image_url", "image_url": {"url": data_url(picture()[:60])}}
REMOTE = {"type": "image_url", "image_url": {"url": "http://pictures.example/1.png"}}


@pytest.fixture(scope="module")
def is_released() -> asyncio.Event:
    """Set while the host of remote pictures answers."""
    return asyncio.Event()


@pytest.fixture(scope="module")
def server(tiny_checkpoint: Path, is_released: asyncio.Event) -> Generator[RunningServer, None, None]:
    async def fetch(url: str) -> bytes:
        await is_released.wait()
        return picture()

    settings = {"max_pixels": 448 * 448, "max_in_flight_bytes": 5 * PIXELS // 2, "max_request_pixels": 10**6}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("server.prompts.image_fetch", lambda settings, metrics: fetch)
        with running_server(tiny_checkpoint, **settings) as server:
            yield server


def body_of(path: str, *parts: dict[str, Any]) -> dict[str, Any]:
    if path != "/v1/responses":
        return chat(list(parts))
    images = [{"type": "input_image", "image_url": part["image_url"]["url"]} for part in parts]
    return {"model": MODEL, "input": [{"role": "user", "content": images}]}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/tokenize"])
def test_pixels_count_while_other_pictures_of_the_request_are_waited_for(
    server: RunningServer, is_released: asyncio.Event, path: str
) -> None:
    """A slow host would else let a client pile up the pixels of as many requests as may wait."""
    server.in_loop(is_released.clear)
    body = body_of(path, WIDE, WIDE, REMOTE)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.post, body, path)
        wait_until(lambda: server.service.body_budget.num_bytes > 2 * PIXELS)
        for _ in range(3):
            # Refused at once, not when its slow host has answered, and it holds nothing then.
            response = server.post(body, path)
            assert response.status_code == 429, response.text
            assert response.json()["error"]["code"] == "server_busy"
            assert 2 * PIXELS < server.service.body_budget.num_bytes < 2 * PIXELS + 10_000
        assert server.post(body_of(path, image_part()), path).status_code == 200
        server.in_loop(is_released.set)
        assert first.result().status_code == 200
    assert server.service.body_budget.num_bytes == 0
    assert server.post(body, path).status_code == 200


def test_one_request_alone_may_hold_more_than_the_bound(server: RunningServer) -> None:
    assert server.post(chat([WIDE] * 6)).status_code == 200
    assert server.service.body_budget.num_bytes == 0


def kept_in_cycles(act: Callable[[], None]) -> list[Any]:
    """What `act` left behind that only the garbage collector can find, of large things."""
    gc.collect()
    gc.disable()
    try:
        act()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found = [value for holder in gc.garbage for value in gc.get_referents(holder) if num_bytes(value) > LARGE_BYTES]
        return [(type(value), num_bytes(value)) for value in found]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def num_bytes(value: Any) -> int:
    return value.nbytes if isinstance(value, np.ndarray) else len(value) if isinstance(value, bytes | str) else 0


def test_garbage_would_be_found() -> None:
    def act() -> None:
        knot: list[Any] = ["x" * 2 * LARGE_BYTES]
        knot.append(knot)

    assert kept_in_cycles(act) == [(str, 2 * LARGE_BYTES)]
    assert kept_in_cycles(lambda: None) == []


def forget(server: RunningServer, num_idle: int) -> None:
    """Waits until the server is done with all requests and has no more than `num_idle` connections, and drops what the
    fake engine wrote down of them."""
    wait_until(lambda: server.service.lifecycle.num_in_flight == 0 and server.num_connections <= num_idle)
    server.engine.requests.clear()
    server.engine.pixels.clear()


FILLER = {"user": "y" * 2 * LARGE_BYTES}
LONG_FILLER = {"user": "y" * 2 * 10**6}
FOLDED, TOOLS = Replay(token_ids=[50, 51]), [{"type": "function", "function": {"name": "f"}}]
CASES: dict[str, tuple[Replay, dict[str, Any], bytes]] = {
    "answered": (FOLDED, chat([WIDE], **FILLER), b"200"),
    "streamed": (FOLDED, chat([WIDE], stream=True, n=2, **FILLER), b"200"),
    "out of range": (FOLDED, chat([WIDE], n=0, **FILLER), b"400"),
    "out of range, read in a thread": (FOLDED, chat([WIDE], n=0, **LONG_FILLER), b"400"),
    "too deep": (FOLDED, chat([WIDE], metadata=json.loads("[" * 70 + "]" * 70), **LONG_FILLER), b"400"),
    "of another model": (FOLDED, {**chat([WIDE], **FILLER), "model": "x"}, b"404"),
    "with a bad picture": (FOLDED, chat([WIDE, BAD, WIDE, BAD], **FILLER), b"400"),
    "with too many pixels": (FOLDED, chat([image_part(picture(1000, 600))] * 2, **FILLER), b"400"),
    "too long": (FOLDED, chat([WIDE], max_tokens=10**6, **FILLER), b"400"),
    "with a token that is none": (FOLDED, chat([WIDE], logit_bias={"99999": 1}, **FILLER), b"400"),
    "with a schema that cannot be": (
        FOLDED, chat([WIDE], response_format={"type": "json_schema", "json_schema": {
            "name": "x", "strict": True, "schema": {"enum": []}}}, **FILLER), b"400",
    ),
    "with a tool that is not there": (
        FOLDED,
        chat([WIDE], tools=TOOLS, tool_choice={"type": "function", "function": {"name": "g"}}, **FILLER),
        b"400",
    ),
    "rejected by the engine": (Replay(rejection="no"), chat([WIDE], **FILLER), b"400"),
    "failed": (Replay(fail_after=0), chat([WIDE], n=2, **FILLER), b"500"),
    "failed on the way": (Replay(fail_after=1), chat([WIDE], stream=True, **FILLER), b"200"),
    "failed on the way, several": (Replay(fail_after=1), chat([WIDE], stream=True, n=3, **FILLER), b"200"),
}  # fmt: skip


def of_responses(body: dict[str, Any]) -> dict[str, Any]:
    parts = [{"type": "input_image", "image_url": part["image_url"]["url"]} for part in body["messages"][0]["content"]]
    rest = {name: value for name, value in body.items() if name != "messages"}
    return {**rest, "input": [{"role": "user", "content": parts}]}


@pytest.mark.parametrize("name", ["answered", "streamed", "with a bad picture", "failed on the way"])
def test_nothing_of_a_response_waits_for_the_garbage_collector(server: RunningServer, name: str) -> None:
    server.engine.replay, body, status = CASES[name]
    request = raw_request(of_responses(body)).replace(b"/v1/chat/completions", b"/v1/responses")
    assert kept_in_cycles(lambda: ask(server, request, status)) == []


@pytest.mark.parametrize("name", CASES)
def test_nothing_of_a_request_waits_for_the_garbage_collector(server: RunningServer, name: str) -> None:
    server.engine.replay, body, status = CASES[name]
    ask(server, raw_request(body), status)
    assert kept_in_cycles(lambda: ask(server, raw_request(body), status)) == []


def ask(server: RunningServer, request: bytes, status: bytes) -> None:
    num_idle = server.num_connections
    answer = exchange(server, request.replace(b"\r\n", b"\r\nconnection: close\r\n", 1))
    assert answer[9:12] == status
    forget(server, num_idle)


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_of_a_request_that_was_left_waits_for_the_garbage_collector(
    server: RunningServer, stream: bool
) -> None:
    server.engine.replay = Replay(token_ids=[50, 51], hang_after=1 if stream else 0)

    def act() -> None:
        num_idle = server.num_connections
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
            connection.sendall(raw_request(chat([WIDE], stream=stream, **FILLER)))
            wait_until(lambda: bool(server.engine.requests))
            if stream:
                assert connection.recv(100).startswith(b"HTTP/1.1 200")
        forget(server, num_idle)

    act()
    assert kept_in_cycles(act) == []


def test_nothing_of_a_request_past_its_deadline_waits_for_the_garbage_collector(tiny_checkpoint: Path) -> None:
    engine = FakeEngineClient(replay=Replay(token_ids=[50, 51], hang_after=0))
    with running_server(tiny_checkpoint, engine, request_timeout_seconds=0.2, max_pixels=448 * 448) as server:
        request = raw_request(chat([WIDE], **FILLER))
        ask(server, request, b"504")
        assert kept_in_cycles(lambda: ask(server, request, b"504")) == []
