"""Loading, health, clients that leave, the engine's death, the drain: with real sockets, signals and exit codes."""

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.bench_startup import free_port
from server.lifecycle import ABORT_REASONS
from tests.fake_engine import FakeEngineClient, Replay
from tests.http_server import RunningServer, chat, events, http_client, raw_request, running_server, wait_until

ROOT = Path(__file__).parents[2]
SLOW = {"token_ids": list(range(40, 90)), "delay_seconds": 0.02}


def read_until(connection: socket.socket, mark: bytes, count: int = 1) -> bytes:
    received = b""
    while received.count(mark) < count:
        block = connection.recv(65536)
        assert block, f"the connection ended: {received!r}"
        received += block
    return received


def test_health_while_loading_and_after(tiny_checkpoint: Path) -> None:
    engine = FakeEngineClient(is_start_held=True)
    with running_server(tiny_checkpoint, engine, phase=None) as server:
        assert server.get("/health").status_code == 503
        assert server.get("/health/ready").status_code == 503
        assert server.get("/health/live").status_code == 200
        refused = server.post(chat())
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert refused.json()["error"]["code"] == "service_unavailable"
        assert server.metric("fovea_ready") == 0
        server.in_loop(engine.release_start)
        wait_until(lambda: server.get("/health/ready").status_code == 200)
        assert server.get("/health").status_code == 200
        assert server.metric("fovea_ready") == 1
        assert server.post(chat()).status_code == 200


def test_probes_answer_head_as_they_answer_get(tiny_checkpoint: Path) -> None:
    with running_server(tiny_checkpoint) as server:
        for path in ("/health", "/health/live", "/health/ready"):
            response = server.http.head(path)
            assert response.status_code == 200, path
            assert response.content == b""


def test_hung_engine_fails_liveness(tiny_checkpoint: Path) -> None:
    with running_server(tiny_checkpoint, watchdog_seconds=5) as server:
        server.engine.heartbeat_age = 6
        for path in ("/health", "/health/live", "/health/ready", "/livez", "/readyz"):
            assert server.get(path).status_code == 503
        assert server.metric("fovea_ready") == 0
        # Not yet hung, and yet no place to send more to.
        server.engine.heartbeat_age = 3
        assert server.get("/health/live").status_code == 200
        assert server.get("/health/ready").status_code == 503
        assert server.metric("fovea_ready") == 0
        server.engine.heartbeat_age = 1
        assert server.get("/health/live").status_code == 200
        assert server.get("/health/ready").status_code == 200
        assert server.metric("fovea_ready") == 1


@pytest.mark.parametrize("num_choices", [1, 3])
def test_client_that_leaves_a_stream_aborts_it(tiny_checkpoint: Path, num_choices: int) -> None:
    with running_server(tiny_checkpoint, FakeEngineClient(replay=Replay(**SLOW))) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(raw_request(chat(stream=True, n=num_choices)))
            read_until(connection, b"data: ", 3 * num_choices)
            assert server.engine.num_running == num_choices
        assert_aborted(server, num_choices)


def test_client_that_leaves_before_the_answer_aborts_it(tiny_checkpoint: Path) -> None:
    with running_server(tiny_checkpoint, FakeEngineClient(replay=Replay(**SLOW))) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(raw_request(chat()))
            wait_until(lambda: server.engine.num_running == 1)
        assert_aborted(server, 1)


def test_client_that_leaves_while_it_sends_harms_nobody(tiny_checkpoint: Path) -> None:
    with running_server(tiny_checkpoint) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(raw_request(chat("x" * 1000))[:-500])
        wait_until(lambda: server.metric("fovea_requests_aborted_total", reason="disconnect") == 1)
        assert server.post(chat()).status_code == 200


def test_client_that_does_not_read_is_cut_off_at_the_deadline(tiny_checkpoint: Path) -> None:
    engine = FakeEngineClient(replay=Replay(token_ids=[50] * 100_000), max_model_len=200_000)
    with running_server(tiny_checkpoint, engine, request_timeout_seconds=1) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
            connection.sendall(raw_request(chat(stream=True)))
            wait_until(lambda: server.metric("fovea_requests_aborted_total", reason="timeout") == 1)
            assert server.service.lifecycle.num_in_flight == 0
            assert len(engine.aborted) == 1
            # What was on the way still comes, and then the error.
            received = b""
            while not received.endswith(b"0\r\n\r\n"):
                received = received[-1000:] + connection.recv(1 << 20)
            assert b'"code":"timeout"' in received
        engine.replay = Replay()
        assert server.post(chat()).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_stops_reading_is_cut_off(tiny_checkpoint: Path, stream: bool) -> None:
    """An answer of megabytes, of which nothing is read: neither it nor its connection stays."""
    engine = FakeEngineClient(replay=Replay(token_ids=[50] * 4000), max_model_len=200_000)
    with running_server(tiny_checkpoint, engine, write_timeout_seconds=0.3) as server, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(20)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(raw_request(chat(stream=stream, logprobs=True, top_logprobs=20)))
        if stream:
            wait_until(lambda: server.metric("fovea_requests_aborted_total", reason="stalled") == 1)
            assert len(engine.aborted) == 1
        else:
            # The answer is written whole before it can be seen that nobody reads it.
            wait_until(lambda: server.metric("fovea_request_success_total", finish_reason="stop") == 1)
        wait_until(lambda: server.service.lifecycle.num_in_flight == 0)
        wait_until(lambda: server.num_connections == 0)
        assert server.metric("fovea_requests_aborted_total", reason="disconnect") == 0
        with pytest.raises(ConnectionResetError):
            read_until(connection, b"never comes")
        engine.replay = Replay()
        assert server.post(chat()).status_code == 200


def test_client_that_reads_slowly_gets_its_answer(tiny_checkpoint: Path) -> None:
    """It takes several times the longest pause, but there is no such pause."""
    engine = FakeEngineClient(replay=Replay(token_ids=[50] * 20_000), max_model_len=200_000)
    with running_server(tiny_checkpoint, engine, write_timeout_seconds=1) as server, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(20)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(raw_request(chat(stream=True)))
        received = bytearray()
        for _ in range(30):
            time.sleep(0.1)
            received += connection.recv(64 * 1024)
        while not received.endswith(b"0\r\n\r\n"):
            block = connection.recv(1 << 20)
            assert block
            received += block
        assert b"data: [DONE]" in received


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("pause", [0.0, 0.02])
def test_client_that_ends_its_sending_gets_its_answer(tiny_checkpoint: Path, stream: bool, pause: float) -> None:
    """A pause between tokens lets the end of the sending come long before the end of the answer."""
    engine = FakeEngineClient(replay=Replay(token_ids=[50] * 20, delay_seconds=pause))
    with running_server(tiny_checkpoint, engine) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
            connection.sendall(raw_request(chat(stream=stream)))
            connection.shutdown(socket.SHUT_WR)
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            assert answer.status == 200
            body = answer.read()
            assert (b"data: [DONE]" in body) if stream else json.loads(body)["choices"]
            # And the server closes, too.
            assert connection.recv(1) == b""
        wait_until(lambda: server.num_connections == 0)
        assert engine.aborted == []
        assert sum(server.metric("fovea_requests_aborted_total", reason=reason) for reason in ABORT_REASONS) == 0


def test_client_that_ends_its_sending_within_a_request_is_gone(tiny_checkpoint: Path) -> None:
    with running_server(tiny_checkpoint) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
            connection.sendall(raw_request(chat())[:-5])
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(100) == b""
        wait_until(lambda: server.metric("fovea_requests_aborted_total", reason="disconnect") == 1)


def assert_aborted(server: RunningServer, num_choices: int) -> None:
    wait_until(lambda: server.engine.num_running == 0)
    assert len(server.engine.aborted) == num_choices
    wait_until(lambda: server.service.lifecycle.num_in_flight == 0)
    assert server.metric("fovea_requests_aborted_total", reason="disconnect") == 1
    assert server.metric("fovea_request_success_total", finish_reason="abort") == num_choices
    server.engine.replay = Replay()
    assert server.post(chat()).status_code == 200


def test_engine_death_ends_what_is_in_flight(tiny_checkpoint: Path) -> None:
    with running_server(tiny_checkpoint, FakeEngineClient(replay=Replay(**SLOW))) as server:
        answers: dict[bool, httpx.Response] = {}

        def ask(stream: bool) -> None:
            answers[stream] = server.post(chat(stream=stream))

        threads = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
        for thread in threads:
            thread.start()
        wait_until(lambda: server.metric("fovea_time_to_first_token_seconds_count") == 2)
        server.in_loop(server.engine.die)
        for thread in threads:
            thread.join(20)
        assert answers[False].status_code == 503
        *_, last = events(answers[True].text)
        assert last["error"]["code"] == "service_unavailable"
        assert server.get("/health").status_code == 503
        assert server.post(chat()).status_code == 503
        assert server.metric("fovea_requests_aborted_total", reason="engine_dead") == 2


def test_engine_that_cannot_start_is_told(tiny_checkpoint: Path) -> None:
    engine = FakeEngineClient(start_error="no block fits")
    with running_server(tiny_checkpoint, engine, phase="dead") as server:
        assert server.service.lifecycle.failure == "no block fits"
        assert server.get("/health").status_code == 503


def test_directory_without_a_checkpoint_is_told(tmp_path: Path) -> None:
    with running_server(tmp_path, phase="dead") as server:
        assert "config.json" in str(server.service.lifecycle.failure)


def test_drain_refuses_new_requests_and_finishes_old_ones(tiny_checkpoint: Path) -> None:
    with running_server(tiny_checkpoint, FakeEngineClient(replay=Replay(**SLOW))) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(raw_request(chat(stream=True)))
            received = read_until(connection, b"data: ", 3)
            server.start_in_loop(server.service.lifecycle.drain(30))
            wait_until(lambda: server.service.lifecycle.phase == "draining")
            assert server.get("/health/ready").status_code == 503
            assert server.get("/health/live").status_code == 200
            refused = server.post(chat())
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            assert refused.headers["connection"] == "close"
            received += read_until(connection, b"[DONE]")
        assert received.count(b'"content":') == 51
        wait_until(server.service.lifecycle.ended.is_set)
        assert server.engine.aborted == []


@contextlib.contextmanager
def serving_process(
    checkpoint: Path, replay: dict[str, Any], **settings: Any
) -> Generator[tuple[subprocess.Popen[bytes], httpx.Client], None, None]:
    port = free_port()
    arguments = [str(checkpoint), str(port), json.dumps(replay), json.dumps(settings)]
    command = [sys.executable, "-m", "tests.fake_serve", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE)
    with http_client(f"http://127.0.0.1:{port}") as client:

        def is_ready() -> bool:
            assert process.poll() is None, process.communicate()[1].decode()
            try:
                return client.get("/health/ready").status_code == 200
            except httpx.TransportError:
                return False

        try:
            wait_until(is_ready, 60)
            yield process, client
        finally:
            process.kill()
            process.communicate()


@contextlib.contextmanager
def streaming(client: httpx.Client) -> Generator[Iterator[str], None, None]:
    """The lines of a stream that has begun, without the first."""
    with client.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as response:
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        yield lines


def error_code(line: str) -> str:
    return str(json.loads(line.removeprefix("data: "))["error"]["code"])


def test_sigterm_finishes_the_stream_and_exits_with_zero(tiny_checkpoint: Path) -> None:
    with serving_process(tiny_checkpoint, SLOW) as (process, client), streaming(client) as lines:
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: client.get("/health/ready").status_code == 503)
        refused = client.post("/v1/chat/completions", json=chat())
        assert (refused.status_code, refused.headers["connection"]) == (503, "close")
        assert list(lines)[-1] == "data: [DONE]"
        assert process.wait(20) == 0


HANGING = {"token_ids": [50, 51, 52], "hang_after": 1}


def test_drain_timeout_cuts_the_stream_with_an_error(tiny_checkpoint: Path) -> None:
    with (
        serving_process(tiny_checkpoint, HANGING, drain_timeout_seconds=0.3) as (process, client),
        streaming(client) as lines,
    ):
        process.send_signal(signal.SIGTERM)
        assert error_code(list(lines)[-1]) == "service_unavailable"
        assert process.wait(20) == 0


def test_second_signal_does_not_wait(tiny_checkpoint: Path) -> None:
    with serving_process(tiny_checkpoint, HANGING) as (process, client), streaming(client) as lines:
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: client.get("/health/ready").status_code == 503)
        process.send_signal(signal.SIGINT)
        assert error_code(list(lines)[-1]) == "service_unavailable"
        assert process.wait(20) == 0


def test_engine_death_exits_with_an_error(tiny_checkpoint: Path) -> None:
    with serving_process(tiny_checkpoint, HANGING) as (process, client), streaming(client) as lines:
        process.send_signal(signal.SIGUSR1)
        assert error_code(list(lines)[-1]) == "service_unavailable"
        assert process.wait(20) == 1


def test_log_says_where_it_listens_and_when_it_is_ready(tiny_checkpoint: Path) -> None:
    with serving_process(tiny_checkpoint, {}) as (process, client):
        process.send_signal(signal.SIGTERM)
        log = process.communicate(timeout=20)[1].decode()
    url = str(client.base_url.copy_with(path="/"))
    lines = [json.loads(line)["message"] for line in log.splitlines()]
    messages = [message for message in lines if message != "request"]
    assert messages[:2] == [f"listening on {url}; loading the model", f"ready: tiny on {url}"]
    assert not any("startup" in message for message in messages)


def test_log_holds_no_payload(tiny_checkpoint: Path) -> None:
    with serving_process(tiny_checkpoint, {}) as (process, client):
        secret = "data:image/png;base64,c2VzYW1l"
        for content in ("open sesame", [{"type": "image_url", "image_url": {"url": secret}}]):
            client.post("/v1/chat/completions?key=sesame", json=chat(content))
        process.send_signal(signal.SIGTERM)
        log = process.communicate(timeout=20)[1].decode()
    assert "sesame" not in log
    assert "c2VzYW1l" not in log
    lines = [json.loads(line) for line in log.splitlines()]
    assert [line["status"] for line in lines if line.get("handler") == "/v1/chat/completions"] == [200, 400]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
