"""Holds a load on the real service while faults are injected, bad inputs tried and clients leave; then ends it in four
ways. Nothing may be lost, nothing may grow.

    python -m benchmarks.reliability --seconds 60 --streams 200

The result goes to `benchmarks/results/reliability.json`; `benchmarks.reliability_table` makes docs/reliability.md of
it. The exit code is 1 if a claim did not hold.
"""

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.compare_cpu import machine
from benchmarks.reliability_load import NUM_TROUBLEMAKERS, Load, Tally, stream_outcome
from tests.checkpoint_factory import build_checkpoint
from tests.http_server import MODEL, chat, wait_until
from tests.integration import faulty_engine
from tests.served_process import FAULTY_SERVE, ROOT, Fovea, ProcessUsage, serving

RESULT = ROOT / "benchmarks" / "results" / "reliability.json"
# The KV cache is planned memory whose untouched pages cost nothing: a small one is touched wholly in the warm-up, so
# that growth after it is growth.
FLAGS = (
    *("--kv-cache-memory-bytes", "64MiB", "--max-num-seqs", "16", "--max-queue-len", "512", "--max-model-len", "1024"),
    *("--served-model-name", MODEL, "--watchdog-seconds", "10", "--drain-timeout-seconds", "120"),
)
PROCESSES = ("server", "engine", "image_workers")
MIB = 1 << 20
MAX_GROWTH_BYTES = 32 * MIB
MAX_PROBE_MS = 100


def async_client(url: str, connections: int) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    return httpx.AsyncClient(base_url=url, limits=limits, timeout=300, trust_env=False)


async def hold_load(url: str, num_streams: int, seconds: float, *, has_trouble: bool, seed: int) -> Load:
    async with async_client(url, num_streams + 4 * NUM_TROUBLEMAKERS) as client:
        load = Load(client, deadline=time.monotonic() + seconds, seed=seed)
        await load.run(num_streams, has_trouble=has_trouble)
    return load


@contextmanager
def probing(url: str) -> Iterator[dict[str, Any]]:
    """Probes meanwhile; the dictionary is filled at the end."""
    found: dict[str, Any] = {}
    command = [sys.executable, "-m", "benchmarks.reliability_probe", url]
    if shutil.which("chrt") and os.geteuid() == 0:
        # Else it would measure how long it waits for a core beside the load, not how long the server takes.
        command = ["chrt", "-r", "1", *command]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as prober:
        try:
            yield found
        finally:
            output, _ = prober.communicate(timeout=60)
            found.update(json.loads(output))


def measure_load(server: Fovea, num_streams: int, seconds: float, warm_up_seconds: float) -> dict[str, Any]:
    """The held load, and what was different after it."""
    # As many at a time as later: what that many hold at once, the allocator keeps.
    asyncio.run(hold_load(server.url, num_streams, warm_up_seconds, has_trouble=True, seed=1))
    server.wait_idle()
    before = server.usage()
    started = time.monotonic()
    with probing(server.url) as probes:
        load = asyncio.run(hold_load(server.url, num_streams, seconds, has_trouble=True, seed=2))
        elapsed = time.monotonic() - started
    server.wait_idle()
    after, metrics = server.usage(), server.metrics()
    return {
        "streams_at_a_time": num_streams,
        "seconds": round(elapsed, 1),
        "streams": load.streams.document(),
        "output_tokens": load.num_tokens,
        "ttft_ms_p50": median_ms(load.first_token_seconds),
        "faults": {name: tally.document() for name, tally in load.faults.items()},
        "bad_inputs": load.bad_inputs.document(),
        "leavers": load.leavers.document(),
        "probes": probes,
        "left": {
            "running": metrics["fovea_num_requests_running", ()],
            "waiting": metrics["fovea_num_requests_waiting", ()],
            "in_flight": metrics["fovea_requests_in_flight", ()],
            "kv_blocks": metrics["fovea_kv_cache_used_blocks", ()],
            "embeddings_beyond_capacity": max(
                0.0, metrics["fovea_encoder_cache_used_tokens", ()] - metrics["fovea_encoder_cache_tokens", ()]
            ),
            "unplanned_bytes": max(0.0, metrics["fovea_memory_unplanned_bytes", ()]),
        },
        "failed_steps": metrics["fovea_engine_failed_steps_total", ()],
        "disconnects_seen": metrics["fovea_requests_aborted_total", ("disconnect",)],
        "memory": {name: usage_change(before[name], after[name]) for name in PROCESSES},
    }


def usage_change(before: ProcessUsage, after: ProcessUsage) -> dict[str, int]:
    return {
        "pss_bytes_before": before.pss_bytes,
        "pss_bytes_after": after.pss_bytes,
        "descriptors_before": before.num_descriptors,
        "descriptors_after": after.num_descriptors,
    }


def median_ms(seconds: list[float]) -> float:
    return round(1000 * sorted(seconds)[len(seconds) // 2], 1) if seconds else 0.0


def end_under_load(server: Fovea, num_streams: int, cause: str) -> dict[str, Any]:
    """Ends the service while streams run, and says what became of them."""

    async def run() -> Tally:
        tally = Tally()
        async with async_client(server.url, num_streams + 4) as client:
            load = Load(client, deadline=0)
            bodies = [
                chat([load.picture_part()], stream=True, max_tokens=200, ignore_eos=True) for _ in range(num_streams)
            ]
            streams = [asyncio.create_task(stream_outcome(client, body)) for body in bodies]
            await asyncio.to_thread(
                wait_until, lambda: server.metrics()["fovea_requests_in_flight", ()] == num_streams, 60
            )
            killer: asyncio.Task[Any] | None = None
            if cause == "signal":
                server.process.send_signal(signal.SIGTERM)
            elif cause == "engine killed":
                os.kill(server.engine_pid, signal.SIGKILL)
            else:
                body = chat("Hang.", seed=faulty_engine.HANG, stream=True)
                killer = asyncio.create_task(stream_outcome(client, body))
                await asyncio.to_thread(wait_until, lambda: server.get("/health/live").status_code == 503, 120)
                server.process.send_signal(signal.SIGTERM)
            for stream in streams:
                outcome = await stream
                is_complete = outcome.error is None
                is_told = outcome.error in ("503", "error event") and not outcome.is_done
                is_right = is_complete if cause == "signal" else is_complete or is_told
                tally.count(None if is_right else outcome.error)
            if killer is not None:
                await killer
        return tally

    tally = asyncio.run(run())
    return {"streams": tally.document(), "exit_code": server.process.wait(60)}


EXIT_CODES = {"signal": 0, "engine killed": 1, "engine hung, then signal": 0}


def failures_of(result: dict[str, Any]) -> list[str]:
    """The claims that did not hold."""
    load = result["load"]
    failures = []
    tallies = {"streams": load["streams"], "bad inputs": load["bad_inputs"], "leavers": load["leavers"]}
    tallies |= {f"fault: {name}": tally for name, tally in load["faults"].items()}
    tallies |= {f"ended by {cause}": end["streams"] for cause, end in result["ends"].items()}
    failures += [f"{name}: {tally['wrong']}" for name, tally in tallies.items() if tally["wrong"]]
    failures += [f"left: {value} {name}" for name, value in load["left"].items() if value]
    for path, probe in load["probes"].items():
        # A scrape may take its time; what decides over the life of the process may not.
        is_slow = path.startswith("/health") and probe["p99_ms"] >= MAX_PROBE_MS
        if probe["failed"] or is_slow:
            failures.append(
                f"{path}: {probe['failed']} of {probe['asked']} failed, p99 {probe['p99_ms']:g} ms, "
                f"allowed {MAX_PROBE_MS} ms"
            )
    for name, usage in load["memory"].items():
        before, after = usage["pss_bytes_before"], usage["pss_bytes_after"]
        if after - before > MAX_GROWTH_BYTES:
            sizes = [f"{size / MIB:.0f}" for size in (before, after, before + MAX_GROWTH_BYTES)]
            failures.append("memory of {}: {} -> {} MiB, allowed {} MiB".format(name, *sizes))
        if usage["descriptors_after"] > usage["descriptors_before"]:
            failures.append(
                f"file descriptors of {name}: {usage['descriptors_before']} -> {usage['descriptors_after']}, "
                "allowed none more"
            )
    for cause, end in result["ends"].items():
        if end["exit_code"] != EXIT_CODES[cause]:
            failures.append(f"ended by {cause}: exit code {end['exit_code']}")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--warm-up-seconds", type=float, default=30)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--model", default="demo", help="directory, or demo; `random` makes one of 9.5 M parameters")
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        model = args.model
        if model == "random":
            model = str(build_checkpoint(Path(folder) / "bench-checkpoint", size="bench"))
        with serving(model, *FLAGS, command=FAULTY_SERVE) as server:
            load = measure_load(server, args.streams, args.seconds, args.warm_up_seconds)
        ends = {}
        for cause in EXIT_CODES:
            flags = (*FLAGS, "--drain-timeout-seconds", "2") if "hung" in cause else FLAGS
            with serving(model, *flags, command=FAULTY_SERVE) as server:
                ends[cause] = end_under_load(server, min(args.streams, 64), cause)
    result = {
        "benchmark": "reliability",
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip(),
        "command": f"python -m benchmarks.reliability --seconds {args.seconds:g} --streams {args.streams}",
        "model": args.model,
        "machine": machine(),
        "load": load,
        "ends": ends,
    }
    result["failures"] = failures_of(result)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result))
    for failure in result["failures"]:
        print(f"did not hold: {failure}", file=sys.stderr)
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
