"""Runs the real application under real uvicorn over a fake engine, in a thread, and speaks to it over real sockets."""

import asyncio
import base64
import io
import json
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import uvicorn
from PIL import Image

from server.app import create_app
from server.serve import uvicorn_config
from server.service import Service
from server.settings import Settings
from tests.fake_engine import FakeEngineClient

MODEL = "tiny"

# Has the engine answer with a text from now on, and with further fields of its `Replay`; gives the text's tokens.
ReplayText: TypeAlias = Callable[..., list[int]]


class RunningServer:
    """A server in a thread. `engine` may be changed between requests; `in_loop` runs code where the server does."""

    def __init__(self, engine: FakeEngineClient, settings: Settings, listener: socket.socket) -> None:
        self.engine = engine
        self.port: int = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = http_client(self.url)
        self.app = create_app(engine, settings)
        self.service: Service = self.app.state.service
        self._server = uvicorn.Server(uvicorn_config(self.app, settings))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener = listener
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=self._server.config.get_loop_factory()) as runner:
            self._loop = runner.get_loop()
            runner.run(self._server.serve(sockets=[self._listener]))

    @property
    def num_connections(self) -> int:
        return len(self._server.server_state.connections)

    def start(self, phase: str | None = "ready") -> None:
        self._thread.start()
        wait_until(lambda: self._server.started)
        if phase is not None:
            wait_until(lambda: self.service.lifecycle.phase == phase)

    def stop(self) -> None:
        self.http.close()
        self._server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()

    def in_loop(self, function: Callable[..., Any], *arguments: Any) -> Any:
        assert self._loop is not None

        async def call() -> Any:
            return function(*arguments)

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(10)

    def start_in_loop(self, coroutine: Any) -> None:
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def post(self, body: Any, path: str = "/v1/chat/completions", **keywords: Any) -> httpx.Response:
        return self.http.post(path, json=body, **keywords)

    def get(self, path: str) -> httpx.Response:
        return self.http.get(path)

    def metric(self, name: str, **labels: str) -> float:
        value = self.service.metrics.registry.get_sample_value(name, labels)
        assert value is not None, f"{name}{labels} is not exported"
        return value


def http_client(url: str) -> httpx.Client:
    """A client that has nothing to do with the machine's proxies and certificates."""
    return httpx.Client(base_url=url, timeout=20, trust_env=False, verify=False)


@contextmanager
def running_server(
    checkpoint: Path, engine: FakeEngineClient | None = None, *, phase: str | None = "ready", **settings: Any
) -> Generator[RunningServer, None, None]:
    """A started server, ended at the end; `phase` None does not wait until it is ready."""
    values = {"model": str(checkpoint), "served_model_name": (MODEL,), "image_workers": 1, **settings}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = RunningServer(engine or FakeEngineClient(), Settings(**values), listener)
        server.start(phase)
        try:
            yield server
        finally:
            server.stop()


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Polls; a failure means that it never came, not that it came late."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def chat(content: Any = "Hello", **fields: Any) -> dict[str, Any]:
    """A chat request with one message of a user."""
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}


def raw_request(body: Any) -> bytes:
    """A chat request as bytes for a socket."""
    payload = json.dumps(body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(payload)}\r\n\r\n"
    )
    return head.encode() + payload


def exchange(server: RunningServer, *parts: bytes) -> bytes:
    """Sends parts as they are and reads until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        answer = b""
        try:
            for part in parts:
                connection.sendall(part)
        except OSError:
            pass  # the server hung up in the middle of what it did not want
        try:
            while received := connection.recv(65536):
                answer += received
        except ConnectionResetError:
            pass
        return answer


def picture(width: int = 56, height: int = 56, color: str = "red", kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), color).save(buffer, kind)
    return buffer.getvalue()


def data_url(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def image_part(data: bytes | None = None) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(picture() if data is None else data)}}


def events(text: str) -> list[Any]:
    """The data of each event: parsed JSON, and the end mark as it is."""
    lines = [block.removeprefix("data: ") for block in text.split("\n\n") if block]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]
