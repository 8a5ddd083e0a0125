"""Measures an engine without a server: random pictures and texts through the offline API, and one line of JSON.

A person runs `fovea bench throughput`, which starts this as a process of its own with the order as JSON on standard
input. What is asked is in `runtime.workload`.
"""

import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from runtime.config import EngineConfig
from runtime.log import configure_logging
from runtime.offline import Answer, OfflineEngine
from runtime.percentiles import percentiles
from runtime.stats import EngineStats
from runtime.workload import Workload, requests_of


class Order(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What standard input says."""

    config: EngineConfig
    workload: Workload
    log_level: str = "warning"


def measure(engine: OfflineEngine, workload: Workload) -> dict[str, Any]:
    """Runs the workload; figures of the requests after the warm-ups. Times in milliseconds."""
    # All pictures are there before the clock runs; resizing and hashing them is in the measured time.
    requests = list(requests_of(workload, engine.model_config))
    engine.generate(requests[: workload.num_warmups], concurrency=workload.concurrency)
    before = engine.stats()
    start = time.perf_counter()
    answers = engine.generate(requests[workload.num_warmups :], concurrency=workload.concurrency)
    seconds = time.perf_counter() - start
    return {**figures(answers, seconds), **counts(before, engine.stats())}


def figures(answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    """What the answers say."""
    good = [answer for answer in answers if answer.finish_reason in ("stop", "length")]
    num_output_tokens = sum(len(answer.token_ids) for answer in good)
    first = [answer.first_token_seconds for answer in good]
    return {
        "requests": len(answers),
        "errors": len(answers) - len(good),
        "seconds": round(seconds, 4),
        "requests_per_second": round(len(good) / seconds, 3),
        "output_tokens_per_second": round(num_output_tokens / seconds, 1),
        "prompt_tokens": sum(answer.num_prompt_tokens for answer in good),
        "output_tokens": num_output_tokens,
        "ttft_ms": percentiles([value for value in first if value is not None]),
        "itl_ms": percentiles([gap for answer in good for gap in answer.gap_seconds]),
    }


def counts(before: EngineStats, after: EngineStats) -> dict[str, Any]:
    """What the engine did between two snapshots."""
    graphs = {}
    for family, end in after.graphs.items():
        start = before.graphs[family]
        misses = {reason: count - start.misses.get(reason, 0) for reason, count in end.misses.items()}
        graphs[family] = {
            "hits": end.hits - start.hits,
            "misses": {reason: count for reason, count in misses.items() if count},
            "padded_tokens": end.padded_tokens - start.padded_tokens,
        }
    return {
        "steps": after.num_steps - before.num_steps,
        "step_seconds": round(after.step_seconds - before.step_seconds, 4),
        "encode_batches": after.encode_batches - before.encode_batches,
        "graphs": graphs,
    }


def main() -> int:
    """Reads an order, measures, prints the result; the exit code is 1 if a request failed or the start did."""
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    configure_logging(order.log_level)
    started = time.perf_counter()
    try:
        engine = OfflineEngine(order.config)
    except ValueError as error:
        print(f"the engine cannot start: {error}", file=sys.stderr)
        return 1
    ready_seconds = time.perf_counter() - started
    result = measure(engine, order.workload)
    info = engine.info
    result.update(
        {
            "model": info.model,
            "device": info.device,
            "dtype": info.dtype,
            "attention_backend": info.attention_backend,
            "encoder_attention_backend": info.encoder_attention_backend,
            "kv_tokens": info.memory.num_blocks * info.memory.block_size,
            "unplanned_bytes": engine.stats().unplanned_bytes,
            "ready_seconds": round(ready_seconds, 3),
            "workload": msgspec.to_builtins(order.workload),
        }
    )
    print(msgspec.json.encode(result).decode(), flush=True)
    return 1 if result["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
