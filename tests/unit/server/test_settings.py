from pathlib import Path
from typing import Any

import pytest

from runtime.config import EngineConfig
from server.flags import FlagParser, add_settings_flags, settings_from
from server.settings import Settings, SettingsError, load_settings, parse_bytes

GIB = 1 << 30


def parsed(*arguments: str) -> Settings:
    parser = FlagParser(prog="fovea serve")
    add_settings_flags(parser)
    return settings_from(parser.parse_args(list(arguments)), parser)


def load(flags: dict[str, Any] | None = None, environ: dict[str, str] | None = None, **keywords: Any) -> Settings:
    return load_settings(flags or {}, environ=environ or {}, **keywords)


def test_every_knob_of_the_engine_is_a_setting_with_the_same_default() -> None:
    knobs = set(EngineConfig.__struct_fields__) - {"max_images_per_prompt"}
    assert knobs <= set(Settings.model_fields)
    assert load().engine_config() == EngineConfig()


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "fovea.yaml"
    file.write_text("port: 1\nmax-num-seqs: 2\nseed: 3\n")
    settings = load({"port": "30"}, {"FOVEA_PORT": "20", "FOVEA_MAX_NUM_SEQS": "20"}, config=file)
    assert (settings.port, settings.max_num_seqs, settings.seed, settings.block_size) == (30, 20, 3, 16)


def test_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "fovea.yaml"
    file.write_text("limit_mm_per_prompt: {image: 3}\nencoder_graph_budgets: [64, 128]\nmemory_bytes: 2GiB\n")
    settings = load(environ={"FOVEA_CONFIG": str(file)})
    assert settings.engine_config().max_images_per_prompt == 3
    assert settings.encoder_graph_budgets == (64, 128)
    assert settings.memory_bytes == 2 * GIB


def test_operators_flags() -> None:
    settings = parsed(
        "some/model", "--max-model-len", "2048", "--max-num-seqs=2", "--max-num-batched-tokens", "1024",
        "--gpu-memory-utilization", "0.5", "--limit-mm-per-prompt", "image=4", "--min-pixels", "3136",
        "--max-pixels", "200704", "--enforce-eager", "--encoder-graph-budgets", "64,128",
        "--encoder-graph-max-items", "2", "--served-model-name", "a,b", "--no-enable-prefix-caching",
        "--memory-bytes", "4GiB", "--no-reserve-graph-memory", "--decoder-graphs", "none",
    )  # fmt: skip
    assert settings.engine_config() == EngineConfig(
        model="some/model", max_model_len=2048, max_num_seqs=2, max_num_batched_tokens=1024,
        gpu_memory_utilization=0.5, max_images_per_prompt=4, min_pixels=3136, max_pixels=200704, enforce_eager=True,
        encoder_graph_budgets=(64, 128), encoder_graph_max_items=2, enable_prefix_caching=False,
        memory_bytes=4 * GIB, reserve_graph_memory="off", decoder_graphs="none",
    )  # fmt: skip
    assert settings.model_names == ("a", "b")


@pytest.mark.parametrize(
    ("flags", "value"),
    [
        ((), "on"),
        (("--reserve-graph-memory",), "on"),
        (("--reserve-graph-memory=skip",), "skip"),
        (("--no-reserve-graph-memory",), "off"),
    ],
)
def test_reservation_flag(flags: tuple[str, ...], value: str) -> None:
    assert parsed(*flags).reserve_graph_memory == value


def test_limits_also_as_json() -> None:
    assert parsed("--limit-mm-per-prompt", '{"image": 2, "video": 0}').max_images_per_prompt == 2
    with pytest.raises(SettingsError, match="video is not supported"):
        load({"limit_mm_per_prompt": "image=1,video=1"})


@pytest.mark.parametrize(
    ("text", "value"),
    [("7", 7), ("1k", 1000), ("1KiB", 1024), ("1.5GiB", 3 * GIB // 2), (" 2 gb ", 2 * 10**9), ("64MiB", 64 << 20)],
)
def test_sizes_with_suffixes(text: str, value: int) -> None:
    assert parse_bytes(text) == value


def test_unknown_names_are_errors_that_name_the_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SettingsError, match="FOVEA_MAX_NUM_SEQ; did you mean FOVEA_MAX_NUM_SEQS"):
        load(environ={"FOVEA_MAX_NUM_SEQ": "1"})
    file = tmp_path / "fovea.yaml"
    file.write_text("max_modellen: 5\n")
    with pytest.raises(SettingsError, match=r"max_modellen.*did you mean max_model_len"):
        load(config=file)
    with pytest.raises(SystemExit) as ended:
        parsed("--max-modellen", "5")
    assert ended.value.code == 2
    assert "did you mean --max-model-len?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"max_model_len": "many"}, "max_model_len .from --max-model-len. is 'many'"),
        ({"memory_bytes": "4 apples"}, "must be a number of bytes"),
        ({"gpu_memory_utilization": "1.5"}, "gpu_memory_utilization is 1.5"),
        ({"encoder_graph_budgets": "128,64"}, "ascending"),
        ({"decoder_graphs": "some"}, "decoder_graphs"),
        ({"port": "70000"}, "port"),
        ({"limit_mm_per_prompt": "4"}, "must be as image=4"),
        ({"limit_mm_per_prompt": "image=-1"}, "max_images_per_prompt is -1"),
        ({"limit_mm_per_prompt": "{"}, "limit_mm_per_prompt"),
    ],
)
def test_bad_values_are_errors_that_say_where(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load(flags)


def test_bad_files_are_errors(tmp_path: Path) -> None:
    for content, message in (
        (b"- a\n", "mapping"),
        (b"a: [", "not YAML"),
        (b"\xad\xff\x00", "not YAML"),
        (b"port: 1\nhost: a\nport: 2\n", "not YAML: the key 'port' comes twice"),
        (b"limit_mm_per_prompt: {image: 1, image: 2}\n", "the key 'image' comes twice"),
        (b"max-model-len: 64\nmax_model_len: 128\n", "max_model_len comes twice"),
    ):
        file = tmp_path / "bad.yaml"
        file.write_bytes(content)
        with pytest.raises(SettingsError, match=message):
            load(config=file)
    with pytest.raises(SettingsError, match="No such file"):
        load(config=tmp_path / "absent.yaml")


def test_service_links_of_kubernetes_are_ignored() -> None:
    links = {
        "FOVEA_PORT": "tcp://10.0.0.1:8000", "FOVEA_SERVICE_HOST": "10.0.0.1", "FOVEA_SERVICE_PORT": "8000",
        "FOVEA_SERVICE_PORT_HTTP": "8000", "FOVEA_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "FOVEA_PORT_8000_TCP_ADDR": "10.0.0.1",
    }  # fmt: skip
    assert load(environ=links).port == 8000
    assert load(environ={"FOVEA_PORT": "9000", "PATH": "/bin"}).port == 9000


def test_model_goes_by_its_directory(tmp_path: Path) -> None:
    assert load({"model": str(tmp_path)}).model_names == (tmp_path.name,)
    assert load({"model": "owner/name"}).model_names == ("owner/name",)
    assert load().model_names == ("demo",)


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--help")
    text = capsys.readouterr().out
    for name in Settings.model_fields:
        assert name == "model" or f"--{name.replace('_', '-')}" in text
        assert Settings.model_fields[name].description
