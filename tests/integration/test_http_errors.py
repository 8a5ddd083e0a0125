"""Bad input over HTTP: the status, OpenAI's error shape, the path of the field, no echo; and the next request works."""

import base64
import contextlib
import io
import json
import socket
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.fake_engine import FakeEngineClient, Replay
from tests.http_server import (
    MODEL,
    RunningServer,
    chat,
    data_url,
    events,
    image_part,
    picture,
    raw_request,
    running_server,
    wait_until,
)

MIB = 1 << 20
URL_PATH = "messages[0].content[0].image_url.url"


@pytest.fixture(scope="module")
def server(tiny_checkpoint: Path) -> Generator[RunningServer, None, None]:
    with running_server(
        tiny_checkpoint,
        FakeEngineClient(max_model_len=512),
        limit_mm_per_prompt={"image": 2},
        max_body_bytes=MIB,
        max_image_pixels=1_000_000,
    ) as server:
        yield server


def error_of(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert response.json().keys() == {"error"}
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert " at 0x" not in error["message"]
    return dict(error)


def url_part(url: str) -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": url}}]


def cut(data: bytes) -> bytes:
    return data[: len(data) * 7 // 10]


def noise_jpeg() -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise((200, 200), 80).convert("RGB").save(buffer, "JPEG")
    return buffer.getvalue()


def bomb() -> bytes:
    buffer = io.BytesIO()
    Image.new("1", (9000, 9000)).save(buffer, "PNG")
    return buffer.getvalue()


BAD_IMAGES = {
    "no image": (data_url(b"hello, world"), "invalid_image"),
    "truncated jpeg": (data_url(cut(noise_jpeg()), "image/jpeg"), "invalid_image"),
    "truncated header": (data_url(picture()[:20]), "invalid_image"),
    "empty": ("data:image/png;base64,", "invalid_image_url"),
    "broken base64": ("data:image/png;base64,@@@@", "invalid_image_url"),
    "no base64": ("data:image/png,abc", "invalid_image_url"),
    "not a url": ("not a url", "invalid_image_url"),
    "http": ("http://169.254.169.254/latest/secret-token", "invalid_image_url"),
    "file": ("file:///etc/passwd", "invalid_image_url"),
    "bomb": (data_url(bomb()), "image_too_large"),
    "ratio": (data_url(picture(3000, 10)), "invalid_image"),
}


@pytest.mark.parametrize("name", BAD_IMAGES)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_pictures_are_named(server: RunningServer, name: str, stream: bool) -> None:
    url, code = BAD_IMAGES[name]
    error = error_of(server.post(chat(url_part(url), stream=stream)), 400)
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", code, URL_PATH)
    assert "secret" not in error["message"]
    assert "passwd" not in error["message"]
    assert server.post(chat([image_part()])).status_code == 200


def test_tiny_picture_is_served(server: RunningServer) -> None:
    for size in ((1, 1), (1, 2), (3, 1)):
        assert server.post(chat([image_part(picture(*size))])).status_code == 200


def test_second_picture_is_named_by_its_place(server: RunningServer) -> None:
    content = [{"type": "text", "text": "x"}, image_part(), *url_part("nope")]
    error = error_of(server.post(chat(content)), 400)
    assert error["param"] == "messages[0].content[2].image_url.url"


@pytest.mark.parametrize("stream", [False, True])
def test_too_many_pictures(server: RunningServer, stream: bool) -> None:
    error = error_of(server.post(chat([image_part()] * 3, stream=stream)), 400)
    assert error["code"] == "too_many_images"
    assert "3 images" in error["message"]
    assert "at most 2" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_too_long_gives_the_counts(server: RunningServer, stream: bool) -> None:
    error = error_of(server.post(chat("word " * 2000, stream=stream)), 400)
    assert error["code"] == "context_length_exceeded"
    start = "This model's maximum context length is 512 tokens. However, your messages resulted in "
    assert error["message"].startswith(start)
    assert error["param"] == "messages"


@pytest.mark.parametrize("stream", [False, True])
def test_more_tokens_than_the_context_has_room_for(server: RunningServer, stream: bool) -> None:
    error = error_of(server.post(chat(max_tokens=600, stream=stream)), 400)
    assert error["code"] == "context_length_exceeded"
    assert "600 in the completion" in error["message"]


def test_unknown_model(server: RunningServer) -> None:
    error = error_of(server.post({**chat(), "model": "secret-model"}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert error["message"] == "The model `secret-model` does not exist; this server has: tiny."
    error_of(server.get("/v1/models/owner/name"), 404)


def test_token_ids_outside_of_the_vocabulary(server: RunningServer) -> None:
    assert error_of(server.post(chat(logit_bias={"999999": 1})), 400)["param"] == "logit_bias"
    assert error_of(server.post(chat(stop_token_ids=[999999])), 400)["param"] == "stop_token_ids"


BAD_BODIES = {
    "malformed": b'{"model": "tiny", "messages": [',
    "empty": b"",
    "array": b"[]",
    "number": b"5",
    "not utf-8": b'{"model": "\xff\xfe"}',
    "lone surrogate": b'{"model": "\\ud800"}',
    "nan": b'{"model": "tiny", "temperature": NaN}',
    "deep": b"[" * 100_000,
    "deep but closed": b'{"a":' * 200 + b"1" + b"}" * 200,
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_bodies_that_are_no_request(server: RunningServer, name: str) -> None:
    response = _post_raw(server, BAD_BODIES[name])
    error = error_of(response, 400)
    assert error["type"] == "invalid_request_error"
    assert server.post(chat()).status_code == 200


def test_other_content_types_are_refused(server: RunningServer) -> None:
    response = _post_raw(server, json.dumps(chat()).encode(), content_type="text/plain")
    assert "Content-Type" in error_of(response, 400)["message"]


def test_fields_out_of_range_name_themselves(server: RunningServer) -> None:
    assert error_of(server.post(chat(n=10**6)), 400)["param"] == "n"
    assert error_of(server.post(chat(stop=["x"] * 10**5)), 400)["param"] == "stop"
    assert error_of(server.post(chat([])), 400)["param"] == "messages[0].content"
    assert error_of(server.post(chat([{"type": "video_url"}])), 400)["param"] == "messages[0].content[0].type"
    error = error_of(server.post(chat(tools=[], tool_choice="required")), 400)
    assert error["param"] == "tool_choice"


def test_errors_do_not_repeat_what_was_sent(server: RunningServer) -> None:
    secret = "sesame" * 3
    bodies = [
        chat(secret, temperature=secret), chat([{"type": secret}]), chat(logit_bias={secret: 1}),
        chat([{"type": "image_url", "image_url": {"url": secret}}]),
        {**chat(), "messages": [{"role": secret, "content": "x"}]}, {**chat(), "messages": secret},
    ]  # fmt: skip
    for body in bodies:
        assert "sesame" not in json.dumps(error_of(server.post(body), 400))
    response = {"model": MODEL, "input": "x", "metadata": {secret: 1}}
    error = error_of(server.post(response, "/v1/responses"), 400)
    assert error["param"] == "metadata"
    assert "sesame" not in json.dumps(error)


def test_unknown_routes_and_methods_have_the_shape(server: RunningServer) -> None:
    error_of(server.get("/v1/nothing"), 404)
    error_of(server.get("/v1/chat/completions"), 405)
    error_of(_post_raw(server, b"{}", path="/health"), 405)


def test_body_too_large_by_its_length(server: RunningServer) -> None:
    error = error_of(server.post(chat("x" * 2 * MIB)), 413)
    assert error["code"] == "request_too_large"
    assert server.post(chat()).status_code == 200


def test_body_too_large_in_chunks(server: RunningServer) -> None:
    def body() -> Generator[bytes, None, None]:
        for _ in range(40):
            yield b" " * (MIB // 16)

    response = _post_raw(server, body())
    error_of(response, 413)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nx: " + b"y" * 5 * MIB,
        b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * MIB,
        b"GET /" + b"x" * MIB,
        b"this is no HTTP\r\n\r\n",
    ],
    ids=["header", "headers", "line", "rubbish"],
)
def test_heads_that_do_not_end_are_cut_off(server: RunningServer, head: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        received = b""
        with contextlib.suppress(OSError):
            connection.sendall(head)
        with contextlib.suppress(OSError):
            while block := connection.recv(65536):
                received += block
    # The answer may be lost where the client goes on sending; the connection's end is not.
    assert received == b"" or b'"invalid_request_error"' in received
    assert server.get("/health").status_code == 200


def test_keep_alive_counts_each_head_anew(server: RunningServer) -> None:
    for _ in range(5):
        assert server.http.get("/health", headers={"x-filler": "y" * 30_000}).status_code == 200


def test_endless_body_is_cut_off(server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        chunk = b"%x\r\n" % MIB + b" " * MIB + b"\r\n"
        with contextlib.suppress(OSError):
            for _ in range(3):
                connection.sendall(chunk)
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")


def test_hidden_failure_is_a_plain_500(tiny_checkpoint: Path) -> None:
    with running_server(tiny_checkpoint, FakeEngineClient(replay=Replay(token_ids=[1], fail_after=0))) as server:
        for stream in (False, True):
            error = error_of(server.post(chat(stream=stream)), 500)
            assert error["type"] == "server_error"
            assert "secret" not in error["message"]
        server.engine.replay = Replay()
        assert server.post(chat()).status_code == 200


def test_what_the_engine_rejects_is_400_with_its_reason(tiny_checkpoint: Path) -> None:
    replay = Replay(rejection="needs 30 blocks; there are 20")
    with running_server(tiny_checkpoint, FakeEngineClient(replay=replay)) as server:
        for stream in (False, True):
            error = error_of(server.post(chat(stream=stream)), 400)
            assert error["type"] == "invalid_request_error"
            assert "needs 30 blocks; there are 20" in error["message"]


def test_failure_in_the_middle_of_a_stream_is_its_last_event(tiny_checkpoint: Path) -> None:
    replay = Replay(token_ids=[50, 51, 52, 53], fail_after=2)
    with running_server(tiny_checkpoint, FakeEngineClient(replay=replay)) as server:
        response = server.post(chat(stream=True))
        assert response.status_code == 200
        *_, last = events(response.text)
        assert last.keys() == {"error"}
        assert last["error"].keys() == {"message", "type", "param", "code"}


def test_full_queue_is_429(tiny_checkpoint: Path) -> None:
    replay = Replay(token_ids=[1, 2], hang_after=0)
    with running_server(tiny_checkpoint, FakeEngineClient(replay=replay), max_queue_len=2) as server:
        with (
            socket.create_connection(("127.0.0.1", server.port)) as first,
            socket.create_connection(("127.0.0.1", server.port)) as second,
        ):
            for connection in (first, second):
                connection.sendall(raw_request(chat()))
            wait_until(lambda: len(server.engine.requests) == 2)
            response = server.post(chat())
            assert error_of(response, 429)["type"] == "rate_limit_error"
            assert response.headers["retry-after"]
            assert server.metric("fovea_requests_rejected_total", reason="queue_full") == 1
        server.engine.replay = Replay()
        assert error_of(server.post(chat(n=3)), 429)
        wait_until(lambda: server.service.lifecycle.num_in_flight == 0)
        assert server.post(chat(n=2)).status_code == 200


def test_request_past_its_deadline_is_504(tiny_checkpoint: Path) -> None:
    replay = Replay(token_ids=[50, 51, 52], hang_after=0)
    with running_server(tiny_checkpoint, FakeEngineClient(replay=replay), request_timeout_seconds=0.3) as server:
        assert error_of(server.post(chat()), 504)["code"] == "timeout"
        server.engine.replay = Replay(token_ids=[50, 51, 52], hang_after=1)
        *_, last = events(server.post(chat(stream=True)).text)
        assert last["error"]["code"] == "timeout"
        assert len(server.engine.aborted) == 2
        assert server.metric("fovea_requests_aborted_total", reason="timeout") == 2


def _post_raw(
    server: RunningServer, body: Any, *, content_type: str = "application/json", path: str = "/v1/chat/completions"
) -> Any:
    return server.http.post(path, content=body, headers={"content-type": content_type})


def test_base64_of_a_picture_is_no_text(server: RunningServer) -> None:
    noisy = noise_jpeg()
    answer = server.post(chat(url_part("data:image/jpeg;base64," + base64.b64encode(noisy).decode()))).json()
    assert answer["usage"]["prompt_tokens"] < 200
    assert answer["model"] == MODEL
