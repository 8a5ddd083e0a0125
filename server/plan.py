"""Prints what an engine says of itself: the memory plan, the graphs, the phases of the start."""

import asyncio
from collections.abc import Sequence

import msgspec

from runtime.client import EngineClient
from runtime.config import MIB
from runtime.stats import MEMORY_COMPONENTS, EngineInfo


async def engine_info(client: EngineClient) -> EngineInfo:
    """Starts an engine, asks it, and ends it.

    Raises:
        EngineDeadError: it cannot start; says why.
    """
    try:
        await client.start()
        assert client.info is not None, "a started engine has told of itself"
        return client.info
    finally:
        await asyncio.shield(client.shutdown())


def plan_json(info: EngineInfo) -> str:
    """One line of JSON with everything."""
    return msgspec.json.encode(info).decode()


def plan_tables(info: EngineInfo) -> str:
    """Tables for people."""
    memory = info.memory
    names = [name for name in dict.fromkeys([*MEMORY_COMPONENTS, *memory.components]) if name in memory.components]
    rows = [(name, mib(memory.components[name]), str(memory.components[name])) for name in names]
    rows.append(("requested", mib(memory.requested_bytes), str(memory.requested_bytes)))
    rows.append(("unplanned", mib(memory.unplanned_bytes), str(memory.unplanned_bytes)))
    facts = [
        ("model", info.model),
        ("device", f"{info.device}, {info.dtype}"),
        ("attention", f"{info.attention_backend}, encoder {info.encoder_attention_backend}"),
        ("max_model_len", f"{info.max_model_len} tokens"),
        ("encoder cache", f"{info.encoder_cache_tokens} tokens"),
        (
            "KV cache",
            f"{memory.num_blocks} blocks of {memory.block_size} tokens, {memory.block_bytes} bytes each, "
            f"without the null block: {memory.num_blocks * memory.block_size} tokens",
        ),
    ]
    graphs = [
        (
            family.family,
            bucket.name,
            str(bucket.tokens),
            str(bucket.max_items),
            bucket.state,
            mib(bucket.graph_bytes),
            f"{bucket.capture_seconds:.3f}",
        )
        for family in info.graphs
        for bucket in family.buckets
    ]
    families = [
        (
            family.family,
            family.backend,
            str(len(family.buckets)),
            mib(family.reserved_bytes),
            mib(family.measured_bytes),
            mib(family.captured_bytes),
            mib(family.driver_bytes),
        )
        for family in info.graphs
    ]
    phases = [(name, f"{seconds:.3f}") for name, seconds in info.startup_phase_seconds.items()]
    phases.append(("total", f"{sum(info.startup_phase_seconds.values()):.3f}"))
    sections = [
        table(("engine", ""), facts, left=2),
        table(("memory", "MiB", "bytes"), rows),
        table(
            ("graphs", "backend", "buckets", "reserved MiB", "measured MiB", "captured MiB", "of it driver"),
            families,
            left=2,
        ),
        table(("graph", "bucket", "tokens", "max items", "state", "MiB", "seconds"), graphs, left=2),
        table(("phase", "seconds"), phases),
    ]
    return "\n\n".join(sections)


def mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.1f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Columns as wide as they must be; the first `left` ones are flush left, numbers flush right."""
    widths = [max(len(line[column]) for line in (header, *rows)) for column in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (header, *rows)
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)
