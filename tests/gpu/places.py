"""What GPU tests share: a small model of the published head widths, with random weights, and a cache for it."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from runtime.checkpoint import ModelConfig, read_model_config
from runtime.executor.kv_cache import KVCache, KVLayout, TensorBacking, kv_layout
from runtime.model.loader import LoadedModel, load_model

CUDA = torch.device("cuda", 0)
BFLOAT16 = torch.bfloat16

# The published 3B model's head widths (128 and 80), and everything else small.
TEXT = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
VISION = {
    "hidden_size": 320,
    "intermediate_size": 684,
    "num_heads": 4,
    "depth": 4,
    "out_hidden_size": 512,
    "fullatt_block_indexes": [1, 3],
}
MROPE_SECTION = [16, 24, 24]


def write_small_model(tiny_checkpoint: Path, directory: Path) -> Path:
    """A configuration without weights, for `load_format` `random`; tokenizer and the rest are the tiny checkpoint's."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in tiny_checkpoint.glob("*.json"):
        shutil.copy(path, directory)
    config = json.loads((directory / "config.json").read_text())
    text: dict[str, Any] = config.get("text_config", config)
    text.update(TEXT)
    for name in ("rope_parameters", "rope_scaling"):
        if text.get(name):
            text[name]["mrope_section"] = MROPE_SECTION
        if config.get(name):
            config[name]["mrope_section"] = MROPE_SECTION
    config["vision_config"].update(VISION)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@dataclass(frozen=True, kw_only=True)
class SmallModel:
    """The model on the GPU."""

    directory: Path
    config: ModelConfig
    model: LoadedModel

    def layout(self, block_size: int = 16) -> KVLayout:
        return kv_layout(self.config.text, BFLOAT16, block_size)

    def kv(self, num_blocks: int = 64, block_size: int = 16) -> KVCache:
        """A cache full of garbage that a kernel must not read: large, but finite."""
        layout = self.layout(block_size)
        backing = TensorBacking(num_blocks * layout.block_bytes, CUDA)
        backing.tensor().view(BFLOAT16).normal_(0, 100)
        return KVCache(layout, num_blocks, backing)


def load_small_model(directory: Path, **arguments: Any) -> SmallModel:
    config = read_model_config(directory)
    model = load_model(directory, config, dtype=BFLOAT16, device=CUDA, load_format="random", **arguments)
    return SmallModel(directory=directory, config=config, model=model)


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest difference over the reference's largest value."""
    return float((value.float() - reference.float()).abs().max() / reference.float().abs().max())
