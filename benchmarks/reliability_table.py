"""Writes the table of docs/reliability.md from what `benchmarks.reliability` measured; no number there is typed.

python -m benchmarks.reliability_table           # rewrites docs/reliability.md
python -m benchmarks.reliability_table --check   # exits with 1 if it is not what the result says
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reliability.md"
RESULT = ROOT / "benchmarks" / "results" / "reliability.json"
START, END = "<!-- measured: reliability -->\n", "<!-- end of measured -->"

MIB = 1 << 20
PROCESSES = {"server": "server", "engine": "engine", "image_workers": "image workers"}
PROBES = {"/health/live": "liveness", "/health/ready": "readiness", "/metrics": "metrics"}
ENDS = {
    "signal": "SIGTERM: every stream ends by itself, exit code 0",
    "engine killed": "engine killed: every stream ends, whole or with an error event, exit code 1",
    "engine hung, then signal": "engine hung: liveness 503; after SIGTERM every stream ends with an error event, "
    "exit code 0",
}


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    load = result["load"]
    rows = [
        (
            f"streams with a new picture each, {load['streams_at_a_time']} at a time",
            counted(load["streams"]),
            f"{load['output_tokens']} tokens in {load['seconds']:g} s",
        )
    ]
    rows += [
        (f"fault injected: {name}", counted(tally), "told to that request alone" if tally["sent"] else "")
        for name, tally in load["faults"].items()
    ]
    rows += [
        ("bad inputs: damaged pictures, half bodies", counted(load["bad_inputs"]), "200 or 400"),
        ("clients that left", counted(load["leavers"]), f"{load['disconnects_seen']:g} disconnects counted"),
    ]
    for path, name in PROBES.items():
        probe = load["probes"][path]
        times = f"p50 {probe['p50_ms']:g} ms, p99 {probe['p99_ms']:g} ms, longest {probe['max_ms']:g} ms"
        rows.append((f"{name} meanwhile", f"{probe['asked'] - probe['failed']} of {probe['asked']}", times))
    for cause, name in ENDS.items():
        end = result["ends"][cause]
        rows.append((name, counted(end["streams"]), f"exit code {end['exit_code']}"))
    lines = ["| what | as it should be | |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows), ""]
    lines += ["| after the load | memory before | after | file descriptors before | after |", "|---|---|---|---|---|"]
    for key, name in PROCESSES.items():
        usage = load["memory"][key]
        sizes = [f"{usage[f'pss_bytes_{when}'] / MIB:.0f} MiB" for when in ("before", "after")]
        counts = [str(usage[f"descriptors_{when}"]) for when in ("before", "after")]
        lines.append(f"| {name} | {' | '.join([*sizes, *counts])} |")
    left = load["left"]
    machine = result["machine"]
    lines += [
        "",
        f"Left afterwards: {left['kv_blocks']:g} KV blocks in use, {left['running']:g} running, {left['waiting']:g} "
        f"waiting, {left['in_flight']:g} in flight, {left['embeddings_beyond_capacity']:g} embedding rows beyond the "
        f"cache's capacity, {left['unplanned_bytes']:.0f} bytes beyond the memory plan.",
        "",
        f"Measured on {machine['cores']} cores ({machine['processor']}) that also ran the load; model: "
        f"{result['model']}. Commit `{result['commit'][:12]}`, command `{result['command']}`.",
    ]
    if result["failures"]:
        lines += ["", "What did not hold:", "", *(f"- {failure}" for failure in result["failures"])]
    return "\n".join(lines) + "\n"


def counted(tally: dict[str, Any]) -> str:
    if not tally["sent"]:
        return "not tried in this run"
    return f"{tally['right']} of {tally['sent']}"


def with_table(page: str, result: dict[str, Any]) -> str:
    """The page with its table made anew.

    Raises:
        ValueError: the page has no place for it.
    """
    head, start, rest = page.partition(START)
    _, end, tail = rest.partition(END)
    if not start or not end:
        raise ValueError(f"docs/reliability.md lacks {START.strip()!r} or {END!r}")
    return head + start + table(result) + end + tail


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the page is current")
    args = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    made = with_table(page, json.loads(RESULT.read_text(encoding="utf-8")))
    if args.check:
        sys.exit(made != page)
    PAGE.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
