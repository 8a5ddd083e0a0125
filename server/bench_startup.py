"""Time from the start of a process to its readiness, as a probe sees it. Ends with one line of JSON."""

import argparse
import json
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

import httpx

from server.plan import table

PHASE = r'^fovea_startup_phase_seconds\{phase="(\w+)"\} (\S+)$'


def measure_startups(arguments: argparse.Namespace) -> int:
    """Starts `fovea serve` again and again; the exit code is 1 if one of the starts fails."""
    starts: list[Start] = []
    for _ in range(arguments.runs):
        one = measure_startup(arguments)
        if one is None:
            print("the server did not become ready", file=sys.stderr)
            return 1
        starts.append(one)
    seconds = [round(one.ready_seconds, 3) for one in starts]
    phases = {
        name: statistics.median(one.phase_seconds.get(name, 0.0) for one in starts) for name in starts[0].phase_seconds
    }
    print(table(("run", "seconds"), [(str(index + 1), f"{one:.3f}") for index, one in enumerate(seconds)]))
    print()
    print(table(("phase of the engine, median", "seconds"), [(name, f"{one:.3f}") for name, one in phases.items()]))
    print()
    result = {"ready_seconds": seconds, "median_ready_seconds": statistics.median(seconds)}
    print(json.dumps({**result, "median_phase_seconds": {name: round(one, 3) for name, one in phases.items()}}))
    return 0


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start: seconds from the process's begin to readiness, and of each phase of its engine."""

    ready_seconds: float
    phase_seconds: dict[str, float]


def phases_of(metrics: str) -> dict[str, float]:
    """Seconds by phase, from the text of /metrics."""
    return {name: float(value) for name, value in re.findall(PHASE, metrics, re.MULTILINE)}


def measure_startup(arguments: argparse.Namespace) -> Start | None:
    """Asks /health/ready until it answers 200; None if the process ends or takes too long."""
    port = free_port()
    command = [sys.executable, "-m", "server", "serve", *arguments.serve_arguments, "--port", str(port)]
    if arguments.config is not None:
        command += ["--config", str(arguments.config)]
    start = time.perf_counter()
    process = subprocess.Popen([*command, "--log-level", "error"])
    try:
        # A client for each question would load certificates each time, on the cores that the server starts on.
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, verify=False, timeout=1) as client:
            while time.perf_counter() - start < arguments.timeout and process.poll() is None:
                try:
                    if client.get("/health/ready").status_code == 200:
                        seconds = time.perf_counter() - start
                        return Start(ready_seconds=seconds, phase_seconds=phases_of(client.get("/metrics").text))
                except httpx.TransportError:
                    pass
                time.sleep(0.02)
        return None
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
