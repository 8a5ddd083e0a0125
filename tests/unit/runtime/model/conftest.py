"""The model under test and its golden twin: transformers' own classes on the same checkpoint, in float32."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import Qwen2_5_VLForConditionalGeneration

from runtime.checkpoint import ModelConfig, read_model_config
from runtime.model.loader import LoadedModel, load_model

CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def config(tiny_checkpoint: Path) -> ModelConfig:
    return read_model_config(tiny_checkpoint)


@pytest.fixture(scope="session")
def model(tiny_checkpoint: Path, config: ModelConfig) -> LoadedModel:
    return load_model(tiny_checkpoint, config, dtype=torch.float32, device=CPU)


@pytest.fixture(scope="session")
def golden(tiny_checkpoint: Path) -> Qwen2_5_VLForConditionalGeneration:
    return Qwen2_5_VLForConditionalGeneration.from_pretrained(tiny_checkpoint).eval()


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """No gradients, and the same random inputs in each run."""
    with torch.inference_mode(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
