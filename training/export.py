"""Writes the trained network as a Hugging Face folder: weights, configuration, processor, chat template,
model card.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from training.chat import CHAT_TEMPLATE, token_id
from training.network import FRAMES, IMAGE_MEAN, IMAGE_STD, MERGE, PATCH, Network, NetworkConfig
from training.tokenizer import SPECIAL_TOKENS
from training.train import TOKENIZER, read_average

MIN_PIXELS, MAX_PIXELS = 112 * 112, 448 * 448
CONTEXT = 4096
CARD = Path(__file__).parent / "model_card.md"


def export(network: Network, tokenizer_path: Path, out: Path) -> None:
    """Writes every file of the model's folder; the tied head is not stored, and weights are bfloat16."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    weights = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in network.state_dict().items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    if tokenizer_path.resolve() != (out / "tokenizer.json").resolve():
        shutil.copyfile(tokenizer_path, out / "tokenizer.json")
    end, text_end = token_id(tokenizer, "<|im_end|>"), token_id(tokenizer, "<|endoftext|>")
    _write(out / "config.json", model_config(network.config, tokenizer))
    _write(
        out / "generation_config.json",
        {
            "do_sample": False,
            "eos_token_id": [end, text_end],
            "pad_token_id": text_end,
            "max_new_tokens": 64,
        },
    )
    _write(
        out / "preprocessor_config.json",
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2_5_VLProcessor",
            "min_pixels": MIN_PIXELS,
            "max_pixels": MAX_PIXELS,
            "patch_size": PATCH,
            "temporal_patch_size": FRAMES,
            "merge_size": MERGE,
            "image_mean": list(IMAGE_MEAN),
            "image_std": list(IMAGE_STD),
            "do_convert_rgb": True,
            "do_normalize": True,
            "do_rescale": True,
            "do_resize": True,
            "resample": 3,
            "rescale_factor": 1 / 255,
        },
    )
    _write(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "processor_class": "Qwen2_5_VLProcessor",
            "add_bos_token": False,
            "add_prefix_space": False,
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": None,
            "additional_special_tokens": [
                token for token in SPECIAL_TOKENS if token not in ("<|endoftext|>", "<|im_end|>")
            ],
            "clean_up_tokenization_spaces": False,
            "errors": "replace",
            "model_max_length": CONTEXT,
            "split_special_tokens": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    shutil.copyfile(CARD, out / "README.md")


def model_config(config: NetworkConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """`config.json`, laid out as the published Qwen2.5-VL checkpoints have it."""
    end, text_end = token_id(tokenizer, "<|im_end|>"), token_id(tokenizer, "<|endoftext|>")
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "torch_dtype": "bfloat16",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "rope_theta": config.rope_theta,
        "rope_scaling": {"type": "mrope", "mrope_section": list(config.mrope_section)},
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "attention_dropout": 0.0,
        "bos_token_id": text_end,
        "eos_token_id": end,
        "pad_token_id": text_end,
        "vision_start_token_id": token_id(tokenizer, "<|vision_start|>"),
        "vision_end_token_id": token_id(tokenizer, "<|vision_end|>"),
        "vision_token_id": token_id(tokenizer, "<|vision_pad|>"),
        "image_token_id": token_id(tokenizer, "<|image_pad|>"),
        "video_token_id": token_id(tokenizer, "<|video_pad|>"),
        "use_cache": True,
        "vision_config": {
            "model_type": "qwen2_5_vl",
            "depth": config.vision_depth,
            "hidden_size": config.vision_hidden_size,
            "hidden_act": "silu",
            "intermediate_size": config.vision_intermediate_size,
            "num_heads": config.vision_num_heads,
            "in_channels": 3,
            "in_chans": 3,
            "out_hidden_size": config.hidden_size,
            "patch_size": PATCH,
            "spatial_patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": FRAMES,
            "tokens_per_second": 2,
            "window_size": config.window_size,
            "fullatt_block_indexes": list(config.fullatt_block_indexes),
        },
    }


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("state", type=Path, help="folder that `training.train` wrote")
    parser.add_argument("--out", type=Path, default=TOKENIZER.parent)
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER)
    arguments = parser.parse_args()
    if not any(arguments.state.glob("average.*")):
        parser.error(f"{arguments.state} holds no state: name the folder that `training.train --out` wrote")
    tokenizer = Tokenizer.from_file(str(arguments.tokenizer))
    network = Network(NetworkConfig(vocab_size=tokenizer.get_vocab_size()))
    with torch.no_grad():
        torch._foreach_copy_(list(network.parameters()), read_average(arguments.state))
    export(network, arguments.tokenizer, arguments.out)


if __name__ == "__main__":
    main()
