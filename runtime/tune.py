"""Measures budgets of the encoder on this device, and proposes the ladder that pays for a sample of pictures.

A person runs `fovea plan --tune`, which starts this as a process of its own with the order on standard input. Starts
one engine that captures every candidate; `runtime.ladder` chooses.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import msgspec
import torch

from runtime.checkpoint import locate_model, read_model_config, read_processor_config
from runtime.config import MIB, ConfigError, EngineConfig, ResolvedConfig, resolve_config
from runtime.executor.arena import retry_on_empty_cache
from runtime.executor.encoder_runner import EncoderRunner
from runtime.executor.graphs import should_capture_encoder
from runtime.hardware import MAX_SHARED_ENCODER_TOKENS
from runtime.ladder import Measured, Outlook, Rung, candidates, default_sample, outlook, steps_of, tuned_ladder
from runtime.log import configure_logging
from runtime.processing.image_processor import smart_resize
from runtime.startup import build
from runtime.stats import EngineInfo, MemoryLedger

NUM_WARM_UPS = 2
NUM_RUNS = 9

# Eager forwards are measured at so many sizes, from the smallest picture to the largest.
NUM_EAGER_SIZES = 5


class TuneOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`sizes`: pictures as (width, height), before resizing; empty for all that the limits allow."""

    config: EngineConfig
    sizes: tuple[tuple[int, int], ...] = ()
    log_level: str = "warning"


def tune(order: TuneOrder) -> dict[str, Any]:
    """What was measured and what is proposed; times in milliseconds.

    Raises:
        ConfigError, CheckpointError: the engine cannot start, the encoder has no graphs, or a picture cannot be served.
    """
    config = order.config
    if not should_capture_encoder(config, encoder_supports_graphs=True):
        raise ConfigError("the encoder has no graphs with these settings: there is no ladder to tune")
    directory = locate_model(config.model, config.revision)
    model = read_model_config(directory)
    resolved = resolve_config(config, model, read_processor_config(directory))
    side = model.vision.pixels_per_token_side
    sample = sample_tokens(order.sizes, resolved, side)
    current = resolved.encoder_graph_budgets
    budgets = candidates(sample, current, max_tokens=max(resolved.max_tokens_per_image, current[-1]))
    engine = build(msgspec.structs.replace(config, encoder_graph_budgets=budgets))
    encoder = engine._encoder
    assert isinstance(encoder, EncoderRunner)
    measured = measure(encoder, engine.info, sample, max_items=config.encoder_graph_max_items)
    shares_freely = config.mm_encoder_only or engine.info.device != "cpu"
    steps = steps_of(
        sample,
        max_items=config.encoder_graph_max_items,
        max_shared_tokens=None if shares_freely else MAX_SHARED_ENCODER_TOKENS,
        seed=config.seed,
    )
    memory_bytes = shared_bytes(engine.info.memory)
    captured = {rung.tokens for rung in measured.rungs}
    in_use = [tokens for tokens in current if tokens in captured]
    proposal = tuned_ladder(steps, measured, memory_bytes=memory_bytes)
    return {
        "model": config.model,
        "device": engine.info.device,
        "max_items": config.encoder_graph_max_items,
        "pictures": len(sample),
        "picture_tokens": {"min": min(sample), "median": statistics.median(sample), "max": max(sample)},
        "memory_mib": round(memory_bytes / MIB, 1),
        "candidates": [
            {
                "tokens": rung.tokens,
                "mib": round(rung.graph_bytes / MIB, 3),
                "replay_ms": round(rung.replay_seconds * 1000, 4),
            }
            for rung in measured.rungs
        ],
        "failed": [tokens for tokens in budgets if tokens not in captured],
        "eager_ms": [[tokens, round(seconds * 1000, 4)] for tokens, seconds in measured.eager],
        "current": _row(outlook(in_use, steps, measured)) if in_use else None,
        "tuned": _row(proposal),
    }


def shared_bytes(memory: MemoryLedger) -> int:
    """What graphs and the KV cache share; of an encoder alone, all that it asks for."""
    kv_bytes = memory.components["kv"]
    return kv_bytes + memory.components["encoder_graphs"] if kv_bytes else memory.requested_bytes


def sample_tokens(sizes: Sequence[tuple[int, int]], resolved: ResolvedConfig, side: int) -> tuple[int, ...]:
    """Output tokens of each picture.

    Raises:
        SideRatioError: a picture is too long and thin to be served.
    """
    if not sizes:
        return default_sample(-(-resolved.min_pixels // side**2), resolved.max_tokens_per_image)
    limits = {"min_pixels": resolved.min_pixels, "max_pixels": resolved.max_pixels}
    resized = [smart_resize(height, width, factor=side, **limits) for width, height in sizes]
    return tuple(height * width // side**2 for height, width in resized)


@torch.inference_mode()
def measure(encoder: EncoderRunner, info: EngineInfo, sample: Sequence[int], *, max_items: int) -> Measured:
    """Replays of every captured bucket, filled by one picture, and eager forwards.

    Raises:
        ConfigError: no bucket was captured.
    """
    program, graphs = encoder.program, encoder.graphs
    synchronise = torch.cuda.synchronize if info.device == "cuda" else _nothing
    graph_bytes = {bucket.name: bucket.graph_bytes for bucket in info.graphs[0].buckets if bucket.state == "captured"}
    rungs = []
    for bucket in graphs.buckets:
        if bucket.name not in graph_bytes:
            continue
        program.fill(bucket, graphs.inputs(bucket), [program.noise(bucket.tokens)])
        seconds = least_seconds(partial(graphs.replay, bucket, tokens=bucket.tokens, items=1), synchronise)
        rungs.append(Rung(tokens=bucket.tokens, graph_bytes=graph_bytes[bucket.name], replay_seconds=seconds))
    if not rungs:
        raise ConfigError("no bucket of the encoder could be captured: there is no ladder to tune")
    eager = tuple(
        (
            tokens,
            least_seconds(partial(retry_on_empty_cache, partial(program.eager, [program.noise(tokens)])), synchronise),
        )
        for tokens in sorted({round(one) for one in _between(min(sample), max(sample), NUM_EAGER_SIZES)})
    )
    return Measured(rungs=tuple(rungs), eager=eager, max_items=max_items)


def least_seconds(run: Callable[[], object], synchronise: Callable[[], object]) -> float:
    """Of a few runs, each until the device has done it: whatever else goes on only adds to it."""
    for _ in range(NUM_WARM_UPS):
        run()
    times = []
    for _ in range(NUM_RUNS):
        synchronise()
        started = time.perf_counter()
        run()
        synchronise()
        times.append(time.perf_counter() - started)
    return min(times)


def _between(low: int, high: int, count: int) -> list[float]:
    """Evenly in proportion, both ends included."""
    return [low * (high / low) ** (index / (count - 1)) for index in range(count)]


def _row(one: Outlook) -> dict[str, Any]:
    row = asdict(one)
    total = sum(one.replays.values()) or 1
    return {
        "budgets": list(one.budgets),
        "mib": round(row["graph_bytes"] / MIB, 3),
        "ms_per_image": round(one.seconds_per_image * 1000, 4),
        "padded_share": round(one.padded_share, 4),
        "eager_share": round(one.eager_share, 4),
        "replay_shares": {str(tokens): round(count / total, 4) for tokens, count in one.replays.items()},
    }


def _nothing() -> None:
    """A CPU is done when the call returns."""


def main() -> int:
    """Reads an order and prints the proposal as the last line; the exit code is 1 if the engine cannot start."""
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=TuneOrder)
    configure_logging(order.log_level)
    try:
        result = tune(order)
    except ValueError as error:
        print(str(error), file=sys.stderr)
        return 1
    print(msgspec.json.encode(result).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
