"""Limits of what one client can make the server hold or do, each over real sockets; the next request always works."""

import json
import socket
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from runtime.processing.tokenizer import Tokenizer
from server import protocol
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

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture(scope="module")
def server(tiny_checkpoint: Path) -> Generator[RunningServer, None, None]:
    with running_server(
        tiny_checkpoint, max_request_pixels=20_000, max_images_per_turn=2, max_header_bytes=16 * KIB
    ) as server:
        yield server


def error_of(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return dict(error)


def test_pixels_of_a_request_are_counted_together(server: RunningServer) -> None:
    def post(*sizes: tuple[int, int]) -> Any:
        messages = [
            {"role": "user", "content": [image_part(picture(*size)), {"type": "text", "text": "x"}]} for size in sizes
        ]
        return server.post({"model": MODEL, "messages": messages})

    assert post((100, 100), (100, 100)).status_code == 200
    error = error_of(post((100, 100), (100, 101)), 400)
    assert error["code"] == "image_too_large"
    assert "max_request_pixels" in error["message"]
    assert error_of(post((200, 200), *[(100, 100)] * 5), 400)["code"] == "image_too_large"
    assert post((100, 100)).status_code == 200


def test_pictures_of_a_turn_are_counted_apart(server: RunningServer) -> None:
    def turn(num_images: int) -> dict[str, Any]:
        return {"role": "user", "content": [image_part(picture(28, 28))] * num_images}

    body = {"model": MODEL, "messages": [turn(2), {"role": "assistant", "content": "Yes."}, turn(2)]}
    assert server.post(body).status_code == 200
    error = error_of(server.post({"model": MODEL, "messages": [turn(1), turn(3)]}), 400)
    assert error["code"] == "too_many_images"
    assert "3 images" in error["message"]
    assert "max_images_per_turn" in error["message"]


@pytest.mark.parametrize("name", ["values", "objects", "numbers"])
def test_json_of_countless_values_is_refused_unparsed(server: RunningServer, name: str) -> None:
    item = {"values": b"[],", "objects": b"{},", "numbers": b"0,"}[name]
    body = b'{"model": "tiny", "messages": [' + item * 2_100_000 + b"0]}"
    response = server.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert "values" in error_of(response, 400)["message"]
    assert server.post(chat()).status_code == 200


def test_large_body_is_served(server: RunningServer) -> None:
    assert server.post(chat("x", user="y" * 20 * MIB)).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize"])
def test_text_that_can_never_fit_is_not_even_tokenised(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    def encode(self: Tokenizer, text: str, *, allow_special: bool) -> list[int]:
        raise AssertionError("it was tokenised")

    monkeypatch.setattr(Tokenizer, "encode", encode)
    field = "messages" if "chat" in path else "input" if "responses" in path else "prompt"
    text = "word " * 2_000_000
    body = {"model": MODEL, field: text if field != "messages" else [{"role": "user", "content": text}]}
    error = error_of(server.post(body, path), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", field)
    assert error["message"].startswith("This model's maximum context length is ")


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
BIG_HEADS = {
    "one header": (HEAD + b"x-big: ", b"a" * 5 * MIB, b"\r\n\r\n"),
    "one header that never ends": (HEAD + b"x-big: ", b"a" * 5 * MIB),
    "one name": (HEAD, b"x" * 5 * MIB, b": y\r\n\r\n"),
    "many headers": (HEAD, b"x: y\r\n" * 10_000, b"\r\n"),
    "a little too many": (HEAD, b"x: y\r\n" * 2_800, b"\r\n"),
    "in one piece": (HEAD + b"x: y\r\n" * 2_800 + b"content-length: 2\r\n\r\n{}",),
    "url": (b"GET /", b"a" * 5 * MIB, b" HTTP/1.1\r\n\r\n"),
}


@pytest.mark.parametrize("name", BIG_HEADS)
def test_giant_heads_are_431(server: RunningServer, name: str) -> None:
    before = server.metric("fovea_requests_rejected_total", reason="headers_too_large")
    answer = exchange(server, *BIG_HEADS[name])
    # A sender that is still sending may see the connection's end before the answer.
    if answer:
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 431 Request Header Fields Too Large")
        assert json.loads(body)["error"]["code"] == "headers_too_large"
    wait_until(lambda: server.metric("fovea_requests_rejected_total", reason="headers_too_large") == before + 1)
    assert server.post(chat()).status_code == 200


def test_large_heads_within_the_limit_pass(server: RunningServer) -> None:
    assert server.post(chat(), headers={"x-big": "a" * 15 * KIB}).status_code == 200
    assert server.post(chat("word " * 500), headers={"x-big": "a" * 15 * KIB}).status_code == 200


def test_giant_trailers_end_the_connection(server: RunningServer) -> None:
    body = json.dumps(chat()).encode()
    head = HEAD + b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    exchange(server, head, b"%x\r\n%b\r\n0\r\n" % (len(body), body), b"x: y\r\n" * 50_000)
    assert server.post(chat()).status_code == 200


def test_what_is_no_http_is_an_error_in_the_shape(server: RunningServer) -> None:
    head, _, body = exchange(server, b"\x16\x03\x01 this is no HTTP\r\n\r\n").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_head_that_does_not_end_is_left(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_SECONDS", 0.2)
    with running_server(tiny_checkpoint) as server:
        assert exchange(server, b"POST /v1/chat/completions HTTP/1.1\r\nhost: ") == b""
        assert exchange(server) == b""
        assert server.post(chat()).status_code == 200


TOO_MANY_PARTS = [{"role": "user", "content": [{"type": "text", "text": ""}] * 1000}] * 400
CALLS = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}] * 128


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"messages": TOO_MANY_PARTS}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": CALLS}] * 65}, "messages"),
        ("/tokenize", {"messages": TOO_MANY_PARTS}, "messages"),
        ("/v1/responses", {"input": TOO_MANY_PARTS}, "input"),
        (
            "/v1/responses",
            {"input": [{"type": "function_call_output", "call_id": "a", "output": ["x"] * 1000}] * 9},
            "input",
        ),
    ],
)  # fmt: skip
def test_parts_and_calls_of_a_request_are_counted_before_they_are_looked_at(
    server: RunningServer, path: str, fields: dict[str, Any], param: str
) -> None:
    error = error_of(server.post({"model": MODEL, **fields}, path), 400)
    assert error["param"] == param
    assert "content parts and tool calls together; at most 8192 are accepted." in error["message"]


def test_as_many_parts_as_are_allowed_are_served(server: RunningServer) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": ""}] * 1024}] * 8
    assert server.post({"model": MODEL, "messages": messages}).status_code == 200


def test_body_that_does_not_come_is_408(tiny_checkpoint: Path) -> None:
    with running_server(tiny_checkpoint, body_timeout_seconds=0.2) as server:
        answer = exchange(server, raw_request(chat())[:-10])
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"body_timeout_seconds" in answer
        wait_until(lambda: server.service.lifecycle.num_in_flight == 0)
        assert server.service.body_budget.num_bytes == 0


def test_bytes_in_work_are_bounded_together(tiny_checkpoint: Path) -> None:
    with running_server(tiny_checkpoint, max_in_flight_bytes=MIB) as server:
        large = raw_request(chat("x", user="y" * (700 * KIB)))
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as slow:
            slow.sendall(large[:-1])
            wait_until(lambda: server.service.body_budget.num_bytes >= 700 * KIB)
            response = server.post(chat("x", user="y" * (700 * KIB)))
            assert error_of(response, 429)["type"] == "rate_limit_error"
            assert response.headers["retry-after"] == "1"
            assert server.metric("fovea_requests_rejected_total", reason="bytes_in_flight") == 1
            assert server.post(chat()).status_code == 200
            slow.sendall(large[-1:])
            assert slow.recv(100).startswith(b"HTTP/1.1 200")
        assert server.post(chat("x", user="y" * (700 * KIB))).status_code == 200
        # What is larger than the budget is served alone.
        assert server.post(chat("x", user="y" * 2 * MIB)).status_code == 200
        assert server.service.body_budget.num_bytes == 0


def test_bytes_are_given_back_before_the_answer(tiny_checkpoint: Path) -> None:
    replay = Replay(token_ids=[50, 51], hang_after=1)
    with running_server(tiny_checkpoint, FakeEngineClient(replay=replay), max_in_flight_bytes=MIB) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as streaming:
            streaming.sendall(raw_request(chat("x", user="y" * (700 * KIB), stream=True)))
            assert streaming.recv(100).startswith(b"HTTP/1.1 200")
            assert server.service.body_budget.num_bytes == 0
        wait_until(lambda: server.service.lifecycle.num_in_flight == 0)


def test_pixels_in_work_are_bounded_with_the_bodies(tiny_checkpoint: Path) -> None:
    """A file of few bytes may have many pixels, which the engine may want until the answer is complete."""
    replay = Replay(token_ids=[50, 51], hang_after=1)
    limits = {"max_in_flight_bytes": 64 * KIB, "max_pixels": 224 * 224}
    with running_server(tiny_checkpoint, FakeEngineClient(replay=replay), **limits) as server:
        body = chat([image_part(picture(140, 140))], stream=True)
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as streaming:
            streaming.sendall(raw_request(body))
            assert streaming.recv(100).startswith(b"HTTP/1.1 200")
            assert server.service.body_budget.num_bytes == 140 * 140 * 3
            assert error_of(server.post(body), 429)["type"] == "rate_limit_error"
        wait_until(lambda: server.service.lifecycle.num_in_flight == 0)
        assert server.service.body_budget.num_bytes == 0


@pytest.mark.parametrize("detail", ["low", "high", "auto", "original", None])
def test_detail_is_a_budget_of_pixels_down_to_the_usage(tiny_checkpoint: Path, detail: str | None) -> None:
    """28 x 28 pixels are one token: `low` gets a quarter of the most."""
    with running_server(tiny_checkpoint, max_pixels=56 * 56 * 16, min_pixels=28 * 28) as server:
        image = {"url": data_url(picture(448, 448)), **({"detail": detail} if detail else {})}
        usage = server.post(chat([{"type": "image_url", "image_url": image}])).json()["usage"]
        tokens = usage["prompt_tokens_details"]["image_tokens"]
        assert tokens == (16 if detail == "low" else 64)
        (request,) = server.engine.requests
        assert request.images[0].placeholder.length == tokens
        assert server.engine.pixels[0][0].size == tokens * 28 * 28 * 3
