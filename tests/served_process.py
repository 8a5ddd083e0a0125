"""`fovea serve` as an operator runs it, in processes of its own, and what the system says of them."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from server.bench_startup import free_port
from tests.http_server import chat, http_client, wait_until

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
SERVE = ("-m", "server", "serve")
# The same over an engine that breaks on request.
FAULTY_SERVE = ("-m", "tests.faulty_serve")

Metrics = dict[tuple[str, tuple[str, ...]], float]


@dataclass(frozen=True)
class Fovea:
    """A running service. `log`: where its standard error goes."""

    process: "subprocess.Popen[bytes]"
    client: httpx.Client
    log: Path | None = None

    @property
    def url(self) -> str:
        return str(self.client.base_url).rstrip("/")

    @property
    def port(self) -> int:
        port = self.client.base_url.port
        assert port is not None
        return port

    def post(self, body: Any, **keywords: Any) -> httpx.Response:
        return self.client.post("/v1/chat/completions", json=body, **keywords)

    def get(self, path: str) -> httpx.Response:
        return self.client.get(path)

    def text(self, content: Any, **fields: Any) -> str:
        response = self.post(chat(content, temperature=0, **{"max_tokens": 12, **fields}))
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["message"]["content"])

    def metrics(self) -> Metrics:
        """Values by name and label values."""
        return parse_metrics(self.client.get("/metrics").text)

    def wait_idle(self) -> None:
        """Until the engine has nothing to do and no request is in flight, as the metrics say."""
        wait_until(
            lambda: all(
                self.metrics()[name, ()] == 0
                for name in ("fovea_num_requests_running", "fovea_num_requests_waiting", "fovea_requests_in_flight")
            )
        )

    def children(self, name: str) -> list[int]:
        """Process ids of the server's children whose command line holds `name`."""
        pid = self.process.pid
        listed = " ".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")).split()
        return [int(child) for child in listed if name.encode() in Path(f"/proc/{child}/cmdline").read_bytes()]

    @property
    def engine_pid(self) -> int:
        (pid,) = self.children("engine_process")
        return pid

    def usage(self) -> "dict[str, ProcessUsage]":
        """Memory and file descriptors of server, engine and image workers; of the latter, the sum."""
        workers = [process_usage(pid) for pid in self.children("image_worker")]
        return {
            "server": process_usage(self.process.pid),
            "engine": process_usage(self.engine_pid),
            "image_workers": ProcessUsage(
                sum(worker.pss_bytes for worker in workers), sum(worker.num_descriptors for worker in workers)
            ),
        }


@dataclass(frozen=True)
class ProcessUsage:
    """Memory in bytes, shared pages counted by their share (Pss), and the number of open file descriptors."""

    pss_bytes: int
    num_descriptors: int


def process_usage(pid: int) -> ProcessUsage:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    (pss,) = [int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")]
    return ProcessUsage(pss * 1024, len(os.listdir(f"/proc/{pid}/fd")))


def parse_metrics(text: str) -> Metrics:
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def last_line(output: Any) -> str:
    output.seek(0)
    lines = output.read().decode(errors="replace").splitlines()
    return lines[-1] if lines else "it said nothing"


@contextmanager
def serving(
    checkpoint: Path | str,
    *flags: str,
    command: Sequence[str] = SERVE,
    log: Path | None = None,
    environment: Mapping[str, str] = ENVIRONMENT,
) -> Generator[Fovea, None, None]:
    """Runs the service on a free port until it is ready, and ends it at the end."""
    port = free_port()
    arguments = [sys.executable, *command, str(checkpoint), "--port", str(port), *flags]
    # Closed below, with the client.
    output: Any = tempfile.TemporaryFile() if log is None else log.open("w+b")  # noqa: SIM115
    process = subprocess.Popen(arguments, cwd=ROOT, env=environment, stderr=output)
    with output, http_client(f"http://127.0.0.1:{port}") as client:

        def is_ready() -> bool:
            assert process.poll() is None, f"it ended with {process.returncode}: {last_line(output)}"
            try:
                return client.get("/health/ready").status_code == 200
            except httpx.TransportError:
                return False

        try:
            wait_until(is_ready, 120)
            yield Fovea(process, client, log)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
