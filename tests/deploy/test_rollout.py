"""A server behind nginx is taken away while it streams: nobody's request fails, and the process ends with 0."""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Generator
from pathlib import Path

import httpx
import pytest

from server.bench_startup import free_port
from server.settings import load_settings
from tests.deploy.manifests import DEPLOY, tool
from tests.http_server import chat, events, http_client, wait_until
from tests.integration.test_http_lifecycle import serving_process

CONFIG = DEPLOY / "nginx" / "fovea.conf"
NUM_TOKENS = 40
REPLAY = {"token_ids": list(range(40, 40 + NUM_TOKENS)), "delay_seconds": 0.02}
NUM_CLIENTS = 6

MAIN = """
daemon off;
pid nginx.pid;
error_log stderr error;
events {{}}
http {{
    access_log off;
    client_body_temp_path body;
    proxy_temp_path proxy;
    fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;
    {content}
}}
"""


@contextlib.contextmanager
def nginx(folder: Path, *ports: int) -> Generator[str, None, None]:
    """Our configuration over servers on other ports, as a base URL."""
    program = tool("nginx", comes_with="Debian's package nginx-light")
    listen = free_port()
    content = CONFIG.read_text(encoding="utf-8")
    for before, after in zip((8000, 8001, 8002), (listen, *ports), strict=True):
        assert content.count(f"127.0.0.1:{before}") == 1
        content = content.replace(f"127.0.0.1:{before}", f"127.0.0.1:{after}")
    user = "user root;" if os.geteuid() == 0 else ""
    (folder / "nginx.conf").write_text(user + MAIN.format(content=content), encoding="utf-8")
    command = [program, "-p", str(folder), "-c", "nginx.conf", "-e", "stderr"]
    checked = subprocess.run([*command, "-t"], capture_output=True, text=True, timeout=30, check=False)
    assert checked.returncode == 0, checked.stderr
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{listen}"
    try:
        with http_client(url) as client:

            def answers() -> bool:
                try:
                    return client.get("/health").status_code == 200
                except httpx.TransportError:
                    return False

            wait_until(answers)
        yield url
    finally:
        process.send_signal(signal.SIGQUIT)
        process.wait(20)


def port_of(client: httpx.Client) -> int:
    port = client.base_url.port
    assert port is not None
    return port


class Clients:
    """Threads that stream one answer after the other until `stop`. `failures`: what was not a whole answer."""

    def __init__(self, url: str) -> None:
        self.num_answers = 0
        self.failures: list[str] = []
        self._url = url
        self._is_stopping = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run) for _ in range(NUM_CLIENTS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._is_stopping.set()
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()

    def _run(self) -> None:
        with http_client(self._url) as client:
            while not self._is_stopping.is_set():
                failure = self._ask(client)
                with self._lock:
                    self.num_answers += 1
                    self.failures += [failure] if failure else []

    def _ask(self, client: httpx.Client) -> str | None:
        try:
            response = client.post("/v1/chat/completions", json=chat(stream=True))
        except httpx.TransportError as error:
            return f"{type(error).__name__}: {error}"
        if response.status_code != 200:
            return f"{response.status_code}: {response.text}"
        *chunks, end = events(response.text)
        contents = [choice for chunk in chunks if "choices" in chunk for choice in chunk["choices"]]
        is_whole = end == "[DONE]" and contents[-1]["finish_reason"] == "stop" and len(contents) == NUM_TOKENS + 2
        return None if is_whole else response.text[-300:]


def metric(client: httpx.Client, name: str) -> float:
    (line,) = [line for line in client.get("/metrics").text.splitlines() if line.startswith(f"{name} ")]
    return float(line.split()[1])


def in_flight(client: httpx.Client) -> float:
    return metric(client, "fovea_requests_in_flight")


def test_no_request_fails_while_a_server_is_taken_away(tiny_checkpoint: Path, tmp_path: Path) -> None:
    tool("nginx", comes_with="Debian's package nginx-light")
    with (
        serving_process(tiny_checkpoint, REPLAY, drain_timeout_seconds=20) as (leaving, leaving_http),
        serving_process(tiny_checkpoint, REPLAY, drain_timeout_seconds=20) as (staying, staying_http),
        nginx(tmp_path, port_of(leaving_http), port_of(staying_http)) as url,
    ):
        clients = Clients(url)
        try:
            wait_until(lambda: in_flight(leaving_http) >= 2 and in_flight(staying_http) >= 2)
            leaving.send_signal(signal.SIGTERM)
            # At once, while its streams go on.
            wait_until(lambda: leaving_http.get("/health/ready").status_code == 503)
            assert in_flight(leaving_http) >= 1, "readiness fell only when the streams had ended"
            assert leaving_http.get("/health/live").status_code == 200
            assert leaving.wait(20) == 0
            before = clients.num_answers
            wait_until(lambda: clients.num_answers >= before + 2 * NUM_CLIENTS)
        finally:
            clients.stop()
        assert clients.failures == []
        assert staying.poll() is None
        assert in_flight(staying_http) == 0


def test_a_server_that_vanishes_is_noticed_by_these_clients(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """The test above can fail: SIGKILL breaks streams."""
    tool("nginx", comes_with="Debian's package nginx-light")
    with (
        serving_process(tiny_checkpoint, REPLAY) as (leaving, leaving_http),
        serving_process(tiny_checkpoint, REPLAY) as (_, staying_http),
        nginx(tmp_path, port_of(leaving_http), port_of(staying_http)) as url,
    ):
        clients = Clients(url)
        try:
            # Past a first token: before that, nginx may still ask the other one.
            wait_until(lambda: metric(leaving_http, "fovea_time_to_first_token_seconds_count") >= 1)
            leaving.kill()
            wait_until(lambda: bool(clients.failures))
        finally:
            clients.stop()


@pytest.mark.parametrize(
    ("directive", "setting"),
    [("client_max_body_size", "max_body_bytes"), ("proxy_read_timeout", "request_timeout_seconds")],
)
def test_nginx_allows_what_the_server_allows(directive: str, setting: str) -> None:
    (line,) = [line.strip() for line in CONFIG.read_text(encoding="utf-8").splitlines() if directive in line]
    number = line.removeprefix(directive).strip(" ;")
    value = int(number[:-1]) * {"m": 1 << 20, "s": 1}[number[-1]]
    assert value >= getattr(load_settings({}, environ={}), setting)
