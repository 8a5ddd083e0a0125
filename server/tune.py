"""`fovea plan --tune`: proposes the encoder's budgets for a sample of pictures, as measured on this device.

Knows flags and prints; a process of the runtime's (`runtime.tune`) measures, so that this one stays free of torch.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from server.plan import table
from server.settings import Settings


def run_tune(arguments: argparse.Namespace, settings: Settings) -> int:
    """Measures and prints; the exit code is 1 if the engine cannot start."""
    order = {"config": msgspec.to_builtins(settings.engine_config()), "sizes": arguments.sizes}
    print(f"starting an engine to measure the encoder of {settings.model} ...", file=sys.stderr, flush=True)
    ended = subprocess.run(
        [sys.executable, "-m", "runtime.tune"], input=msgspec.json.encode(order), capture_output=True
    )
    lines = ended.stdout.decode().splitlines()
    if ended.returncode or not lines:
        reason = ended.stderr.decode(errors="replace").strip() or f"exit code {ended.returncode}"
        print(f"fovea plan: {reason}", file=sys.stderr)
        return 1
    result = json.loads(lines[-1])
    flag = "--encoder-graph-budgets " + ",".join(map(str, result["tuned"]["budgets"]))
    if arguments.save is not None:
        arguments.save.write_text(settings_file(result), encoding="utf-8")
    if arguments.json:
        print(json.dumps({**result, "flag": flag}))
        return 0
    print(tune_tables(result))
    print(f"\n{flag}")
    return 0


def settings_file(result: Mapping[str, Any]) -> str:
    """YAML for `--config`, so that every replica has the same ladder."""
    budgets = ", ".join(map(str, result["tuned"]["budgets"]))
    tokens = result["picture_tokens"]
    return (
        f"# fovea plan --tune: {result['pictures']} pictures of {tokens['min']} to {tokens['max']} tokens\n"
        f"encoder_graph_budgets: [{budgets}]\n"
    )


def tune_tables(result: Mapping[str, Any]) -> str:
    """Every budget that was measured, and what the ladder in use and the proposed one make of the pictures."""
    ladders = {name: result[name] for name in ("current", "tuned") if result[name] is not None}
    budgets = [
        (
            str(rung["tokens"]),
            f"{rung['mib']:.1f}",
            f"{rung['replay_ms']:.3f}",
            *(_share(one["replay_shares"].get(str(rung["tokens"]))) for one in ladders.values()),
        )
        for rung in result["candidates"]
    ]
    summary = [
        (
            name,
            str(len(one["budgets"])),
            f"{one['mib']:.1f}",
            f"{one['ms_per_image']:.3f}",
            _share(one["padded_share"]),
            _share(one["eager_share"]),
        )
        for name, one in ladders.items()
    ]
    eager = [(str(tokens), f"{milliseconds:.3f}") for tokens, milliseconds in result["eager_ms"]]
    sections = [
        table(("budget", "MiB", "replay ms", *(f"replays, {name}" for name in ladders)), budgets, left=0),
        table(("picture tokens", "eager ms"), eager, left=0),
        table(("ladder", "budgets", "MiB", "ms an image", "padded", "eager"), summary),
    ]
    if result["failed"]:
        sections.append(f"could not be captured: {', '.join(map(str, result['failed']))}")
    return "\n\n".join(sections)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
