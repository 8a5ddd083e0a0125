"""The profile script runs where graphs are emulated: what it times there means little, that it runs means much."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_profile import main
from tests.process_memory import memory_beside_this_process


def test_profile_prints_a_table_and_a_line_of_json(tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    num_threads = torch.get_num_threads()
    small = {
        "memory_bytes": memory_beside_this_process(),
        "num_threads": 1,
        "max_num_batched_tokens": 64,
        "device": "cpu",
    }
    code = main(
        [
            str(tiny_checkpoint),
            "--budgets",
            "4",
            "16",
            "--batches",
            "1",
            "3",
            "--context",
            "20",
            "--settings",
            json.dumps(small),
        ]
    )
    torch.set_num_threads(num_threads)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 0
    assert [row["what"] for row in result["rows"]] == [
        "encoder 4 tokens",
        "encoder 16 tokens",
        "decode, 1 sequences",
        "decode, 3 sequences",
    ]
    assert all(row["replay_ms"] <= row["wall_ms"] for row in result["rows"])
