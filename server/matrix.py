"""`fovea matrix`: configurations of graphs and memory, each started in a fresh process, each row judged as it comes.

Knows processes and the file of results. A process of the runtime's
(`runtime.matrix_row`) measures, so that this one stays free of torch. A row is written as its process ends, so that a
matrix can be done in pieces: `--only` picks, `--resume` leaves out what the file has.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from runtime.checkpoint import CheckpointError, locate_model
from runtime.config import MIB
from server.bench_throughput import PAIR_SETTINGS
from server.matrix_acceptance import judge
from server.matrix_configurations import BACKINGS, CONFIGURATIONS, RESULTS, Configuration
from server.plan import table
from server.settings import Settings, SettingsError, load_settings

ROW_COMMAND = (sys.executable, "-m", "runtime.matrix_row")


def run_matrix(arguments: argparse.Namespace) -> int:
    """Measures what is asked for; the exit code is 1 if a row is missing or not accepted."""
    names = arguments.only or list(CONFIGURATIONS)
    backings = arguments.backing or list(BACKINGS)
    given = {name: value for name, value in vars(arguments).items() if name in Settings.model_fields}
    given.pop("kv_backing", None)
    output = arguments.output or default_output(str(given.get("model", "demo")))
    rows = read_rows(output) if arguments.resume else []
    done = {(row["configuration"], row["backing"]) for row in rows}
    processes = RowProcesses()
    try:
        for name in names:
            for backing in CONFIGURATIONS[name].backings:
                if backing not in backings or (name, backing) in done:
                    continue
                settings = settings_of(CONFIGURATIONS[name], backing, given, arguments.config)
                baseline = baseline_name(settings)
                if not any(row["configuration"] == baseline for row in rows):
                    add_row(rows, output, measured(processes, arguments, settings, baseline, "vmm", is_baseline=True))
                row = measured(processes, arguments, settings, name, backing)
                judge(row, CONFIGURATIONS[name], rows, baseline)
                add_row(rows, output, row)
                print(line_of(row), flush=True)
    finally:
        processes.close()
    wanted = [row for row in rows if row["configuration"] in names and row["backing"] in backings]
    print(matrix_table(wanted))
    print()
    summary = {"output": str(output), "rows": len(wanted), "accepted": sum(row["accepted"] for row in wanted)}
    print(json.dumps(summary))
    return 0 if wanted and summary["accepted"] == summary["rows"] else 1


def settings_of(configuration: Configuration, backing: str, given: Mapping[str, Any], config: Path | None) -> Settings:
    """The reference's settings, under the configuration's, under what was given.

    Raises:
        SystemExit: no process could start with them, or the model is not there.
    """
    # A pair is judged by its steps: its pictures are encoded in one.
    own = {**PAIR_SETTINGS, "encode_ahead": "off", **configuration.settings, "kv_backing": backing}
    try:
        settings = load_settings({**own, **given}, config=config)
        locate_model(settings.model, settings.revision)
    except (SettingsError, CheckpointError) as error:
        raise SystemExit(f"fovea matrix: {error}") from error
    return settings


def baseline_name(settings: Settings) -> str:
    """One name for all settings that must give the same answers."""
    engine = settings.engine_config()
    parts = [f"compile={engine.compile}"]
    if engine.mm_encoder_only:
        parts.append("encoder-only")
    follows = engine.encoder_graph_policy == "follow-decoder" and engine.decoder_graphs == "none"
    has_encoder = engine.encoder_graphs and not follows
    if engine.enforce_eager or (not has_encoder and engine.decoder_graphs == "none"):
        parts.append("eager")
    else:
        budgets = ",".join(map(str, engine.encoder_graph_budgets or ())) or "default"
        parts += [f"encoder={budgets if has_encoder else 'none'}", f"decoder={engine.decoder_graphs}"]
    return "baseline: " + " ".join(parts)


def measured(
    processes: "RowProcesses",
    arguments: argparse.Namespace,
    settings: Settings,
    name: str,
    backing: str,
    *,
    is_baseline: bool = False,
) -> dict[str, Any]:
    """The row of one fresh process, or one that says how the process ended."""
    order = {
        "config": msgspec.to_builtins(settings.engine_config()),
        "num_requests": 0 if is_baseline else arguments.requests,
        "is_baseline": is_baseline,
        "log_level": arguments.row_log_level,
    }
    row: dict[str, Any] = {"configuration": name, "backing": backing, "commit": commit(), "accepted": is_baseline}
    try:
        code, output, errors = processes.run(msgspec.json.encode(order), timeout=arguments.row_timeout)
    except subprocess.TimeoutExpired:
        return {**row, "accepted": False, "problems": [f"it took more than {arguments.row_timeout:.0f} s"]}
    sys.stderr.write(errors)
    figures = None if code else figures_of(output)
    if figures is None:
        last = errors.strip().splitlines()[-1:]
        return {**row, "accepted": False, "problems": [f"exit code {code}: {' '.join(last)}"]}
    return {**row, "problems": [], **figures}


class RowProcesses:
    """Fresh processes, one for each row. The next one is started while a row is measured: it reads its order after its
    imports, and touches no device before."""

    def __init__(self) -> None:
        self._next = self._start()

    def run(self, order: bytes, *, timeout: float) -> tuple[int, bytes, str]:
        """Exit code, standard output and standard error of the process that got the order.

        Raises:
            subprocess.TimeoutExpired: it took longer; it is gone.
        """
        process, self._next = self._next, self._start()
        try:
            output, errors = process.communicate(order, timeout=timeout)
        except BaseException:  # it took too long, or somebody interrupts
            _end(process)
            raise
        return process.returncode, output, errors.decode(errors="replace")

    def close(self) -> None:
        """Ends the process that got no order."""
        _end(self._next)

    def _start(self) -> "subprocess.Popen[bytes]":
        pipe = subprocess.PIPE
        return subprocess.Popen(ROW_COMMAND, stdin=pipe, stdout=pipe, stderr=pipe)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.communicate()


def figures_of(output: bytes) -> dict[str, Any] | None:
    """The JSON object of the last line; `None` if there is none, as when a library ended the process half-way."""
    try:
        figures = json.loads(output.decode(errors="replace").splitlines()[-1])
    except (IndexError, ValueError):
        return None
    return figures if isinstance(figures, dict) else None


def add_row(rows: list[dict[str, Any]], output: Path, row: dict[str, Any]) -> None:
    """Appends, and replaces the file as a whole, so that an end at any time leaves a whole one."""
    rows.append(row)
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_suffix(".partial")
    partial.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, output)


def read_rows(output: Path) -> list[dict[str, Any]]:
    """The file's rows that were measured and judged: those of processes that failed are measured again, and so are
    those whose baseline failed."""
    if not output.exists():
        return []
    rows: list[dict[str, Any]] = json.loads(output.read_text(encoding="utf-8"))
    measured_rows = [row for row in rows if "requested_bytes" in row]
    names = {row["configuration"] for row in measured_rows}
    return [row for row in measured_rows if row.get("baseline", row["configuration"]) in names]


def default_output(model: str) -> Path:
    """`benchmarks/results/matrix-<device>-<model>.json`."""
    ended = subprocess.run(
        [sys.executable, "-m", "runtime.matrix_row", "--device-name"], capture_output=True, text=True
    )
    device = ended.stdout.strip().splitlines()[-1] if ended.returncode == 0 and ended.stdout.strip() else "unknown"
    return RESULTS / f"matrix-{device}-{Path(model).name}.json"


def commit() -> str:
    """The commit that is measured, with `+` where files differ from it.

    Where the tree is a copy without a repository, the variable GIT_COMMIT says it; else it is `unknown`.
    """
    if given := os.environ.get("GIT_COMMIT"):
        return given
    ended = subprocess.run(["git", "describe", "--always", "--abbrev=12", "--dirty=+"], capture_output=True, text=True)
    return ended.stdout.strip() or "unknown" if ended.returncode == 0 else "unknown"


def line_of(row: Mapping[str, Any]) -> str:
    outcome = "accepted" if row["accepted"] else "; ".join(row["problems"])
    return f"{row['configuration']} ({row['backing']}): {outcome}"


def matrix_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line a row: what graphs took and reserved, what the KV cache got, what is unplanned, and the verdict."""
    header = (
        "configuration",
        "backing",
        "encoder MiB",
        "decoder MiB",
        "reserved MiB",
        "KV MiB",
        "unplanned",
        "verdict",
    )
    lines = []
    for row in rows:
        if "requested_bytes" not in row:
            lines.append((row["configuration"], row["backing"], *["-"] * 5, "failed"))
            continue
        captured = row["captured_mib"]
        lines.append(
            (
                row["configuration"],
                row["backing"],
                f"{captured.get('encoder', 0):.1f}",
                f"{captured.get('decoder', 0):.1f}",
                f"{sum(row['reserved_mib'].values()):.1f}",
                f"{row['kv'] / MIB:.1f}",
                str(max(row["unplanned_bytes"], row["unplanned_after_bytes"])),
                "accepted" if row["accepted"] else "refused",
            )
        )
    return table(header, lines, left=2)
