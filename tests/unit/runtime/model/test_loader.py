"""Loading: layouts of files and names that work, and errors that name what is wrong."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration

from runtime.checkpoint import CheckpointError, read_model_config
from runtime.model.layers import WeightTargets
from runtime.model.loader import LoadedModel, load_model
from runtime.model.registry import family
from tests.checkpoint_factory import build_checkpoint

CPU = torch.device("cpu")


def load(directory: Path, **kwargs: object) -> LoadedModel:
    return load_model(directory, read_model_config(directory), dtype=torch.float32, device=CPU, **kwargs)


def parameters(model: LoadedModel) -> dict[str, Tensor]:
    named = dict(model.vision.named_parameters(prefix="vision"))
    return named | (dict(model.text.named_parameters(prefix="text")) if model.text is not None else {})


def assert_same(a: LoadedModel, b: LoadedModel) -> None:
    left, right = parameters(a), parameters(b)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture
def change(tmp_path: Path) -> Callable[[Callable[[dict[str, Tensor]], None]], Path]:
    """Builds a checkpoint whose tensors went through a function."""

    def build(edit: Callable[[dict[str, Tensor]], None]) -> Path:
        directory = build_checkpoint(tmp_path / "changed")
        weights = load_file(directory / "model.safetensors")
        edit(weights)
        save_file(weights, directory / "model.safetensors")
        return directory

    return build


def test_shards_give_the_same_model(model: LoadedModel, tmp_path: Path) -> None:
    directory = build_checkpoint(tmp_path, sharded=True)

    assert len(list(directory.glob("*.safetensors"))) == 3
    assert_same(load(directory), model)


def test_names_of_transformers_5_give_the_same_model(model: LoadedModel, tmp_path: Path) -> None:
    assert_same(load(build_checkpoint(tmp_path, names="transformers")), model)


def test_what_transformers_saves_loads(
    golden: Qwen2_5_VLForConditionalGeneration, model: LoadedModel, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    golden.save_pretrained(tmp_path)
    for name in ("preprocessor_config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((tiny_checkpoint / name).read_bytes())

    assert_same(load(tmp_path), model)


def test_untied_head_has_its_own_weights(tmp_path: Path) -> None:
    directory = build_checkpoint(tmp_path, tied=False)
    text = load(directory).text

    assert text is not None
    golden = Qwen2_5_VLForConditionalGeneration.from_pretrained(directory)
    assert torch.equal(text.head_VD, golden.lm_head.weight)
    assert torch.equal(text.embedding_VD, golden.model.language_model.embed_tokens.weight)
    assert not torch.equal(text.head_VD, text.embedding_VD)


def test_tied_head_shares_the_embedding_and_counts_once(model: LoadedModel) -> None:
    assert model.text is not None
    assert model.text.head_VD is model.text.embedding_VD
    distinct = {id(tensor): tensor.nbytes for tensor in parameters(model).values()}
    assert sum(distinct.values()) <= model.weight_bytes < sum(distinct.values()) + 10_000


def test_spare_copies_of_tied_and_computed_tensors_are_ignored(change: Callable, model: LoadedModel) -> None:
    def edit(weights: dict[str, Tensor]) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        weights["model.rotary_emb.inv_freq"] = torch.ones(8)

    assert_same(load(change(edit)), model)


def test_encoder_alone_does_not_look_at_the_decoder(change: Callable, model: LoadedModel) -> None:
    def edit(weights: dict[str, Tensor]) -> None:
        del weights["model.norm.weight"]

    encoder = load(change(edit), parts="vision")

    assert encoder.text is None
    assert all(torch.equal(a, b) for a, b in zip(encoder.vision.parameters(), model.vision.parameters(), strict=True))


def test_weights_are_cast(tiny_checkpoint: Path, model: LoadedModel) -> None:
    config = read_model_config(tiny_checkpoint)
    half = load_model(tiny_checkpoint, config, dtype=torch.bfloat16, device=CPU)

    assert half.text is not None
    assert model.text is not None
    assert torch.equal(half.text.embedding_VD, model.text.embedding_VD.bfloat16())
    assert {tensor.dtype for tensor in parameters(half).values()} == {torch.bfloat16}


def test_missing_tensors_are_named_and_counted(change: Callable) -> None:
    def edit(weights: dict[str, Tensor]) -> None:
        for name in [name for name in weights if name.startswith("model.layers.2.")]:
            del weights[name]

    with pytest.raises(CheckpointError, match=r"12 missing \(model\.layers\.2\.input_layernorm\.weight, .*, \.\.\.\)"):
        load(change(edit))


def test_unexpected_tensors_are_named_by_the_names_of_the_file(change: Callable) -> None:
    def edit(weights: dict[str, Tensor]) -> None:
        weights["model.language_model.layers.9.extra"] = torch.ones(1)

    with pytest.raises(CheckpointError, match=r"0 missing, 1 unexpected \(model\.language_model\.layers\.9\.extra\)"):
        load(change(edit))


def test_wrong_shape_names_tensor_and_shapes(change: Callable) -> None:
    def edit(weights: dict[str, Tensor]) -> None:
        weights["visual.merger.mlp.2.bias"] = torch.zeros(65)

    with pytest.raises(CheckpointError, match=r"visual\.merger\.mlp\.2\.bias .* shape \[65\]; .* shape \[64\]"):
        load(change(edit))


def test_quantised_weights_are_refused(change: Callable) -> None:
    def edit(weights: dict[str, Tensor]) -> None:
        weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.int8)

    with pytest.raises(CheckpointError, match=r"model\.norm\.weight .* is torch\.int8"):
        load(change(edit))


def test_no_weights_at_all(tmp_path: Path) -> None:
    directory = build_checkpoint(tmp_path)
    (directory / "model.safetensors").rename(directory / "weights.safetensors")

    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        load(directory)


def test_absent_shard_is_named(tmp_path: Path) -> None:
    directory = build_checkpoint(tmp_path, sharded=True)
    (directory / "model-00002-of-00003.safetensors").unlink()

    with pytest.raises(CheckpointError, match=r"1 missing \(model-00002-of-00003\.safetensors\)"):
        load(directory)


def test_index_without_a_map(tmp_path: Path) -> None:
    directory = build_checkpoint(tmp_path)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))

    with pytest.raises(CheckpointError, match="has no weight_map"):
        load(directory)


@pytest.mark.parametrize("length", [0, 5, 5000])
def test_truncated_file(tmp_path: Path, length: int) -> None:
    directory = build_checkpoint(tmp_path)
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])

    with pytest.raises(CheckpointError, match="no complete safetensors file"):
        load(directory)


def test_every_part_of_every_parameter_is_loaded(tiny_checkpoint: Path, model: LoadedModel) -> None:
    """Targets cover the parameters: writing NaN through all of them leaves no other value."""
    own = load(tiny_checkpoint)
    targets: WeightTargets = own.vision.targets("visual")
    if own.text is not None:
        targets |= own.text.targets()
    for target in targets.values():
        target.write(torch.full(target.shape, float("nan")))

    assert all(tensor.isnan().all() for tensor in parameters(own).values())
    assert all(tensor.isfinite().all() for tensor in parameters(model).values())


def test_other_families_are_refused() -> None:
    with pytest.raises(CheckpointError, match="'qwen2_vl'"):
        family("qwen2_vl")
