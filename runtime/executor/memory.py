"""The memory plan: integer arithmetic from measured rows to a number of KV blocks. Reads no device and no clock.

Every row is in bytes; the rows sum to the request exactly. What can fail is the claim `unplanned_bytes <= 0`.
"""

import math
from dataclasses import asdict, dataclass

from runtime.config import MIB, ConfigError, ReserveGraphMemory
from runtime.stats import MEMORY_COMPONENTS, MemoryLedger

GRAPH_ROWS = ("encoder_graphs", "decoder_graphs", "graph_driver")


class MemoryPlanError(ConfigError):
    """The KV cache does not fit; the message names the knob and the numbers."""


@dataclass(frozen=True, kw_only=True)
class MeasuredRows:
    """What everything but the KV cache takes, in bytes: measured, or exact sizes of buffers."""

    context: int
    weights: int
    attention_workspace: int = 0
    static_buffers: int = 0
    embedding_store: int = 0
    requests: int = 0
    transient: int = 0
    encoder_graphs: int = 0
    decoder_graphs: int = 0
    graph_driver: int = 0

    def __post_init__(self) -> None:
        for row, value in asdict(self).items():
            if value < 0:
                raise MemoryPlanError(f"the reading of {row} is {value} bytes: no memory is negative")


@dataclass(frozen=True, kw_only=True)
class KVRequest:
    """What the KV cache must be. `num_blocks` counts the null block 0, which holds nothing of a request.

    `cache_bytes` sets it outright, and the request follows. `max_num_blocks` bounds it where more would be of no use.
    `granularity_bytes`: memory is backed in pieces of this size, which blocks must fill exactly.
    """

    block_bytes: int
    block_size: int
    max_model_len: int
    cache_bytes: int | None = None
    max_num_blocks: int | None = None
    granularity_bytes: int = 1

    @property
    def min_num_blocks(self) -> int:
        """One request of `max_model_len` tokens, and the null block."""
        return -(-self.max_model_len // self.block_size) + 1

    @property
    def quantum(self) -> int:
        """The number of blocks grows in steps of this: the fewest that end on a piece of backing."""
        return math.lcm(self.block_bytes, self.granularity_bytes) // self.block_bytes


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Who gets which bytes. `components` has every row of `MEMORY_COMPONENTS`, in that order."""

    requested_bytes: int
    components: dict[str, int]
    num_blocks: int
    block_size: int
    block_bytes: int

    def __post_init__(self) -> None:
        assert tuple(self.components) == MEMORY_COMPONENTS
        assert sum(self.components.values()) == self.requested_bytes, "the rows must sum to the request"

    @property
    def planned_bytes(self) -> int:
        """What the process may use when all is in use at once: the request without margin and rounding."""
        return self.requested_bytes - self.components["margin"] - self.components["rounding"]

    def unplanned_bytes(self, used_bytes: int) -> int:
        """What `used_bytes`, with the whole KV cache in it, exceeds the plan by; negative while something is unused."""
        return used_bytes - self.planned_bytes

    def __str__(self) -> str:
        """An aligned table in MiB, rows that are 0 included, with the sum and what the KV cache holds."""
        width = max(map(len, MEMORY_COMPONENTS))
        lines = [f"{row:<{width}}  {value / MIB:>12,.3f} MiB" for row, value in self.components.items()]
        lines.append("-" * len(lines[0]))
        lines.append(f"{'requested':<{width}}  {self.requested_bytes / MIB:>12,.3f} MiB")
        if not self.num_blocks:
            return "\n".join([*lines, "no KV cache"])
        usable = self.num_blocks - 1
        tokens = usable * self.block_size
        blocks = f"{usable} blocks without the null block, of {self.block_size} tokens ({self.block_bytes} bytes)"
        return "\n".join([*lines, f"KV cache: {blocks}, {tokens} tokens"])

    def ledger(self, *, used_bytes: int) -> MemoryLedger:
        """The plan as it is exported."""
        return MemoryLedger(
            requested_bytes=self.requested_bytes,
            components=dict(self.components),
            num_blocks=max(0, self.num_blocks - 1),
            block_size=self.block_size,
            block_bytes=self.block_bytes,
            unplanned_bytes=self.unplanned_bytes(used_bytes),
        )


def plan_memory(
    *,
    requested_bytes: int,
    rows: MeasuredRows,
    kv: KVRequest,
    margin_bytes: int,
    reserve_graph_memory: ReserveGraphMemory,
    request_knob: str,
    total_bytes: int | None = None,
) -> MemoryPlan:
    """Gives the KV cache exactly what everything else leaves of the request.

    Args:
        requested_bytes: what the process may take in all.
        rows: everything but KV, margin and rounding. Unless `reserve_graph_memory` is `on`, its graph rows are not
            subtracted and appear as 0.
        margin_bytes: kept free, and really subtracted.
        request_knob: the setting that raises `requested_bytes`, for messages.
        total_bytes: what the device has, for `kv.cache_bytes`, which raises the request to what it needs.

    Raises:
        MemoryPlanError: no block fits, or fewer than one request of `max_model_len` tokens needs, or
            `kv.cache_bytes` and the rest exceed the device.
    """
    fixed = asdict(rows)
    if reserve_graph_memory != "on":
        fixed.update(dict.fromkeys(GRAPH_ROWS, 0))
    fixed["margin"] = margin_bytes
    taken_bytes = sum(fixed.values())
    if kv.cache_bytes is not None:
        requested_bytes = taken_bytes + kv.cache_bytes
        request_knob = "kv_cache_memory_bytes"
        if total_bytes is not None and requested_bytes > total_bytes:
            raise MemoryPlanError(
                f"kv_cache_memory_bytes is {_mib(kv.cache_bytes)}; with {_mib(taken_bytes)} for everything else that "
                f"is {_mib(requested_bytes)}, and the device has {_mib(total_bytes)}: lower kv_cache_memory_bytes"
            )
    budget = requested_bytes - taken_bytes
    num_blocks = max(0, budget) // (kv.block_bytes * kv.quantum) * kv.quantum
    if kv.max_num_blocks is not None and kv.cache_bytes is None:
        useful = -(-max(kv.max_num_blocks, kv.min_num_blocks) // kv.quantum) * kv.quantum
        if num_blocks > useful:
            num_blocks = useful
            requested_bytes = taken_bytes + num_blocks * kv.block_bytes
            budget = requested_bytes - taken_bytes
    _refuse_too_few(num_blocks, budget, fixed, kv, requested_bytes=requested_bytes, request_knob=request_knob)
    fixed["kv"] = num_blocks * kv.block_bytes
    fixed["rounding"] = budget - fixed["kv"]
    return MemoryPlan(
        requested_bytes=requested_bytes,
        components={row: fixed[row] for row in MEMORY_COMPONENTS},
        num_blocks=num_blocks,
        block_size=kv.block_size,
        block_bytes=kv.block_bytes,
    )


def plan_encoder_memory(
    *,
    requested_bytes: int,
    rows: MeasuredRows,
    margin_bytes: int,
    reserve_graph_memory: ReserveGraphMemory,
    request_knob: str,
) -> MemoryPlan:
    """The plan of an encoder without a decoder: there is no KV cache to give the rest to, so the request is lowered to
    what is needed.

    Raises:
        MemoryPlanError: the rows exceed `requested_bytes`.
    """
    fixed = asdict(rows)
    if reserve_graph_memory != "on":
        fixed.update(dict.fromkeys(GRAPH_ROWS, 0))
    fixed |= {"margin": margin_bytes, "kv": 0, "rounding": 0}
    needed_bytes = sum(fixed.values())
    if needed_bytes > requested_bytes:
        raise MemoryPlanError(
            f"the encoder needs {_mib(needed_bytes)}, but {request_knob} gives {_mib(requested_bytes)}: "
            f"raise {request_knob}"
        )
    return MemoryPlan(
        requested_bytes=needed_bytes,
        components={row: fixed[row] for row in MEMORY_COMPONENTS},
        num_blocks=0,
        block_size=0,
        block_bytes=0,
    )


def _refuse_too_few(
    num_blocks: int, budget: int, fixed: dict[str, int], kv: KVRequest, *, requested_bytes: int, request_knob: str
) -> None:
    if num_blocks >= kv.min_num_blocks:
        return
    needed_blocks = -(-kv.min_num_blocks // kv.quantum) * kv.quantum
    missing = needed_blocks * kv.block_bytes - budget
    if num_blocks < 2:  # the null block alone serves nobody
        largest = sorted(((value, row) for row, value in fixed.items() if value), reverse=True)
        spent = ", ".join(f"{row} {_mib(value)}" for value, row in largest)
        raise MemoryPlanError(
            f"no KV block fits: {request_knob} gives {_mib(requested_bytes)}, of which {spent} leave {_mib(budget)}; "
            f"a block of {kv.block_size} tokens takes {kv.block_bytes} bytes: raise {request_knob} by at least "
            f"{_mib(missing)} (max_model_len is {kv.max_model_len})"
        )
    tokens = (num_blocks - 1) * kv.block_size
    raise MemoryPlanError(
        f"max_model_len is {kv.max_model_len} tokens, but the KV cache has room for {tokens} "
        f"({num_blocks} blocks of {kv.block_size}, one of them for padding, in {_mib(budget)}): raise {request_knob} "
        f"by at least {_mib(missing)}, or lower max_model_len to {tokens}"
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.1f} MiB"
