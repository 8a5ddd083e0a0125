"""The README's measurements are those of the result files, and the table has a column for everything compared."""

import json
from typing import Any

from benchmarks import compare_cpu
from benchmarks.readme_table import CHECKPOINTS, NAMES, README, RESULTS, SCENARIOS, cpu_table, with_tables


def test_readme_says_what_the_results_say() -> None:
    readme = README.read_text()
    assert with_tables(readme) == readme


def test_every_server_and_scenario_of_the_comparison_is_named() -> None:
    assert tuple(NAMES) == compare_cpu.SERVERS
    assert tuple(CHECKPOINTS) == compare_cpu.CHECKPOINTS
    assert list(SCENARIOS) == [scenario.name for scenario in compare_cpu.SCENARIOS]


def bench_of(result: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The result with the random checkpoint alone, and something of it changed."""
    return {**result, "checkpoints": {"bench": {**result["checkpoints"]["bench"], **changes}}}


def test_medians_are_spoken_of_where_there_are_several_rounds() -> None:
    result = json.loads((RESULTS / "compare-cpu.json").read_text())
    *_, one = cpu_table(bench_of(result, rounds=1)).splitlines()
    *_, three = cpu_table(bench_of(result, rounds=3)).splitlines()
    assert one.startswith(f"One round on {result['machine']['cores']} cores (")
    assert three.startswith(f"Medians of 3 interleaved rounds on {result['machine']['cores']} cores (")


def test_peer_that_was_left_out_has_no_row_and_one_that_ran_has_its_latencies() -> None:
    result = json.loads((RESULTS / "compare-cpu.json").read_text())
    measured = result["checkpoints"]["bench"]["servers"]["fovea"]
    alone = cpu_table(bench_of(result, servers={"fovea": measured}))
    assert "vllm-cpu" not in alone.partition("Commit")[0]
    both = cpu_table(bench_of(result, servers={"fovea": measured, "vllm-cpu": measured}))
    latencies = f"{measured['text-8']['ttft_ms_p50']:.0f} / {measured['text-8']['itl_ms_p50']:.1f}"
    rows = [line for line in both.splitlines() if line.startswith("| vllm-cpu")]
    assert len(rows) == 2
    assert latencies in rows[1]
