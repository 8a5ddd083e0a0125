"""How many tokens a second the server streams, and whether it still answers probes meanwhile: over an engine that
replays tokens at once, so that nothing but HTTP, text and JSON counts.

    python -m benchmarks.stream_capacity

Writes `benchmarks/results/stream-capacity.json`. The load runs at real-time priority where that is allowed.
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from benchmarks.compare_cpu import ROOT, commit, machine, wait_ready
from tests.checkpoint_factory import build_checkpoint

RESULT = ROOT / "benchmarks" / "results" / "stream-capacity.json"

# What issue 6 asks for.
WANTED_TOKENS_PER_SECOND = 15_000
WANTED_PROBE_MS = 50

PROBE_PAUSE_SECONDS = 0.02
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
TOKEN_MARK = b'"content":"'


@contextmanager
def replaying_server(checkpoint: Path, num_tokens: int, log: Path) -> Iterator[tuple[int, int]]:
    """The server over a replaying engine; gives its port and its process id."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Tokens of words: each of them is a chunk of text.
    replay = {"token_ids": [300 + index % 100 for index in range(num_tokens)], "finish_reason": "length"}
    command = [sys.executable, "-m", "tests.fake_serve", str(checkpoint), str(port), json.dumps(replay), "{}"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT)
        try:
            wait_ready(f"http://127.0.0.1:{port}", process, log, path="/health/ready")
            yield port, process.pid
        finally:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            process.wait(timeout=30)


async def stream(port: int, body: bytes) -> int:
    """One streamed answer over a connection of its own; the number of its chunks with text."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: server\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode() + body)
    num_tokens, rest = 0, b""
    while block := await reader.read(1 << 16):
        # A mark may be cut in two by the end of a block.
        text = rest + block
        num_tokens += text.count(TOKEN_MARK)
        rest = text[-(len(TOKEN_MARK) - 1) :]
    writer.close()
    assert rest.endswith(b"0\r\n\r\n"), f"an answer was cut off: {rest!r}"
    return num_tokens


async def probes(port: int, milliseconds: list[float]) -> None:
    """Asks for the server's health again and again, as an orchestrator does, until it is cancelled."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        while True:
            start = time.perf_counter()
            (await client.get("/health/live")).raise_for_status()
            milliseconds.append((time.perf_counter() - start) * 1000)
            await asyncio.sleep(PROBE_PAUSE_SECONDS)


async def load(port: int, num_streams: int, num_tokens: int) -> tuple[int, float, list[float]]:
    """All streams at once: tokens that came, seconds, and how long each probe took."""
    body = json.dumps(
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": "Describe the image."}],
            "max_tokens": num_tokens,
            "stream": True,
        }
    ).encode()
    milliseconds: list[float] = []
    prober = asyncio.create_task(probes(port, milliseconds))
    start = time.perf_counter()
    counts = await asyncio.gather(*(stream(port, body) for _ in range(num_streams)))
    seconds = time.perf_counter() - start
    prober.cancel()
    with suppress(asyncio.CancelledError):
        await prober
    return sum(counts), seconds, milliseconds


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far, in steps of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


def one_round(port: int, pid: int, num_streams: int, num_tokens: int) -> dict[str, float]:
    before = cpu_seconds(pid)
    received, seconds, milliseconds = asyncio.run(load(port, num_streams, num_tokens))
    assert received >= num_streams * num_tokens * 0.99, f"{received} tokens came"
    return {
        "tokens_per_second": round(received / seconds, 1),
        "server_cpu_us_per_token": round((cpu_seconds(pid) - before) / received * 1e6, 2),
        "probe_ms_p50": round(statistics.median(milliseconds), 2),
        "probe_ms_max": round(max(milliseconds), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = build_checkpoint(Path(folder) / "tiny")
        with replaying_server(checkpoint, args.tokens, Path(folder) / "log") as (port, pid):
            # The server keeps its own priority: only the load must not be kept waiting.
            with suppress(PermissionError):
                os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
            one_round(port, pid, args.streams, 50)
            rounds = [one_round(port, pid, args.streams, args.tokens) for _ in range(args.rounds)]
    medians = {name: statistics.median(row[name] for row in rounds) for name in rounds[0]}
    result: dict[str, Any] = {
        "benchmark": "stream_capacity",
        "commit": commit(),
        "command": f"python -m benchmarks.stream_capacity --rounds {args.rounds}",
        "machine": machine(),
        "streams": args.streams,
        "tokens_per_stream": args.tokens,
        "wanted": {"tokens_per_second": WANTED_TOKENS_PER_SECOND, "probe_ms_max": WANTED_PROBE_MS},
        "medians": medians,
        "rounds": rounds,
    }
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
