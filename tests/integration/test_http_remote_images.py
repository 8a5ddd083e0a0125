"""Pictures behind URLs, over HTTP: off by default; fetched from named hosts only; failures are the request's alone."""

import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest

from tests.http_server import RunningServer, chat, image_part, picture, running_server, wait_until

URL_PATH = "messages[0].content[0].image_url.url"
LOOPBACK = (ip_network("127.0.0.0/8"),)


class PictureHost:
    """A server of pictures in a thread: answers by path, and keeps the request lines."""

    def __init__(self, listener: socket.socket) -> None:
        self.port: int = listener.getsockname()[1]
        self.lines: list[str] = []
        self.is_released = threading.Event()
        self._listener = listener

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    def run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            line = connection.recv(65536).decode().split("\r\n")[0]
            self.lines.append(line)
            path = line.split(" ")[1]
            if path == "/slow":
                self.is_released.wait(30)
            answers: dict[str, tuple[str, bytes]] = {
                "/red.png": ("200 OK\r\ncontent-type: text/html", picture(color="red")),
                "/page": ("200 OK\r\ncontent-type: image/png", b"<html>no picture</html>"),
                "/cut.png": ("200 OK", picture(color="red")[:50]),
                "/inside": ("302 Found\r\nlocation: http://169.254.169.254/latest/meta-data", b""),
            }
            status, body = answers.get(path, ("404 Not Found", b"secret page"))
            connection.sendall(f"HTTP/1.1 {status}\r\nconnection: close\r\n\r\n".encode() + body)


@pytest.fixture(scope="module")
def host() -> Generator[PictureHost, None, None]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = PictureHost(listener)
        threading.Thread(target=one.run, daemon=True).start()
        yield one
        one.is_released.set()
        listener.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def server(tiny_checkpoint: Path, host: PictureHost) -> Generator[RunningServer, None, None]:
    with running_server(
        tiny_checkpoint,
        allowed_media_domains=(f"127.0.0.1:{host.port}",),
        allowed_media_addresses=LOOPBACK,
        media_timeout_seconds=20,
    ) as server:
        yield server


def ask(server: RunningServer, url: str, **fields: Any) -> Any:
    return server.post(chat([{"type": "image_url", "image_url": {"url": url}}], **fields))


def error_of(response: Any) -> dict[str, Any]:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", URL_PATH)
    assert "169.254" not in error["message"]
    assert "secret" not in error["message"]
    return dict(error)


def test_picture_is_fetched_whatever_its_content_type_says(server: RunningServer, host: PictureHost) -> None:
    assert ask(server, host.url("/red.png")).status_code == 200
    assert tuple(server.engine.pixels[-1][0][0, 0]) == (255, 0, 0)
    assert server.post(chat([image_part(picture(color="red"))])).status_code == 200
    assert server.engine.requests[-1].images == server.engine.requests[-2].images
    assert server.metric("fovea_images_total", source="http", format="png", outcome="ok") == 1
    assert server.metric("fovea_image_fetch_seconds_count") == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "code"),
    [("/page", "invalid_image"), ("/cut.png", "invalid_image"), ("/none", "invalid_image_url"),
     ("/inside", "invalid_image_url")],
)  # fmt: skip
def test_what_is_no_picture_is_the_requests_fault(
    server: RunningServer, host: PictureHost, path: str, code: str, stream: bool
) -> None:
    num_before = len(host.lines)
    assert error_of(ask(server, host.url(path), stream=stream))["code"] == code
    assert len(host.lines) == num_before + 1  # no second try


def test_hosts_that_are_not_named_get_no_request(server: RunningServer, host: PictureHost) -> None:
    num_before = len(host.lines)
    for url in (
        host.url("/red.png", "localhost"), host.url("/red.png", "localhost."), host.url("/red.png", "2130706433"),
        host.url("/red.png", "0x7f000001"), host.url("/red.png", "[::ffff:127.0.0.1]"),
        host.url("/red.png", "u@127.0.0.1"),
        f"http://127.0.0.1:{server.port}/health", "http://127.0.0.1/", f"ftp://127.0.0.1:{host.port}/red.png",
        f"http://127.0.0.1:{host.port}\\@localhost/red.png", "file:///etc/passwd",
    ):  # fmt: skip
        assert error_of(ask(server, url))["code"] == "invalid_image_url"
    assert len(host.lines) == num_before


def test_named_host_with_a_private_address_gets_no_request(tiny_checkpoint: Path, host: PictureHost) -> None:
    num_before = len(host.lines)
    with running_server(tiny_checkpoint, allowed_media_domains=(f"localhost:{host.port}", f"*:{host.port}")) as server:
        for name in ("localhost", "127.0.0.1", "[::1]"):
            message = error_of(ask(server, host.url("/red.png", name)))["message"]
            assert message == "The image URL's server could not be reached."
    assert len(host.lines) == num_before


def test_fetching_is_off_by_default(tiny_checkpoint: Path, host: PictureHost) -> None:
    num_before = len(host.lines)
    with running_server(tiny_checkpoint) as server:
        assert "disabled" in error_of(ask(server, host.url("/red.png")))["message"]
    assert len(host.lines) == num_before


def test_urls_in_text_are_text(server: RunningServer, host: PictureHost) -> None:
    num_before = len(host.lines)
    assert server.post(chat(f"![]({host.url('/red.png')}) {host.url('/red.png')}")).status_code == 200
    assert len(host.lines) == num_before


@contextmanager
def in_thread(call: Callable[[], Any]) -> Generator[list[Any], None, None]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    yield results
    thread.join(20)


def test_slow_host_delays_nobody_else(server: RunningServer, host: PictureHost) -> None:
    num_before = len(host.lines)
    with in_thread(lambda: ask(server, host.url("/slow"))) as results:
        wait_until(lambda: len(host.lines) == num_before + 1)
        assert server.post(chat([image_part()])).status_code == 200
        assert ask(server, host.url("/red.png")).status_code == 200
        assert results == []
        host.is_released.set()
    assert results[0].status_code == 400
