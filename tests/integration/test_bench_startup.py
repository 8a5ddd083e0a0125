"""`fovea bench startup` on real processes: what it says of a start, and of one that fails."""

import json
from pathlib import Path

import pytest

from server.bench_startup import phases_of
from server.cli import main

FLAGS = ("--memory-bytes", "1GiB", "--max-model-len", "256", "--max-num-batched-tokens", "128", "--num-threads", "1")


def test_a_start_is_timed_from_outside_and_by_phase(tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*FLAGS, "--max-pixels", "50176", "--encoder-graph-budgets", "64"]
    assert main(["bench", "startup", "--runs", "1", "--", str(tiny_checkpoint), *flags]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["ready_seconds"] == [result["median_ready_seconds"]]
    phases = result["median_phase_seconds"]
    assert {"load_weights", "profile", "capture_encoder", "capture_decoder", "final_reading"} <= set(phases)
    # The process was started before its engine, and was ready after it.
    assert 0 < sum(phases.values()) < result["median_ready_seconds"]


def test_a_start_that_fails_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "startup", "--runs", "3", "--", "/nonexistent"]) == 1
    assert "did not become ready" in capfd.readouterr().err


def test_phases_are_read_from_metrics() -> None:
    text = (
        "# TYPE fovea_startup_phase_seconds gauge\n"
        'fovea_startup_phase_seconds{phase="profile"} 1.5\n'
        'fovea_startup_phase_seconds{phase="plan"} 2e-05\n'
        'fovea_phase_seconds{phase="decode"} 7\n'
    )
    assert phases_of(text) == {"profile": 1.5, "plan": 2e-05}
    assert phases_of("401 Unauthorized") == {}
