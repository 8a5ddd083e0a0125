"""`fovea plan --tune` on the tiny checkpoint: real replays, whatever they take, and a ladder for a start."""

import json
from pathlib import Path

import pytest

from server.cli import main
from server.settings import load_settings
from tests.process_memory import memory_beside_this_process

FLAGS = [
    *("--max-pixels", str(64 * 784), "--num-threads", "1", "--device", "cpu", "--max-model-len", "256"),
    *("--max-num-batched-tokens", "128", "--encoder-graph-max-items", "2"),
]


def flags() -> list[str]:
    return [*FLAGS, "--memory-bytes", str(memory_beside_this_process())]


def test_tuning_proposes_a_ladder_for_a_sample_and_saves_it(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = tmp_path / "sizes.txt"
    lines.write_text("112x112\n112x112\n224x196\n")
    saved = tmp_path / "ladder.yaml"
    code = main(
        ["plan", str(tiny_checkpoint), *flags(), "--tune", "--json", "--sizes", f"@{lines}", "--save", str(saved)]
    )
    result = json.loads(capsys.readouterr().out)
    assert code == 0
    assert (result["pictures"], result["picture_tokens"]) == (3, {"min": 16, "median": 16, "max": 56})
    measured = [rung["tokens"] for rung in result["candidates"]]
    assert {16, 32, 56, 64} <= set(measured)
    assert all(rung["replay_ms"] > 0 and rung["mib"] > 0 for rung in result["candidates"])
    assert [result["eager_ms"][0][0], result["eager_ms"][-1][0]] == [16, 56]
    tuned, current = result["tuned"], result["current"]
    assert set(tuned["budgets"]) <= set(measured)
    assert current["budgets"] == [64]
    assert current["padded_share"] > 0.05  # one or two pictures of 16 or 56 tokens in 64
    assert result["flag"] == "--encoder-graph-budgets " + ",".join(map(str, tuned["budgets"]))
    settings = load_settings({}, environ={}, config=saved)
    assert list(settings.engine_config().encoder_graph_budgets or ()) == tuned["budgets"]


def test_tuning_without_a_sample_prints_tables(tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tiny_checkpoint), *flags(), "--tune"]) == 0
    out = capsys.readouterr().out
    for word in ("budget", "replay ms", "eager ms", "ms an image", "padded", "current", "tuned"):
        assert word in out
    assert out.splitlines()[-1].startswith("--encoder-graph-budgets ")


def test_an_encoder_alone_is_tuned_against_all_that_it_asks_for(
    tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(tiny_checkpoint), *flags(), "--tune", "--json", "--mm-encoder-only"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["memory_mib"] > 50 * max(rung["mib"] for rung in result["candidates"])


def test_what_cannot_be_tuned_says_why(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(tiny_checkpoint), *flags(), "--tune", "--enforce-eager"]) == 1
    assert "no ladder to tune" in capsys.readouterr().err
    assert main(["plan", str(tiny_checkpoint), *flags(), "--tune", "--sizes", "4000x10"]) == 1
    assert "4000 x 10" in capsys.readouterr().err
    for wrong in (["--sizes", "56x56"], ["--tune", "--sizes", "56"], ["--tune", "--sizes", f"@{tmp_path / 'none'}"]):
        with pytest.raises(SystemExit):
            main(["plan", str(tiny_checkpoint), *wrong])
    error = capsys.readouterr().err
    assert "belong to --tune" in error
    assert "cannot be read" in error
