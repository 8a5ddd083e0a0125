"""The most telling checks of the memory code on a GPU, within a time limit: a table, and one line of JSON.

    python -m benchmarks.gpu_smoke --model DIRECTORY --seconds 100

First what needs no model (`benchmarks.gpu_checks`), then rows of the matrix with random weights, each in a process of
its own: a baseline, both backings of the KV cache, and what else the time allows. A row that would not end in time is
not begun.
"""

import argparse
import json
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import msgspec

from runtime.config import EngineConfig
from runtime.stats import MEMORY_COMPONENTS

# The reference's configuration, small enough to start in seconds.
SETTINGS: dict[str, Any] = {
    "device": "cuda",
    "load_format": "random",
    "max_model_len": 2048,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 1024,
    "gpu_memory_utilization": 0.12,
    "enable_prefix_caching": False,
    "min_pixels": 3136,
    "max_pixels": 200704,
    "encoder_graph_budgets": (512, 1024),
    "encoder_graph_max_items": 2,
    "compile": "off",
}
ROWS: tuple[tuple[str, dict[str, Any], bool], ...] = (
    ("decode, vmm", {"decoder_graphs": "decode"}, False),
    ("decode, baseline", {"decoder_graphs": "decode"}, True),
    ("decode, torch", {"decoder_graphs": "decode", "kv_backing": "torch"}, False),
    ("full, vmm", {"decoder_graphs": "full"}, False),
    ("encoder only", {"mm_encoder_only": True}, False),
    ("eager", {"enforce_eager": True}, False),
)
SHOWN = (
    "requested_bytes",
    *MEMORY_COMPONENTS,
    "residual_bytes",
    "unplanned_bytes",
    "unplanned_after_bytes",
    "captured_graph_bytes",
    "reserved_graph_bytes",
    "pool_segment_bytes",
    "driver_bytes",
    "captures_per_bucket",
    "private_segments_left",
    "bucket_states",
    "capture_seconds",
    "attention_backend",
    "encoder_attention_backend",
    "encoder_hits",
    "encoder_misses",
    "decoder_hits",
    "decoder_misses",
    "pair_encoder_replays",
    "errors",
    "phase_seconds",
    "torch_reserved_bytes",
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu_smoke", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="directory with the configuration of a model; weights are random")
    parser.add_argument("--seconds", type=float, default=100, help="in all [%(default)s]")
    parser.add_argument("--requests", type=int, default=20, help="of each row [%(default)s]")
    parser.add_argument("--only", action="append", metavar="NAME", help="a check or a row; repeat")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    results: dict[str, Any] = {}
    run_checks(arguments.only, results)
    if arguments.model is not None:
        run_rows(arguments, deadline, results)
    failed = [name for name, result in results.items() if "error" in result]
    print(json.dumps({"failed": failed, "results": results}))
    return 1 if failed else 0


def run_checks(only: list[str] | None, results: dict[str, Any]) -> None:
    from benchmarks.gpu_checks import CHECKS, open_device

    try:
        device = open_device()
    except Exception as error:  # rows may still say more
        traceback.print_exc()
        report("open", {"error": f"{type(error).__name__}: {error}"}, 0.0, results)
        return
    for name, check in CHECKS.items():
        if only and name not in only:
            continue
        started = time.perf_counter()
        try:
            outcome = check(device)
        except Exception as error:  # one that fails says so, and the next is tried
            traceback.print_exc()
            outcome = {"error": f"{type(error).__name__}: {error}"}
        report(name, outcome, time.perf_counter() - started, results)


def run_rows(arguments: argparse.Namespace, deadline: float, results: dict[str, Any]) -> None:
    for name, settings, is_baseline in ROWS:
        left = deadline - time.monotonic()
        if (arguments.only and name not in arguments.only) or left < 15:
            continue
        config = EngineConfig(model=str(arguments.model), **{**SETTINGS, **settings})
        order = {
            "config": msgspec.to_builtins(config),
            "num_requests": 0 if is_baseline else arguments.requests,
            "is_baseline": is_baseline,
        }
        started = time.perf_counter()
        outcome = run_row(order, left)
        if "tokens" in outcome:
            results.setdefault("tokens", {})[name] = outcome.pop("tokens")
        report(name, outcome, time.perf_counter() - started, results)
    tokens = results.pop("tokens", {})
    baseline = tokens.get("decode, baseline")
    for name in ("decode, vmm", "decode, torch"):
        if baseline is not None and name in tokens:
            results[name]["tokens_equal"] = tokens[name] == baseline
            print(f"{name}: tokens equal to the baseline's: {tokens[name] == baseline}", flush=True)


def run_row(order: dict[str, Any], seconds: float) -> dict[str, Any]:
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "runtime.matrix_row"],
            input=msgspec.json.encode(order),
            capture_output=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as error:
        sys.stdout.write((error.stderr or b"").decode(errors="replace")[-2000:])
        return {"error": f"it took more than {seconds:.0f} s"}
    if ended.returncode:
        sys.stdout.write(ended.stderr.decode(errors="replace")[-4000:])
        return {"error": f"exit code {ended.returncode}"}
    row = json.loads(ended.stdout.splitlines()[-1])
    warnings = ended.stderr.decode(errors="replace").strip()
    return {**{key: row[key] for key in (*SHOWN, "tokens") if key in row}, "log": warnings[-1500:]}


def report(name: str, outcome: dict[str, Any], seconds: float, results: dict[str, Any]) -> None:
    results[name] = {**outcome, "seconds_taken": round(seconds, 2)}
    print(f"{name:<20}{'FAILED' if 'error' in outcome else 'ok':<8}{seconds:7.2f} s", flush=True)
    for key, value in outcome.items():
        print(f"    {key}: {value}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
