"""What breaks while it serves: the engine in one request or wholly, clients that leave or do not read, a signal under
load. Real server, real engine process, small random checkpoint; each failure with what the metrics then say.

The same failures on a fake engine, where only HTTP matters, are in `test_http_lifecycle` and `test_http_errors`.
"""

import json
import signal
import socket
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.http_server import chat, events, image_part, picture, raw_request, wait_until
from tests.integration import faulty_engine
from tests.served_process import FAULTY_SERVE, Fovea, serving

FLAGS = (
    *("--memory-bytes", "1GiB", "--max-num-seqs", "8", "--max-num-batched-tokens", "256", "--block-size", "16"),
    *("--encoder-graph-budgets", "16,64", "--served-model-name", "tiny"),
)
COLORS = ("red", "green", "blue", "white")


@pytest.fixture(scope="module")
def fovea(tiny_checkpoint: Path) -> Generator[Fovea, None, None]:
    with serving(tiny_checkpoint, *FLAGS, command=FAULTY_SERVE) as server:
        yield server


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Generator[None, None, None]:
    """After each test on the shared server: idle, no block in use, and it serves."""
    yield
    if "fovea" in request.fixturenames:
        server: Fovea = request.getfixturevalue("fovea")
        server.wait_idle()
        assert server.metrics()["fovea_kv_cache_used_blocks", ()] == 0
        assert server.get("/health/ready").status_code == 200
        assert server.text([image_part(), {"type": "text", "text": "Still there?"}]) is not None


def question(number: int) -> list[dict[str, Any]]:
    return [image_part(picture(56, 56, COLORS[number % 4])), {"type": "text", "text": f"Number {number}?"}]


def streamed_text(response: httpx.Response) -> str:
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize(
    "seed",
    [
        faulty_engine.RAISE_AT_ONCE,
        faulty_engine.RAISE_LATER,
        faulty_engine.REFUSED_BY_RUNNER,
        faulty_engine.FAILS_ITS_PICTURES,
    ],
)
def test_request_that_breaks_the_engine_fails_alone(fovea: Fovea, seed: int) -> None:
    alone = [fovea.text(question(number), max_tokens=24) for number in range(6)]
    before = fovea.metrics()
    body = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
    bad = [chat(question(number), seed=seed, stream=bool(number % 2), **body) for number in range(4)]
    good = [chat(question(number), temperature=0, max_tokens=24, stream=True) for number in range(6)]
    with ThreadPoolExecutor(10) as pool:
        failed = [pool.submit(fovea.post, request) for request in bad]
        served = [pool.submit(fovea.post, request) for request in good]
    assert [streamed_text(future.result()) for future in served] == alone
    for request, response in zip(bad, (future.result() for future in failed), strict=True):
        assert "secret" not in response.text
        if request["stream"] and seed == faulty_engine.RAISE_LATER:
            assert response.status_code == 200
            assert "[DONE]" not in response.text
            error = events(response.text)[-1]["error"]
        else:
            assert response.status_code == 500
            error = response.json()["error"]
        assert error["type"] == "server_error"
    fovea.wait_idle()
    after = fovea.metrics()

    def increase(name: str, *labels: str) -> float:
        return after[name, labels] - before[name, labels]

    assert increase("fovea_request_success_total", "error") == 4
    is_step = seed in (faulty_engine.RAISE_AT_ONCE, faulty_engine.RAISE_LATER)
    assert (increase("fovea_engine_failed_steps_total") > 0) == is_step


def test_failed_choices_fail_the_request_and_free_the_others(fovea: Fovea) -> None:
    # Choices have seeds one after the other: the first one is sound.
    request = chat("Tell me.", n=3, seed=faulty_engine.RAISE_AT_ONCE - 1, max_tokens=500, ignore_eos=True)
    assert fovea.post(request).status_code == 500


def test_pause_of_the_engine_shows_and_passes(tiny_checkpoint: Path) -> None:
    flags = (*FLAGS, "--watchdog-seconds", "1")
    with serving(tiny_checkpoint, *flags, command=FAULTY_SERVE) as server, ThreadPoolExecutor(1) as pool:
        slow = pool.submit(server.post, chat("Wait.", seed=faulty_engine.PAUSE, max_tokens=4))
        wait_until(lambda: server.get("/health/ready").status_code == 503)
        wait_until(lambda: server.get("/health/live").status_code == 503)
        assert server.metrics()["fovea_engine_heartbeat_age_seconds", ()] > 1
        assert server.metrics()["fovea_ready", ()] == 0
        assert slow.result().status_code == 200
        wait_until(lambda: server.get("/health/ready").status_code == 200)
        assert server.get("/health/live").status_code == 200
        assert server.metrics()["fovea_ready", ()] == 1


def test_hung_engine_fails_the_probes_and_does_not_keep_the_process_from_ending(tiny_checkpoint: Path) -> None:
    flags = (*FLAGS, "--watchdog-seconds", "1", "--drain-timeout-seconds", "1")
    with serving(tiny_checkpoint, *flags, command=FAULTY_SERVE) as server, ThreadPoolExecutor(1) as pool:
        stuck = pool.submit(server.post, chat("Hang.", seed=faulty_engine.HANG))
        for path in ("/health/ready", "/health/live", "/health"):
            wait_until(lambda path=path: server.get(path).status_code == 503)  # type: ignore[misc]
        engine = server.engine_pid
        server.process.send_signal(signal.SIGTERM)
        assert stuck.result().status_code == 503
        assert server.process.wait(30) == 0
        assert not Path(f"/proc/{engine}").exists()


@pytest.mark.parametrize("seed", [faulty_engine.KILL, faulty_engine.BREAKS_THE_DEVICE])
def test_engine_killed_by_a_request_ends_everything_with_an_error(tiny_checkpoint: Path, seed: int) -> None:
    with serving(tiny_checkpoint, *FLAGS, command=FAULTY_SERVE) as server:
        long = chat("Tell me a long story.", stream=True, max_tokens=3000, ignore_eos=True)
        with server.client.stream("POST", "/v1/chat/completions", json=long) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            killer = server.post(chat("Die.", seed=seed))
            assert killer.status_code == 503
            assert killer.json()["error"]["code"] == "service_unavailable"
            *_, last = lines
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "service_unavailable"
        assert server.process.wait(30) == 1


def test_signal_under_load_lets_every_stream_end(tiny_checkpoint: Path) -> None:
    with serving(tiny_checkpoint, *FLAGS, command=FAULTY_SERVE) as server, ThreadPoolExecutor(24) as pool:
        bodies = [chat(question(n), max_tokens=100, ignore_eos=True, stream=n % 3 > 0) for n in range(24)]
        answers = [pool.submit(server.post, body) for body in bodies]
        wait_until(lambda: server.metrics()["fovea_requests_in_flight", ()] == 24)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.get("/health/ready").status_code == 503)
        refused = server.post(chat())
        assert (refused.status_code, refused.headers["connection"]) == (503, "close")
        for body, answer in zip(bodies, answers, strict=True):
            response = answer.result()
            assert response.status_code == 200
            if body["stream"]:
                streamed_text(response)
            else:
                assert response.json()["usage"]["completion_tokens"] == 100
        assert server.process.wait(30) == 0


def test_clients_that_leave_at_any_time_leave_nothing_behind(fovea: Fovea) -> None:
    before = fovea.metrics()["fovea_requests_aborted_total", ("disconnect",)]
    num_blocks = fovea.metrics()["fovea_kv_cache_used_blocks", ()]
    for number in range(24):
        body = chat(question(number), max_tokens=2000, ignore_eos=True, stream=number % 2 == 0, n=1 + number % 3)
        with socket.create_connection(("127.0.0.1", fovea.port), timeout=20) as connection:
            request = raw_request(body)
            # In the middle of the body, right after it, or once an answer streams.
            connection.sendall(request[: len(request) // 2] if number % 4 == 3 else request)
            if number % 4 == 0:
                while b"data: " not in connection.recv(65536):
                    pass
    wait_until(lambda: fovea.metrics()["fovea_requests_aborted_total", ("disconnect",)] == before + 24)
    fovea.wait_idle()
    assert fovea.metrics()["fovea_kv_cache_used_blocks", ()] == num_blocks


def test_client_that_does_not_read_holds_up_nobody_and_gets_its_answer(fovea: Fovea) -> None:
    # 20 likeliest tokens beside each: some megabytes, more than the kernel buffers.
    body = chat(
        "Tell me.", stream=True, max_tokens=2000, ignore_eos=True, logprobs=True, top_logprobs=20, temperature=0
    )
    before = fovea.usage()["server"].pss_bytes
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(60)
        connection.connect(("127.0.0.1", fovea.port))
        connection.sendall(raw_request(body))
        wait_until(lambda: fovea.metrics()["fovea_time_to_first_token_seconds_count", ()] > 0)
        # The engine is done with it while the client has not read a byte.
        wait_until(lambda: fovea.metrics()["fovea_num_requests_running", ()] == 0, 60)
        assert fovea.metrics()["fovea_requests_in_flight", ()] == 1
        assert fovea.text("Next?") is not None
        assert fovea.usage()["server"].pss_bytes - before < 64 << 20
        received = bytearray()
        while not received.endswith(b"0\r\n\r\n"):
            block = connection.recv(1 << 20)
            assert block
            received += block
    assert received.count(b'"finish_reason":"length"') == 1
    assert b"data: [DONE]" in received
