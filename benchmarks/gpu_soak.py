"""Serves thousands of mixed requests on one engine and looks whether memory stays where the plan put it.

    python -m benchmarks.gpu_soak MODEL --load-format random --gpu-memory-utilization 0.12 [--requests N] [--seconds S]

Text, one to three pictures of every size between `min_pixels` and `max_pixels`, some too large for any budget, aborts
(`runtime.workload.mixed_requests`). Takes the settings of `fovea serve` as flags. Ends with one row as a line of JSON;
the exit code is 1 when memory grew, an allocation failed, or a request did. On a CPU, where torch reserves nothing, the
engine's own reading tells what is used; that the script runs there is what a test looks at.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from runtime.checkpoint import locate_model, read_model_config, read_processor_config
from runtime.config import MIB, EngineConfig, resolve_config
from runtime.engine import READING_SECONDS
from runtime.matrix_row import device_name
from runtime.offline import OfflineEngine, OfflineRequest
from runtime.workload import largest_picture, mixed_requests
from server.flags import FlagParser, add_settings_flags, settings_from
from server.matrix import add_row, commit, read_rows

# How often memory is looked at between the first and the last request.
SAMPLE_EVERY = 25


@dataclass(kw_only=True)
class Memory:
    """Readings from `ready` on, in bytes. On a CPU the device's are those of the engine, and torch's are zero."""

    reserved: list[int] = field(default_factory=list)
    device_used: list[int] = field(default_factory=list)

    def read(self, engine: OfflineEngine) -> None:
        if torch.cuda.is_available() and engine.info.device == "cuda":
            free, total = torch.cuda.mem_get_info()
            self.reserved.append(int(torch.cuda.memory_reserved()))
            self.device_used.append(total - free)
            return
        memory = engine.info.memory
        planned = memory.requested_bytes - memory.components["margin"] - memory.components["rounding"]
        self.reserved.append(0)
        self.device_used.append(planned + engine.stats().unplanned_bytes)


def soak(engine: OfflineEngine, *, num_requests: int, seconds: float, seed: int = 0) -> dict[str, Any]:
    """Serves up to `num_requests`, none begun after `seconds`. The row, with its `problems`."""
    memory = Memory()
    is_cuda = engine.info.device == "cuda"
    before = _allocator(is_cuda)
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    memory.read(engine)
    started = time.monotonic()
    requests = mixed_requests(num_requests, model=engine.model_config, config=engine.config, seed=seed)
    answers = engine.generate(_watched(requests, engine, memory, deadline=started + seconds))
    taken = time.monotonic() - started
    time.sleep(READING_SECONDS)  # the engine's own reading may be as old
    memory.read(engine)
    after, stats = _allocator(is_cuda), engine.stats()
    peak = int(torch.cuda.memory_stats()["reserved_bytes.all.peak"]) if is_cuda else 0
    errors = [answer.error for answer in answers if answer.error]
    row: dict[str, Any] = {
        "requests": len(answers),
        "aborted": sum(answer.finish_reason == "abort" for answer in answers),
        "errors": len(errors),
        "first_error": errors[0] if errors else None,
        "prompt_tokens": sum(answer.num_prompt_tokens for answer in answers),
        "output_tokens": sum(len(answer.token_ids) for answer in answers),
        "images": stats.num_images_encoded,
        "failed_steps": stats.num_failed_steps,
        "preemptions": stats.num_preemptions,
        "seconds": round(taken, 2),
        "torch_reserved_bytes_before": memory.reserved[0],
        "torch_reserved_bytes_after": memory.reserved[-1],
        "torch_reserved_bytes_peak": max(peak, *memory.reserved),
        "device_used_bytes_before": memory.device_used[0],
        "device_used_bytes_after": memory.device_used[-1],
        "device_used_bytes_peak": max(memory.device_used),
        "margin_bytes": engine.info.memory.components["margin"],
        "unplanned_bytes": stats.unplanned_bytes,
        "oom_count": after["num_ooms"] - before["num_ooms"],
        "allocation_retries": after["num_alloc_retries"] - before["num_alloc_retries"],
    }
    for family, counts in stats.graphs.items():
        row[f"{family}_hits"] = counts.hits
        row[f"{family}_misses"] = {reason: count for reason, count in counts.misses.items() if count}
        row[f"{family}_padded_tokens"] = counts.padded_tokens
    return {**row, "problems": problems_of(row)}


def problems_of(row: dict[str, Any]) -> list[str]:
    """What of the claim the row does not fulfil: torch reserves nothing more, the device's use stays within the margin,
    nothing is unplanned, no allocation and no request failed."""
    grown = row["torch_reserved_bytes_peak"] - row["torch_reserved_bytes_before"]
    used = row["device_used_bytes_peak"] - row["device_used_bytes_before"]
    found = (
        (grown > 0, f"torch reserved {grown} bytes more than at ready"),
        (used > row["margin_bytes"], f"the device's use grew by {used} bytes; the margin is {row['margin_bytes']}"),
        (row["unplanned_bytes"] > 0, f"unplanned is {row['unplanned_bytes']} bytes"),
        (row["oom_count"] > 0, f"{row['oom_count']} allocations failed"),
        (row["errors"] > 0, f"{row['errors']} requests failed, the first with: {row['first_error']}"),
        (row["failed_steps"] > 0, f"{row['failed_steps']} steps failed"),
        (row["requests"] == 0, "no request was served"),
    )
    return [problem for is_there, problem in found if is_there]


def budgets_that_some_pictures_exceed(budgets: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    """A ladder's rungs below the largest picture, so that some run eager; half of that picture if there is none."""
    return tuple(budget for budget in budgets if budget < max_tokens) or (max(1, max_tokens // 2),)


def _watched(
    requests: Iterator[OfflineRequest], engine: OfflineEngine, memory: Memory, *, deadline: float
) -> Iterator[OfflineRequest]:
    for index, request in enumerate(itertools.takewhile(lambda _: time.monotonic() < deadline, requests)):
        if index and index % SAMPLE_EVERY == 0:
            memory.read(engine)
        yield request


def _allocator(is_cuda: bool) -> dict[str, int]:
    names = ("num_ooms", "num_alloc_retries")
    if not is_cuda:
        return dict.fromkeys(names, 0)
    stats = torch.cuda.memory_stats()
    return {name: int(stats.get(name, 0)) for name in names}


def main(argv: list[str] | None = None) -> int:
    parser: argparse.ArgumentParser = FlagParser(prog="gpu_soak", description=__doc__.splitlines()[0])
    add_settings_flags(parser)
    parser.add_argument("--requests", type=int, default=2000, metavar="N", help="[%(default)s]")
    parser.add_argument("--seconds", type=float, default=480, metavar="S", help="none begins later [%(default)s]")
    parser.add_argument("--output", type=Path, metavar="FILE", help="a list of rows, to which this one is appended")
    arguments = parser.parse_args(argv)
    config = settings_from(arguments, parser).engine_config()
    started = time.monotonic()
    engine = OfflineEngine(_with_misses(config))
    row = {
        "model": config.model,
        "device_name": device_name(),
        "commit": commit(),
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "kv_backing": config.kv_backing,
        "decoder_graphs": config.decoder_graphs,
        "encoder_graph_budgets": list(engine.config.encoder_graph_budgets),
        "requested_bytes": engine.info.memory.requested_bytes,
        "ready_seconds": round(time.monotonic() - started, 2),
        "configuration": "soak",
        **soak(engine, num_requests=arguments.requests, seconds=arguments.seconds, seed=config.seed),
    }
    if arguments.output is not None:
        add_row(read_rows(arguments.output), arguments.output, row)
    for name in ("torch_reserved_bytes", "device_used_bytes"):
        values = [f"{row[f'{name}_{when}'] / MIB:.1f}" for when in ("before", "after", "peak")]
        print(f"{name}: before, after, peak {', '.join(values)} MiB")
    print("; ".join(row["problems"]) or "memory is steady")
    print(json.dumps(row))
    return 1 if row["problems"] else 0


def _with_misses(config: EngineConfig) -> EngineConfig:
    """Unless budgets are given, those that leave some pictures out."""
    if config.encoder_graph_budgets is not None:
        return config
    directory = locate_model(config.model, config.revision)
    resolved = resolve_config(config, read_model_config(directory), read_processor_config(directory))
    budgets = budgets_that_some_pictures_exceed(resolved.encoder_graph_budgets, largest_picture(resolved))
    return msgspec.structs.replace(config, encoder_graph_budgets=budgets)


if __name__ == "__main__":
    sys.exit(main())
