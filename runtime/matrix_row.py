"""One row of `fovea matrix`: starts an engine in this process, asks it a few things, and prints what it says as JSON.

A person runs `fovea matrix`, which starts this once a configuration with the order on standard input. Knows how to
measure; which configurations there are and what a row must fulfil is `server.matrix`'s knowledge.
"""

import re
import sys
from typing import Any

import msgspec
import numpy as np
import torch

from runtime.config import MIB, EngineConfig
from runtime.log import configure_logging
from runtime.offline import Answer, OfflineEngine
from runtime.stats import GRAPH_FAMILIES, EngineStats, GraphCounts, GraphFamilyInfo
from runtime.workload import Workload, noise, requests_of

# The reference's request: one noise picture, small or large, and 32 random text tokens (docs/decisions.md).
IMAGE_SIZES = ((224, 224), (448, 448))
# On a CPU the two would not come to the encoder in one step (`runtime.hardware`); these do.
CPU_IMAGE_SIZES = ((112, 112), (168, 168))
NUM_TEXT_TOKENS = 32
NUM_OUTPUT_TOKENS = 16
# Of the requests after the compared ones: shapes between the smallest and the largest picture.
SOAK_SIZES = ((224, 224), (448, 448), (56, 56), (112, 336), (420, 196), (280, 280))


class RowOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`is_baseline`: the same padded shapes without graphs (on a CPU, whose graphs are no others: without padding)."""

    config: EngineConfig
    num_requests: int
    is_baseline: bool = False
    log_level: str = "warning"


def measure_row(order: RowOrder) -> dict[str, Any]:
    """Every figure of the row; `tokens` are those to compare with the baseline's.

    Raises:
        ConfigError, CheckpointError: the engine cannot start.
    """
    config = baseline_config(order.config) if order.is_baseline else order.config
    engine = OfflineEngine(config)
    info = engine.info
    memory = info.memory
    row: dict[str, Any] = {
        "device_name": device_name(),
        "requested_bytes": memory.requested_bytes,
        **memory.components,
        "residual_bytes": memory.requested_bytes - sum(memory.components.values()),
        "unplanned_bytes": memory.unplanned_bytes,
        "num_blocks": memory.num_blocks,
        "attention_backend": info.attention_backend,
        "encoder_attention_backend": info.encoder_attention_backend,
        **_graphs(info.graphs),
        "phase_seconds": {name: round(value, 3) for name, value in info.startup_phase_seconds.items()},
    }
    if config.mm_encoder_only:
        generator = np.random.default_rng(config.seed)
        pictures = [noise(generator, width=width, height=height) for width, height in IMAGE_SIZES]
        rows = engine.encode(pictures)
        row["tokens"] = {"pair": [[len(one), bool(torch.isfinite(one).all())] for one in rows]}
    else:
        row["tokens"] = _compared_tokens(engine, config)
        row["pair_encoder_replays"] = row["tokens"].pop("replays")
        row["errors"] = _soak(engine, order.num_requests, config.seed)
    after = engine.stats()
    row["unplanned_after_bytes"] = after.unplanned_bytes
    return {**row, **_counts(after), "torch_reserved_bytes": _reserved_bytes()}


def baseline_config(config: EngineConfig) -> EngineConfig:
    """What answers are compared with."""
    if config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available()):
        return msgspec.structs.replace(config, graph_backend="emulated")
    return msgspec.structs.replace(config, enforce_eager=True)


def device_name() -> str:
    """As part of a file's name: `nvidia-h200`, `cpu`."""
    cuda: Any = torch.cuda
    name = str(cuda.get_device_name()) if cuda.is_available() else "cpu"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _compared_tokens(engine: OfflineEngine, config: EngineConfig) -> dict[str, Any]:
    """Greedy answers: to one request alone, then to two that come together and share a replay of the encoder."""
    workload = Workload(
        num_requests=3,
        num_warmups=0,
        concurrency=2,
        image_sizes=CPU_IMAGE_SIZES if engine.info.device == "cpu" else IMAGE_SIZES,
        num_text_tokens=NUM_TEXT_TOKENS,
        num_output_tokens=NUM_OUTPUT_TOKENS,
        seed=config.seed,
    )
    single, *pair = requests_of(workload, engine.model_config)
    alone = engine.generate([single])
    before = _replays(engine.stats())
    together = engine.generate(pair, concurrency=2)
    return {
        "single": _tokens(alone[0]),
        "pair": [_tokens(answer) for answer in together],
        "replays": _replays(engine.stats()) - before,
    }


def _soak(engine: OfflineEngine, num_requests: int, seed: int) -> int:
    """Serves `num_requests` more; how many of them failed."""
    if not num_requests:
        return 0
    workload = Workload(
        num_requests=num_requests,
        num_warmups=0,
        concurrency=2,
        image_sizes=SOAK_SIZES,
        num_text_tokens=NUM_TEXT_TOKENS,
        num_output_tokens=NUM_OUTPUT_TOKENS,
        seed=seed + 1,
    )
    answers = engine.generate(requests_of(workload, engine.model_config))
    return sum(answer.finish_reason not in ("stop", "length") for answer in answers)


def _tokens(answer: Answer) -> list[int]:
    assert answer.error is None, answer.error
    return answer.token_ids


def _replays(stats: EngineStats) -> int:
    return sum(stats.graphs["encoder"].replays.values())


def _graphs(families: tuple[GraphFamilyInfo, ...]) -> dict[str, Any]:
    nothing = {name: GraphFamilyInfo(family=name, backend="none") for name in GRAPH_FAMILIES}
    by_family = nothing | {family.family: family for family in families}
    return {
        "measured_mib": {key: round(family.measured_bytes / MIB, 3) for key, family in by_family.items()},
        "reserved_mib": {key: round(family.reserved_bytes / MIB, 3) for key, family in by_family.items()},
        "captured_mib": {key: round(family.captured_bytes / MIB, 3) for key, family in by_family.items()},
        "graph_backend": {key: family.backend for key, family in by_family.items()},
        "pool_segment_bytes": {key: family.segment_bytes for key, family in by_family.items()},
        "driver_bytes": {key: family.driver_bytes for key, family in by_family.items()},
        "reserved_graph_bytes": {key: family.reserved_bytes for key, family in by_family.items()},
        "captured_graph_bytes": {key: family.captured_bytes for key, family in by_family.items()},
        "captures_per_bucket": max((family.num_captures for family in families if family.backend != "none"), default=0),
        "private_segments_left": max((family.probe_segments_left_bytes for family in families), default=0),
        "bucket_states": {
            key: {bucket.name: bucket.state for bucket in family.buckets} for key, family in by_family.items()
        },
        "capture_seconds": {
            key: {bucket.name: round(bucket.capture_seconds, 4) for bucket in family.buckets}
            for key, family in by_family.items()
        },
    }


def _counts(stats: EngineStats) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for family in GRAPH_FAMILIES:
        counts = stats.graphs.get(family) or GraphCounts()  # an encoder alone has no decoder that could count
        row[f"{family}_hits"] = counts.hits
        row[f"{family}_misses"] = {reason: count for reason, count in counts.misses.items() if count}
    return row


def _reserved_bytes() -> int:
    return int(torch.cuda.memory_reserved()) if torch.cuda.is_available() else 0


def main() -> int:
    """Reads an order and prints its row as the last line; the exit code is 1 if the engine cannot start."""
    if sys.argv[1:] == ["--device-name"]:
        print(device_name())
        return 0
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=RowOrder)
    configure_logging(order.log_level)
    try:
        row = measure_row(order)
    except ValueError as error:
        print(f"the engine cannot start: {error}", file=sys.stderr)
        return 1
    print(msgspec.json.encode(row).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
