"""The soak runs where torch reserves nothing: that it serves every kind of request, and what it calls a problem."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_soak import budgets_that_some_pictures_exceed, main, problems_of
from tests.process_memory import memory_beside_this_process

STEADY: dict[str, Any] = {
    "requests": 2000,
    "errors": 0,
    "first_error": None,
    "failed_steps": 0,
    "torch_reserved_bytes_before": 100,
    "torch_reserved_bytes_peak": 100,
    "device_used_bytes_before": 200,
    "device_used_bytes_peak": 264,
    "margin_bytes": 64,
    "unplanned_bytes": 0,
    "oom_count": 0,
}


def test_soak_serves_a_mix_and_appends_its_row(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    num_threads = torch.get_num_threads()
    flags = [
        *("--device", "cpu", "--max-model-len", "256", "--max-num-seqs", "4", "--max-num-batched-tokens", "128"),
        *("--max-pixels", str(64 * 784), "--num-threads", "1", "--memory-bytes", str(memory_beside_this_process())),
        *("--output", str(tmp_path / "soak.json")),
    ]
    codes = [main([str(tiny_checkpoint), *flags, "--requests", count]) for count in ("60", "3")]
    torch.set_num_threads(num_threads)
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    first, second = json.loads((tmp_path / "soak.json").read_text())
    assert codes == [0, 0]
    assert second == row
    assert (first["requests"], first["errors"], first["problems"]) == (60, 0, [])
    assert first["aborted"] > 2
    # Some pictures fit no budget; and a CPU's second thread may be at one meanwhile.
    assert first["encoder_misses"].keys() - {"busy"} == {"too_large"}
    assert min(first["encoder_hits"], first["encoder_misses"]["too_large"]) > 10
    assert first["device_used_bytes_before"] > 0


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, None),
        ({"torch_reserved_bytes_peak": 101}, "torch reserved 1 bytes more"),
        ({"device_used_bytes_peak": 265}, "grew by 65 bytes; the margin is 64"),
        ({"unplanned_bytes": 1}, "unplanned is 1 bytes"),
        ({"oom_count": 2}, "2 allocations failed"),
        ({"errors": 1, "first_error": "the step failed"}, "the first with: the step failed"),
        ({"failed_steps": 1}, "1 steps failed"),
        ({"requests": 0}, "no request was served"),
    ],
)
def test_what_grew_or_failed_is_a_problem(change: dict[str, Any], problem: str | None) -> None:
    found = problems_of({**STEADY, **change})
    assert len(found) == (problem is not None)
    assert problem is None or problem in found[0]


def test_default_budgets_leave_the_largest_pictures_out() -> None:
    assert budgets_that_some_pictures_exceed((64, 96, 128, 256), 256) == (64, 96, 128)
    assert budgets_that_some_pictures_exceed((256,), 256) == (128,)
