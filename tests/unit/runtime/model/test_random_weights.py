"""Made-up weights: complete, reproducible, and such that pictures and texts make a difference."""

import shutil
from pathlib import Path

import pytest
import torch

from runtime.checkpoint import CheckpointError, read_model_config
from runtime.model.loader import LoadedModel, load_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def directory(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint without its weights."""
    directory = tmp_path_factory.mktemp("config_only")
    for path in tiny_checkpoint.glob("*.json"):
        shutil.copy(path, directory)
    return directory


def random_model(directory: Path, *, seed: int = 0) -> LoadedModel:
    return load_model(
        directory, read_model_config(directory), dtype=torch.float32, device=CPU, load_format="random", seed=seed
    )


def test_directory_without_weights_is_served_with_random_ones_only(directory: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_model(directory, read_model_config(directory), dtype=torch.float32, device=CPU)
    model = random_model(directory)
    assert model.text is not None
    for tower in (model.vision, model.text):
        assert all(torch.isfinite(parameter).all() and parameter.std() > 0 for parameter in tower.parameters())


def test_same_seed_gives_the_same_weights(directory: Path) -> None:
    one, two, other = (dict(random_model(directory, seed=seed).vision.named_parameters()) for seed in (1, 1, 2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one)


def test_matrices_are_wide_and_norms_about_one(directory: Path, tiny_checkpoint: Path) -> None:
    model = random_model(directory)
    assert model.text is not None
    assert model.text.layers[0].out.weight.std() == pytest.approx(0.06, rel=0.1)
    assert model.text.embedding_VD.std() == pytest.approx(0.02, rel=0.1)
    assert model.vision.blocks[0].norm1.weight.mean() / 64**0.5 == pytest.approx(1, rel=0.1)
