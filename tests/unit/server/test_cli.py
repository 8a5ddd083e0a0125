import asyncio
import io
import json
import logging
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runtime.stats import EngineInfo
from server import bench
from server.bench_flags import sizes
from server.cli import main
from server.flags import COMPUTED_DEFAULTS
from server.log import JsonFormatter, TextFormatter
from server.plan import engine_info as started_info
from server.plan import plan_json, plan_tables, table
from server.serve import serve
from server.settings import Settings
from tests import fake_engine

ROOT = Path(__file__).parents[3]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith("fovea ")


def test_module_is_the_command() -> None:
    ended = subprocess.run([sys.executable, "-m", "server", "--help"], capture_output=True, cwd=ROOT, check=True)
    for command in (b"serve", b"plan", b"download", b"bench", b"version"):
        assert command in ended.stdout


def test_unknown_commands_and_flags_are_loud(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["sreve"], ["serve", "--prot", "1"], ["bench", "serve", "--concurency", "1"], []):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
    assert "did you mean --port?" in capsys.readouterr().err


def test_help_begins_short_and_tells_computed_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--help"])
    assert ended.value.code == 0
    usage, _, rest = capsys.readouterr().out.partition("\n\n")
    assert usage == "usage: fovea serve [MODEL] [flags]"
    words = " ".join(rest.split())
    assert "[the model's, at most 32768]" in words
    assert "[a quarter of the machine's or container's, at most 4GiB]" in words


def test_computed_defaults_are_of_settings_without_one() -> None:
    assert all(Settings.model_fields[name].default is None for name in COMPUTED_DEFAULTS)


def test_wrong_settings_end_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--max-num-seqs", "0"])
    assert ended.value.code == 2
    assert "max_num_seqs is 0" in capsys.readouterr().err


def test_download_says_where_the_model_is_and_whether_it_is_whole(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["download", str(tiny_checkpoint)]) == 0
    assert capsys.readouterr().out.strip() == str(tiny_checkpoint)
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (tmp_path / "one.safetensors").touch()
    assert main(["download", str(tmp_path)]) == 1
    assert "1 missing (two.safetensors)" in capsys.readouterr().err


def test_serve_names_the_taken_port_before_an_engine_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        engine = fake_engine.FakeEngineClient(start_error="started")
        assert serve(engine, Settings(port=port)) == 1
    assert capsys.readouterr().err == (f"fovea serve: port {port} is in use on 127.0.0.1; choose another with --port\n")


def test_serve_names_the_taken_port_of_the_metrics_too(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        engine = fake_engine.FakeEngineClient(start_error="started")
        assert serve(engine, Settings(port=0, metrics_port=port)) == 1
    assert capsys.readouterr().err == (
        f"fovea serve: port {port} is in use on 127.0.0.1; choose another with --metrics-port\n"
    )


def test_plan_prints_every_row() -> None:
    info = fake_engine.engine_info()
    text = plan_tables(info)
    for name in [*info.memory.components, "requested", "unplanned", "encoder", "captured", "load_weights", "total"]:
        assert name in text
    assert msgspec.json.decode(plan_json(info), type=EngineInfo) == info


def test_plan_of_no_model_says_so_once(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "/nonexistent"]) == 1
    captured = capfd.readouterr()
    assert captured.out == ""
    starting, reason = captured.err.splitlines()
    assert starting == "starting an engine to measure /nonexistent ..."
    assert reason.startswith("fovea plan: model '/nonexistent' is neither a directory")


BROKEN_FILES: dict[str, tuple[str, dict[str, Any], str]] = {
    "patch size": ("config.json", {"vision_config": {"patch_size": 0}}, "patch_size is 0"),
    "processor's patch size": ("preprocessor_config.json", {"patch_size": 0}, "patch_size is 0"),
    "processor's merge size": ("preprocessor_config.json", {"merge_size": "2"}, "merge_size is '2'"),
    "another patch size": ("preprocessor_config.json", {"patch_size": 16}, "patch_size is 16, but the vision_config"),
    "temperature": ("generation_config.json", {"temperature": "hot"}, "temperature is 'hot'"),
    "top_p": ("generation_config.json", {"top_p": 2}, "top_p is 2"),
    "end token": ("generation_config.json", {"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
    "end tokens": ("generation_config.json", {"eos_token_id": [1, -1]}, "eos_token_id is [1, -1]"),
    "no end token": ("generation_config.json", {"eos_token_id": []}, "eos_token_id is []"),
}


@pytest.mark.parametrize("name", BROKEN_FILES)
def test_plan_names_the_file_and_field_that_are_wrong(
    tiny_checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    file, fields, message = BROKEN_FILES[name]
    directory = tmp_path / "broken"
    shutil.copytree(tiny_checkpoint, directory)
    path = directory / file
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for field, value in fields.items():
        content[field] = {**content[field], **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(content), encoding="utf-8")
    assert main(["plan", str(directory)]) == 1
    captured = capfd.readouterr()
    assert captured.out == ""
    _, reason = captured.err.splitlines()
    assert reason.startswith("fovea plan: ")
    assert file in reason
    assert message in reason


def test_plan_ends_its_engine() -> None:
    engine = fake_engine.FakeEngineClient()
    assert asyncio.run(started_info(engine)).model == "fake"
    assert engine.num_shutdowns == 1
    failing = fake_engine.FakeEngineClient(start_error="no")
    with pytest.raises(Exception, match="no"):
        asyncio.run(started_info(failing))
    assert failing.num_shutdowns == 1


def test_tables_line_up() -> None:
    assert table(("a", "bb"), [("ccc", "1")]).splitlines() == ["a    bb", "---  --", "ccc   1"]


def test_picture_sizes() -> None:
    assert sizes("224x224,448x336") == ((224, 224), (448, 336))


def test_noise_is_seeded() -> None:
    import random

    urls = [bench.noise_url(random.Random(seed), 8, 8) for seed in (1, 1, 2)]
    assert urls[0] == urls[1] != urls[2]


def record(**extra: object) -> logging.LogRecord:
    one = logging.LogRecord("server.access", logging.INFO, __file__, 1, "request %s", ("x",), None)
    one.__dict__.update(extra)
    return one


def test_log_lines_are_json_with_known_fields_only() -> None:
    line = json.loads(JsonFormatter().format(record(status=200, request_id="r", prompt="secret")))
    assert (line["message"], line["status"], line["request_id"], line["level"]) == ("request x", 200, "r", "info")
    assert "prompt" not in line
    assert "status=200" in TextFormatter().format(record(status=200))


def test_log_lines_hold_tracebacks() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.Logger("one")
    logger.addHandler(handler)
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("it failed")
    (line,) = stream.getvalue().splitlines()
    assert "ValueError: broken" in json.loads(line)["exception"]
