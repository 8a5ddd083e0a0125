"""What a row of `fovea matrix` must fulfil. Arithmetic on rows; starts nothing."""

from collections.abc import Mapping, Sequence
from typing import Any

from runtime.config import MIB
from server.matrix_configurations import Configuration

# What the second capture of the torch backing may differ by.
TOLERANCE = 0.01
TOLERANCE_BYTES = 2 * MIB


def judge(row: dict[str, Any], configuration: Configuration, rows: Sequence[Mapping[str, Any]], baseline: str) -> None:
    """Adds `baseline`, `tokens_equal`, `problems` and `accepted`."""
    row["baseline"] = baseline
    if row["problems"]:
        return
    reference = next((other for other in rows if other["configuration"] == baseline), {})
    tokens = row["tokens"]
    if "tokens" not in reference:
        row["tokens_equal"] = dict.fromkeys(tokens, False)
        row["problems"] = [f"there is nothing to compare with: the row '{baseline}' failed"]
        return
    row["tokens_equal"] = {name: tokens[name] == reference["tokens"].get(name) for name in tokens}
    row["problems"] = problems_of(row, configuration)
    row["accepted"] = not row["problems"]


def problems_of(row: Mapping[str, Any], configuration: Configuration) -> list[str]:
    """What of the acceptance a row does not fulfil; empty if it is accepted."""
    problems = []

    def demand(is_fulfilled: bool, problem: str) -> None:
        if not is_fulfilled:
            problems.append(problem)

    demand(row["residual_bytes"] == 0, f"residual is {row['residual_bytes']} bytes")
    if configuration.is_reserved:
        demand(row["unplanned_bytes"] <= 0, f"unplanned is {row['unplanned_bytes']} bytes at ready")
        demand(row["unplanned_after_bytes"] <= 0, f"unplanned is {row['unplanned_after_bytes']} bytes after serving")
    demand(not row.get("errors"), f"{row.get('errors')} requests failed")
    for name, is_equal in row["tokens_equal"].items():
        demand(is_equal, f"tokens of the {name} differ from the baseline's")
    captured, reserved, measured = (row[f"{name}_mib"] for name in ("captured", "reserved", "measured"))
    for family, has_graphs in (("encoder", configuration.has_encoder), ("decoder", configuration.has_decoder)):
        if not has_graphs:
            taken = captured.get(family, 0), reserved.get(family, 0)
            demand(taken == (0, 0), f"{family} graphs took {taken[0]} MiB, {taken[1]} of them reserved")
            continue
        states = set(row["bucket_states"][family].values())
        demand(states == {"captured"}, f"{family} buckets are {', '.join(sorted(states)) or 'none'}")
        demand(measured[family] > 0, f"{family} graphs were not measured")
        expected = measured[family] if configuration.is_reserved else 0
        demand(reserved[family] == expected, f"{family} graphs reserve {reserved[family]} MiB, not {expected}")
        misses = {name: count for name, count in row[f"{family}_misses"].items() if name not in allowed_misses(row)}
        demand(not misses, f"{family} misses: {misses}")
        problems += pool_problems(row, configuration, family)
    if configuration.has_encoder and "pair_encoder_replays" in row:
        replays = row["pair_encoder_replays"]
        demand(replays == 1, f"the pair took {replays} replays of the encoder, not 1")
    return list(dict.fromkeys(problems))


def allowed_misses(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Decode buckets serve no mixed step; with `full` there are mixed ones, and none may miss."""
    has_mixed = any(name.startswith("mixed-") for name in row["bucket_states"].get("decoder", {}))
    return () if has_mixed else ("mixed_step",)


def pool_problems(row: Mapping[str, Any], configuration: Configuration, family: str) -> list[str]:
    """The backing's own claims: one capture whose parts account for the reservation, or two that agree."""
    problems = []
    captures = row["captures_per_bucket"]
    captured, reserved = row["captured_graph_bytes"][family], row["reserved_graph_bytes"][family]
    if row["backing"] == "vmm":
        if captures != 1:
            problems.append(f"buckets were captured {captures} times")
        parts = row["pool_segment_bytes"][family] + row["driver_bytes"][family]
        if row["graph_backend"][family] == "cuda" and parts != captured:
            problems.append(f"{family} pool and driver hold {parts} bytes, {captured} were counted")
        if configuration.is_reserved:
            if captured != reserved:
                problems.append(f"{family} graphs took {captured} bytes, {reserved} were reserved")
            if (driver := sum(row["driver_bytes"].values())) != row["graph_driver"]:
                problems.append(f"graph_driver is {row['graph_driver']} bytes, the families' parts are {driver}")
        return problems
    if captures != 2:
        problems.append(f"buckets were captured {captures} times, not once to measure and once to keep")
    if row["private_segments_left"]:
        problems.append(f"the probe left {row['private_segments_left']} bytes in private segments")
    difference = abs(captured - reserved)
    if configuration.is_reserved and difference > max(TOLERANCE_BYTES, TOLERANCE * reserved):
        problems.append(f"{family} graphs took {captured} bytes, {reserved} were reserved")
    return problems
