"""Finding and reading checkpoints: both layouts of config.json, and what is wrong with the others."""

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.checkpoint import (
    CheckpointError,
    locate_model,
    read_json,
    read_model_config,
    read_processor_config,
)

TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
}
VISION: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "fullatt_block_indexes": [1, 3],
}
IDS = {"image_token_id": 10, "vision_start_token_id": 11, "vision_end_token_id": 12}
FLAT = {
    "model_type": "qwen2_5_vl",
    **TEXT,
    **IDS,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 3,
    "vision_config": {**VISION, "in_chans": 3},
}
NESTED = {
    "model_type": "qwen2_5_vl",
    **IDS,
    "dtype": "bfloat16",
    "tie_word_embeddings": True,
    "text_config": {
        **TEXT,
        "eos_token_id": 3,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
    },
    "vision_config": {**VISION, "in_channels": 3},
}


def write(directory: Path, name: str, value: object) -> Path:
    (directory / name).write_text(json.dumps(value))
    return directory


def without(config: dict[str, Any], *path: str) -> dict[str, Any]:
    copy = json.loads(json.dumps(config))
    at = copy
    for key in path[:-1]:
        at = at[key]
    del at[path[-1]]
    return copy  # type: ignore[no-any-return]


def test_flat_and_nested_layouts_mean_the_same(tmp_path: Path) -> None:
    flat = read_model_config(write(tmp_path, "config.json", FLAT))
    assert flat == read_model_config(write(tmp_path, "config.json", NESTED))
    assert flat.text.head_dim == 16
    assert flat.text.mrope_section == (2, 3, 3)
    assert flat.text.rope_theta == 10000.0
    assert flat.text.tie_word_embeddings
    assert flat.vision.pixels_per_token_side == 28
    assert flat.vision.fullatt_block_indexes == (1, 3)
    assert flat.eos_token_ids == (3,)
    assert flat.dtype == "bfloat16"


def test_untied_head_is_read_from_wherever_it_stands(tmp_path: Path) -> None:
    assert not read_model_config(
        write(tmp_path, "config.json", FLAT | {"tie_word_embeddings": False})
    ).text.tie_word_embeddings
    inner = without(NESTED, "tie_word_embeddings")
    inner["text_config"]["tie_word_embeddings"] = True
    assert read_model_config(write(tmp_path, "config.json", inner)).text.tie_word_embeddings


def test_end_tokens_of_the_generation_config_come_first(tmp_path: Path) -> None:
    write(tmp_path, "config.json", FLAT)
    assert read_model_config(write(tmp_path, "generation_config.json", {"eos_token_id": [7, 8]})).eos_token_ids == (
        7,
        8,
    )
    assert read_model_config(write(tmp_path, "generation_config.json", {"eos_token_id": 7})).eos_token_ids == (7,)
    assert read_model_config(write(tmp_path, "generation_config.json", {})).eos_token_ids == (3,)


def test_null_is_as_good_as_absent(tmp_path: Path) -> None:
    config = FLAT | {"rope_parameters": None, "head_dim": None, "dtype": None}
    assert read_model_config(write(tmp_path, "config.json", config)).text.head_dim == 16


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (FLAT | {"model_type": "llama"}, "model_type is 'llama'; this runtime serves 'qwen2_5_vl'"),
        (without(FLAT, "hidden_size"), "lacks the field 'hidden_size'"),
        (without(FLAT, "vision_config"), "lacks the field 'vision_config'"),
        (without(NESTED, "vision_config", "depth"), "lacks the field 'depth'"),
        (without(FLAT, "eos_token_id"), "names an eos_token_id"),
        (without(FLAT, "rope_scaling"), r"mrope_section \[\] must have three parts"),
        (FLAT | {"rope_scaling": {"mrope_section": [2, 3, 4]}}, r"mrope_section \[2, 3, 4\].*head_dim / 2 = 8"),
        (FLAT | {"torch_dtype": "int8"}, "dtype 'int8' is none of"),
        (FLAT | {"hidden_size": "wide"}, r"config\.json.*hidden_size.*'wide'"),
        (FLAT | {"num_attention_heads": 0}, r"num_attention_heads is 0"),
        (FLAT | {"num_key_value_heads": 3}, r"num_attention_heads \(4\).*num_key_value_heads \(3\)"),
        (FLAT | {"vision_config": 5}, r"vision_config.*5"),
    ],
)
def test_what_is_wrong_with_a_config_is_named(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_model_config(write(tmp_path, "config.json", config))


def test_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing from"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        read_json(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="holds no JSON object"):
        read_json(tmp_path / "config.json")
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(CheckpointError, match="is not JSON"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize(
    "raw", [{"min_pixels": 3136, "max_pixels": 200704}, {"size": {"shortest_edge": 3136, "longest_edge": 200704}}]
)
def test_pixel_limits_have_two_spellings(tmp_path: Path, raw: dict[str, Any]) -> None:
    config = read_processor_config(write(tmp_path, "preprocessor_config.json", raw))
    assert (config.min_pixels, config.max_pixels) == (3136, 200704)
    assert config.image_mean == (0.48145466, 0.4578275, 0.40821073)


def test_the_processor_file_of_transformers_5_is_read(tmp_path: Path) -> None:
    write(
        tmp_path, "processor_config.json", {"image_processor": {"size": {"shortest_edge": 3136, "longest_edge": 6272}}}
    )
    assert read_processor_config(tmp_path).max_pixels == 6272
    write(tmp_path, "preprocessor_config.json", {"max_pixels": 9408})
    assert read_processor_config(tmp_path).max_pixels == 9408


def test_a_missing_processor_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json is missing"):
        read_processor_config(tmp_path)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"min_pixels": 5000, "max_pixels": 4000}, "min_pixels 5000, max_pixels 4000"),
        ({"min_pixels": -1}, "min_pixels -1"),
        ({"image_mean": [0.1, float("nan"), 0.1]}, "not finite"),
        ({"image_mean": [0.1, 0.2]}, r"image_mean.*\[0\.1, 0\.2\]"),
        ({"image_std": [0.1, 0.0, 0.1]}, r"image_std.*0\.0"),
        ({"image_std": "dark"}, "image_std.*'dark'"),
    ],
)
def test_processor_limits_that_are_none_are_refused(tmp_path: Path, raw: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_processor_config(write(tmp_path, "preprocessor_config.json", raw))


def test_models_are_found_by_directory_and_demo(tmp_path: Path) -> None:
    assert locate_model(str(tmp_path)) == tmp_path
    assert locate_model("demo").parts[-2:] == ("runtime", "demo")


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere", "justaname", "a/b/c"])
def test_a_name_that_is_nothing_is_refused_without_asking_the_hub(name: str) -> None:
    with pytest.raises(CheckpointError, match="neither a directory, nor a hub name"):
        locate_model(name)


def test_a_hub_name_that_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match=r"could not be had from the hub: .*HF_HUB_OFFLINE"):
        locate_model("no-such-owner/no-such-model")


def test_a_pinned_revision_is_found_offline_and_others_are_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    commit = "a" * 40
    snapshot = tmp_path / "models--owner--model" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}", encoding="utf-8")
    assert locate_model("owner/model", commit) == snapshot
    with pytest.raises(CheckpointError, match=r"at revision 'bbb.*could not be had"):
        locate_model("owner/model", "b" * 40)
