"""Time from the start of a process to its readiness, as a probe sees it. Ends with one line of JSON."""

import argparse
import json
import signal
import socket
import statistics
import subprocess
import sys
import time

import httpx

from server.plan import table


def measure_startups(arguments: argparse.Namespace) -> int:
    """Starts `fovea serve` again and again; the exit code is 1 if one of the starts fails."""
    seconds = []
    for _ in range(arguments.runs):
        one = measure_startup(arguments)
        if one is None:
            print("the server did not become ready", file=sys.stderr)
            return 1
        seconds.append(round(one, 3))
    print(table(("run", "seconds"), [(str(index + 1), f"{one:.3f}") for index, one in enumerate(seconds)]))
    print()
    print(json.dumps({"ready_seconds": seconds, "median_ready_seconds": statistics.median(seconds)}))
    return 0


def measure_startup(arguments: argparse.Namespace) -> float | None:
    """Seconds until /health/ready answers 200; None if the process ends or takes too long."""
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
                        return time.perf_counter() - start
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
