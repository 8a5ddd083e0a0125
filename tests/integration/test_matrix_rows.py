"""Two rows of the matrix and their baseline, measured by real processes on the tiny checkpoint."""

import json
from pathlib import Path

import pytest

from server.cli import main


def test_both_backings_are_accepted_on_a_cpu(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "matrix.json"
    flags = ["--compile", "off", "--memory-bytes", "1GiB", "--num-threads", "1", "--device", "cpu"]
    flags += ["--encoder-graph-budgets", "512", "--requests", "4", "--output", str(output)]
    code = main(["matrix", str(tiny_checkpoint), *flags, "--only", "both"])
    rows = json.loads(output.read_text())
    assert [row["problems"] for row in rows] == [[], [], []]
    assert code == 0
    vmm, torch = rows[1:]
    assert (vmm["captures_per_bucket"], torch["captures_per_bucket"]) == (1, 2)
    assert vmm["tokens_equal"] == torch["tokens_equal"] == {"single": True, "pair": True}
    assert len(set(map(tuple, [vmm["tokens"]["single"], *vmm["tokens"]["pair"]]))) == 3
    assert vmm["encoder_hits"] == 3 + 4
    assert vmm["decoder_misses"].keys() == {"mixed_step"}
    assert "accepted" in capsys.readouterr().out
