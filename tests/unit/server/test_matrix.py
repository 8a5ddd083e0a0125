"""The matrix: what it starts, what it accepts, and how it goes on where it stopped. No engine runs here."""

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runtime.config import EngineConfig
from runtime.stats import MEMORY_COMPONENTS
from server.cli import main
from server.matrix import RowProcesses, baseline_name, settings_of
from server.matrix_acceptance import problems_of
from server.matrix_configurations import CONFIGURATIONS

GOOD: dict[str, Any] = {
    "backing": "vmm",
    "requested_bytes": 1000,
    "residual_bytes": 0,
    "unplanned_bytes": -5,
    "unplanned_after_bytes": 0,
    "errors": 0,
    "tokens_equal": {"single": True, "pair": True},
    "pair_encoder_replays": 1,
    "measured_mib": {"encoder": 10.0, "decoder": 20.0},
    "reserved_mib": {"encoder": 10.0, "decoder": 20.0},
    "captured_mib": {"encoder": 10.0, "decoder": 20.0},
    "graph_backend": {"encoder": "cuda", "decoder": "cuda"},
    "pool_segment_bytes": {"encoder": 9 << 20, "decoder": 17 << 20},
    "driver_bytes": {"encoder": 1 << 20, "decoder": 3 << 20},
    "graph_driver": 4 << 20,
    "reserved_graph_bytes": {"encoder": 10 << 20, "decoder": 20 << 20},
    "captured_graph_bytes": {"encoder": 10 << 20, "decoder": 20 << 20},
    "captures_per_bucket": 1,
    "private_segments_left": 0,
    "bucket_states": {"encoder": {"1024": "captured"}, "decoder": {"1": "captured", "2": "captured"}},
    "encoder_misses": {},
    "decoder_misses": {"mixed_step": 9},
}
TWIN = {**GOOD, "backing": "torch", "captures_per_bucket": 2}


def test_a_row_that_fulfils_everything_has_no_problems() -> None:
    assert problems_of(GOOD, CONFIGURATIONS["both"]) == []
    assert problems_of(TWIN, CONFIGURATIONS["both"]) == []
    # 2 MiB or 1 % of what was reserved, whichever is more.
    within = {"encoder": 12 << 20, "decoder": 20 << 20}
    assert problems_of({**TWIN, "captured_graph_bytes": within}, CONFIGURATIONS["both"]) == []


@pytest.mark.parametrize(
    ("row", "change", "problem"),
    [
        (GOOD, {"residual_bytes": 1}, "residual is 1 bytes"),
        (GOOD, {"unplanned_bytes": 1}, "at ready"),
        (GOOD, {"unplanned_after_bytes": 1}, "after serving"),
        (GOOD, {"errors": 2}, "2 requests failed"),
        (GOOD, {"tokens_equal": {"single": True, "pair": False}}, "tokens of the pair differ"),
        (GOOD, {"pair_encoder_replays": 2}, "the pair took 2 replays"),
        (GOOD, {"reserved_mib": {"encoder": 0, "decoder": 20.0}}, "encoder graphs reserve 0"),
        (GOOD, {"encoder_misses": {"too_large": 1}}, "encoder misses"),
        (GOOD, {"decoder_misses": {"mixed_step": 9, "too_large": 1}}, "decoder misses: {'too_large': 1}"),
        (GOOD, {"bucket_states": {"encoder": {"8": "capture_failed"}, "decoder": {"1": "captured"}}}, "capture_failed"),
        (GOOD, {"captures_per_bucket": 2}, "captured 2 times"),
        (GOOD, {"pool_segment_bytes": {"encoder": 8 << 20, "decoder": 17 << 20}}, "encoder pool and driver hold"),
        (GOOD, {"reserved_graph_bytes": {"encoder": 10 << 20, "decoder": 1}}, "decoder graphs took 20971520 bytes, 1"),
        (GOOD, {"graph_driver": 1 << 20}, "graph_driver is 1048576 bytes, the families' parts are 4194304"),
        (TWIN, {"captures_per_bucket": 1}, "captured 1 times"),
        (TWIN, {"private_segments_left": 5}, "left 5 bytes"),
        (TWIN, {"captured_graph_bytes": {"encoder": 13 << 20, "decoder": 20 << 20}}, "encoder graphs took"),
    ],
)
def test_what_is_not_fulfilled_is_named(row: dict[str, Any], change: dict[str, Any], problem: str) -> None:
    (found,) = problems_of({**row, **change}, CONFIGURATIONS["both"])
    assert problem in found


def test_full_graphs_may_not_miss_mixed_steps() -> None:
    states = {"encoder": {"512": "captured"}, "decoder": {"1": "captured", "mixed-64": "captured"}}
    (problem,) = problems_of({**GOOD, "bucket_states": states}, CONFIGURATIONS["full"])
    assert "mixed_step" in problem


def test_opting_out_must_measure_and_reserve_nothing() -> None:
    row = {
        **GOOD,
        "reserved_mib": {"encoder": 0.0, "decoder": 0.0},
        "captured_mib": {"encoder": 10.0, "decoder": 0.0},
        "unplanned_bytes": 5 << 20,
    }
    assert problems_of(row, CONFIGURATIONS["opt-out"]) == []
    (problem,) = problems_of({**row, "reserved_mib": {"encoder": 10.0, "decoder": 0.0}}, CONFIGURATIONS["opt-out"])
    assert "not 0" in problem


def test_without_graphs_nothing_may_be_captured() -> None:
    nothing = {"encoder": 0.0, "decoder": 0.0}
    for name in ("eager", "no-graphs", "no-graphs-uncompiled", "follow-decoder"):
        row = {**GOOD, "captured_mib": nothing, "reserved_mib": nothing}
        assert problems_of(row, CONFIGURATIONS[name]) == []
        assert len(problems_of(GOOD, CONFIGURATIONS[name])) == 2


def test_the_configurations_are_the_reference_s_nine_and_ours() -> None:
    names = list(CONFIGURATIONS)
    assert len(names) == 12
    engines = {name: settings_of(CONFIGURATIONS[name], "vmm", {}, None).engine_config() for name in CONFIGURATIONS}
    assert all(engine.gpu_memory_utilization == 0.12 and engine.max_num_seqs == 2 for engine in engines.values())
    assert engines["encoder"].encoder_graph_budgets == (1024,)
    assert engines["three-budgets"].encoder_graph_budgets == (512, 1024, 2048)
    assert engines["eager"].enforce_eager
    assert engines["opt-out"].reserve_graph_memory == "off"
    assert engines["encoder-only"].mm_encoder_only


def test_configurations_that_answer_alike_share_a_baseline() -> None:
    names = {
        name: baseline_name(settings_of(CONFIGURATIONS[name], backing, {}, None))
        for name in CONFIGURATIONS
        for backing in CONFIGURATIONS[name].backings
    }
    assert names["encoder"] == names["opt-out"]
    assert names["eager"] == names["no-graphs-uncompiled"]
    assert len(set(names.values())) == 9


class FakeProcesses:
    """Stands in for the processes that measure: every row is good, except those of the names that `fail`."""

    def __init__(self) -> None:
        self.orders: list[dict[str, Any]] = []
        self.fail = False
        self.is_closed = False

    def run(self, order: bytes, *, timeout: float) -> tuple[int, bytes, str]:
        content = msgspec.json.decode(order)
        self.orders.append(content)
        if self.fail:
            return 1, b"", "the engine cannot start: no room"
        config = msgspec.convert(content["config"], EngineConfig)
        row = GOOD if config.kv_backing == "vmm" else TWIN
        row = {**dict.fromkeys(MEMORY_COMPONENTS, 0), **row, "tokens": {"single": [1], "pair": [[1], [2]]}}
        return 0, json.dumps(row).encode(), ""

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> FakeProcesses:
    fake = FakeProcesses()
    monkeypatch.setattr("server.matrix.RowProcesses", lambda: fake)
    monkeypatch.setenv("GIT_COMMIT", "abc123")
    return fake


def run(output: Path, *flags: str) -> int:
    return main(["matrix", "--only", "both", "--output", str(output), *flags])


def test_each_row_is_a_process_of_its_own_with_a_baseline_before_it(processes: FakeProcesses, tmp_path: Path) -> None:
    assert run(tmp_path / "rows.json", "--requests", "7") == 0
    kinds = [(order["is_baseline"], order["config"]["kv_backing"], order["num_requests"]) for order in processes.orders]
    assert kinds == [(True, "vmm", 0), (False, "vmm", 7), (False, "torch", 7)]
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["configuration"] for row in rows][1:] == ["both", "both"]
    assert all(row["accepted"] and row["commit"] == "abc123" for row in rows)
    assert rows[1]["baseline"] == rows[0]["configuration"]
    assert rows[1]["tokens_equal"] == {"single": True, "pair": True}
    assert processes.is_closed


def test_a_model_that_is_not_there_starts_no_process(processes: FakeProcesses, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="neither a directory"):
        run(tmp_path / "rows.json", "./no-such-model")
    assert not processes.orders
    assert not (tmp_path / "rows.json").exists()


def test_resume_measures_what_is_missing_or_failed(
    processes: FakeProcesses, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "rows.json"
    assert run(output, "--backing", "vmm") == 0
    processes.fail = True
    assert run(output, "--resume") == 1
    assert "no room" in capsys.readouterr().out
    assert len(processes.orders) == 3
    processes.fail = False
    assert run(output, "--resume") == 0
    assert len(processes.orders) == 4
    assert run(output, "--resume") == 0
    assert len(processes.orders) == 4
    assert '"rows": 2, "accepted": 2' in capsys.readouterr().out.splitlines()[-1]


def test_a_row_whose_baseline_failed_says_so_and_is_measured_again_with_it(
    processes: FakeProcesses, tmp_path: Path
) -> None:
    output = tmp_path / "rows.json"
    answer = processes.run
    fails = iter([True, False])

    def first_fails(order: bytes, *, timeout: float) -> Any:
        processes.fail = next(fails, False)
        return answer(order, timeout=timeout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "run", first_fails)
        assert run(output, "--backing", "vmm") == 1
    baseline, row = json.loads(output.read_text())
    assert not baseline["accepted"]
    assert baseline["problems"] == ["exit code 1: the engine cannot start: no room"]
    assert "there is nothing to compare with" in row["problems"][0]
    assert row["tokens_equal"] == {"single": False, "pair": False}
    processes.fail = False
    assert run(output, "--backing", "vmm", "--resume") == 0
    assert [one["accepted"] for one in json.loads(output.read_text())] == [True, True]


@pytest.mark.parametrize("output", ["", "terminate called", '{"a": 1}\nterminate called', "[1]"])
def test_a_process_that_ends_without_a_row_leaves_one_that_says_so_and_the_matrix_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, output: str
) -> None:
    code = f"import sys; sys.stdin.read(); print({output!r}); print('CUDA error: an illegal access', file=sys.stderr)"
    monkeypatch.setattr("server.matrix.ROW_COMMAND", (sys.executable, "-c", code))
    assert run(tmp_path / "rows.json") == 1
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["configuration"] for row in rows[-2:]] == ["both", "both"]
    assert all(row["problems"] == ["exit code 0: CUDA error: an illegal access"] for row in rows)


def test_flags_win_over_configurations_and_wrong_ones_end_it(processes: FakeProcesses, tmp_path: Path) -> None:
    assert run(tmp_path / "rows.json", "--compile", "off", "--backing", "vmm") == 0
    assert {order["config"]["compile"] for order in processes.orders} == {"off"}
    with pytest.raises(SystemExit, match="max_num_seqs"):
        run(tmp_path / "rows.json", "--max-num-seqs", "0")


def test_serving_an_encoder_alone_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--mm-encoder-only"])
    assert "offline API" in capsys.readouterr().err


def test_a_row_that_takes_too_long_is_a_failed_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("server.matrix.ROW_COMMAND", (sys.executable, "-c", "import time; time.sleep(60)"))
    assert run(tmp_path / "rows.json", "--row-timeout", "1", "--backing", "vmm") == 1
    row = json.loads((tmp_path / "rows.json").read_text())[-1]
    assert row["problems"] == ["it took more than 1 s"]


def test_one_process_gets_each_order_and_none_is_left() -> None:
    code = "import os, sys; print(os.getpid(), sys.stdin.read())"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("server.matrix.ROW_COMMAND", (sys.executable, "-c", code))
        processes = RowProcesses()
        outputs = [processes.run(order, timeout=30)[1].split() for order in (b"one", b"two")]
        spare = processes._next
        processes.close()
    assert [output[1] for output in outputs] == [b"one", b"two"]
    assert outputs[0][0] != outputs[1][0]
    assert spare.poll() is not None


def test_a_row_that_is_interrupted_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.matrix.ROW_COMMAND", (sys.executable, "-c", "import time; time.sleep(60)"))
    processes = RowProcesses()
    measuring = processes._next
    communicate = measuring.communicate

    def interrupted(*arguments: bytes, **keywords: float) -> tuple[bytes, bytes]:
        measuring.communicate = communicate  # type: ignore[method-assign]
        raise KeyboardInterrupt

    measuring.communicate = interrupted  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt):
            processes.run(b"order", timeout=30)
        assert measuring.poll() is not None
    finally:
        processes.close()
