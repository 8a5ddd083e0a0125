"""Writes the runbook's table of capacity figures from the result files, so that no number there is typed.

A row for each `benchmarks/results/throughput-*.json` that was measured on a GPU: the last line of `fovea bench
throughput`, with `gpu` (the device's name) and `commit` added. What was not measured has no row.

python -m benchmarks.capacity_table           # rewrites docs/operations.md
python -m benchmarks.capacity_table --check   # exits with 1 if it is not what the results say
"""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RUNBOOK = ROOT / "docs" / "operations.md"
RESULTS = ROOT / "benchmarks" / "results"
START, END = "<!-- measured: capacity -->\n", "<!-- end of measured -->"
HEAD = ("GPU", "workload", "requests/s", "output tokens/s", "TTFT p50", "ITL p50", "KV cache", "start", "commit")
EMPTY = "No GPU has been measured yet: the table gets a row for each result of `fovea bench throughput`.\n"


def capacity_table(results: Iterable[dict[str, Any]]) -> str:
    """Markdown, one row a result on a GPU."""
    rows = [
        (
            result["gpu"],
            result["preset"],
            f"{result['requests_per_second']:.1f}",
            f"{result['output_tokens_per_second']:.0f}",
            f"{result['ttft_ms']['p50']:.0f} ms",
            f"{result['itl_ms']['p50']:.1f} ms",
            f"{result['kv_tokens']} tokens",
            f"{result['ready_seconds']:.0f} s",
            f"`{result['commit'][:12]}`",
        )
        for result in results
        if result.get("device", "").startswith("cuda")
    ]
    if not rows:
        return EMPTY
    lines = [HEAD, ("---",) * len(HEAD), *sorted(rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def with_table(runbook: str) -> str:
    """The runbook with its table made anew.

    Raises:
        ValueError: the runbook has no place for it.
    """
    head, start, rest = runbook.partition(START)
    _, end, tail = rest.partition(END)
    if not start or not end:
        raise ValueError(f"docs/operations.md lacks {START.strip()!r} or {END!r}")
    files = sorted(RESULTS.glob("throughput-*.json"))
    return head + start + capacity_table(json.loads(file.read_text(encoding="utf-8")) for file in files) + end + tail


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the runbook is current")
    arguments = parser.parse_args()
    made = with_table(RUNBOOK.read_text(encoding="utf-8"))
    if arguments.check:
        sys.exit(made != RUNBOOK.read_text(encoding="utf-8"))
    RUNBOOK.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
