"""`fovea bench throughput`: the engine without a server, on the reference's workload. Ends with one line of JSON.

Knows presets and prints; a process of the runtime's does the measuring, so that this one stays free of torch.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from server.plan import table
from server.settings import Settings, load_settings

PAIR_SETTINGS: dict[str, Any] = {
    "max_model_len": 2048,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 1024,
    "gpu_memory_utilization": 0.12,
    "enable_prefix_caching": False,
    "min_pixels": 3136,
    "max_pixels": 200704,
    "encoder_graph_budgets": (512, 1024, 2048),
    "encoder_graph_max_items": 2,
    "decoder_graphs": "none",
}
LOAD_SETTINGS: dict[str, Any] = {
    **PAIR_SETTINGS,
    "max_model_len": 4096,
    "max_num_seqs": 128,
    "max_num_batched_tokens": 8192,
    "gpu_memory_utilization": 0.6,
    "encoder_graph_budgets": (256, 512, 1024, 2048, 4096),
    "encoder_graph_max_items": 8,
    "decoder_graphs": "full",
}


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A workload, and the settings that belong to it. Flags win over both."""

    num_requests: int
    num_warmups: int
    concurrency: int
    num_output_tokens: int
    num_text_tokens: int = 32
    # One picture a request, in turns: half of them small, half of them large.
    image_sizes: tuple[tuple[int, int], ...] = ((224, 224), (448, 448))
    settings: dict[str, Any] = field(default_factory=dict)


PRESETS = {
    "pair": Preset(num_requests=32, num_warmups=4, concurrency=2, num_output_tokens=16, settings=PAIR_SETTINGS),
    "pair-graphs": Preset(
        num_requests=32,
        num_warmups=4,
        concurrency=2,
        num_output_tokens=16,
        settings={**PAIR_SETTINGS, "decoder_graphs": "full"},
    ),
    "load": Preset(num_requests=512, num_warmups=128, concurrency=128, num_output_tokens=128, settings=LOAD_SETTINGS),
}


def measure_throughput(arguments: argparse.Namespace) -> int:
    """Runs the workload and prints the result; the exit code is 1 if it failed."""
    preset = PRESETS[arguments.preset]
    given = {name: value for name, value in vars(arguments).items() if name in Settings.model_fields}
    settings = load_settings({**preset.settings, **given}, config=arguments.config)
    order = {
        "config": msgspec.to_builtins(settings.engine_config()),
        "workload": workload_of(arguments, preset, seed=settings.seed),
        "log_level": arguments.engine_log_level,
    }
    ended = subprocess.run(
        [sys.executable, "-m", "runtime.throughput"], input=msgspec.json.encode(order), stdout=subprocess.PIPE
    )
    lines = ended.stdout.decode().splitlines()
    if not lines:
        return ended.returncode or 1
    result = {"preset": arguments.preset, **json.loads(lines[-1])}
    print_result(result)
    return ended.returncode


def workload_of(arguments: argparse.Namespace, preset: Preset, *, seed: int) -> dict[str, Any]:
    """The preset's workload with what flags change of it."""
    workload = asdict(preset)
    del workload["settings"]
    for name in workload:
        if (value := getattr(arguments, name, None)) is not None:
            workload[name] = value
    return {**workload, "seed": seed}


def print_result(result: dict[str, Any]) -> None:
    names = (
        "preset",
        "requests",
        "errors",
        "seconds",
        "requests_per_second",
        "output_tokens_per_second",
        "prompt_tokens",
        "output_tokens",
        "ready_seconds",
    )
    print(table(("figure", "value"), [(name, str(result[name])) for name in names]))
    rows = [
        (name, *(str(result[key].get(column, "-")) for column in ("mean", "p50", "p90", "p99")))
        for name, key in (("TTFT", "ttft_ms"), ("ITL", "itl_ms"))
    ]
    print()
    print(table(("ms", "mean", "p50", "p90", "p99"), rows))
    print()
    print(json.dumps(result))
