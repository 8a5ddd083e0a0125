"""Builds small random checkpoints in Hugging Face layout, with transformers' own classes. Used by tests and benchmarks.

The layers' weights are scaled up, and biases and norms drawn at random: with a default initialisation a random model
repeats one token whatever it sees, and a golden test on it passes whatever is broken (docs/decisions.md).
"""

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

Size = Literal["tiny", "bench"]

MIN_PIXELS = 3136
MAX_PIXELS = 200704

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if loop.first and message.role != 'system' -%}"
    "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}"
    "{%- endif -%}"
    "{{ '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content is string -%}"
    "{{ message.content }}"
    "{%- else -%}"
    "{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif part.type == 'text' -%}"
    "{{ part.text }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- endif -%}"
    "{{ '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)

# The family's splitting of text into words, single digits, punctuation and line breaks.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

TEXT_SHAPES: dict[Size, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
    "bench": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 4096,
    },
}
VISION_SHAPES: dict[Size, dict[str, Any]] = {
    # The MLP's width is no multiple of 8, as in the published models.
    "tiny": {
        "depth": 4,
        "hidden_size": 64,
        "intermediate_size": 100,
        "num_heads": 4,
        "fullatt_block_indexes": [1, 3],
    },
    "bench": {
        "depth": 6,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_heads": 4,
        "fullatt_block_indexes": [2, 5],
    },
}
MROPE_SECTIONS: dict[Size, list[int]] = {"tiny": [2, 3, 3], "bench": [8, 12, 12]}
# Scales of the layers' weights over transformers' initialisation; the narrow model needs more to tell pictures apart.
TEXT_SCALES: dict[Size, float] = {"tiny": 8.0, "bench": 3.0}
VISION_SCALES: dict[Size, float] = {"tiny": 4.0, "bench": 2.0}


def build_checkpoint(
    directory: Path,
    *,
    size: Size = "tiny",
    seed: int = 0,
    tied: bool = True,
    sharded: bool = False,
    names: Literal["published", "transformers"] = "published",
) -> Path:
    """Writes a random float32 Qwen2.5-VL checkpoint and returns its directory.

    Args:
        size: `tiny` for tests (0.45 M parameters), `bench` for benchmarks (9.5 M parameters).
        tied: the head shares the embedding's weights, and the file has no `lm_head.weight`.
        sharded: three files and an index instead of one file.
        names: of the weights: as in the published checkpoints, or as transformers 5 calls its modules.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _train_tokenizer(TEXT_SHAPES[size]["vocab_size"])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = _model_config(size, tokenizer, tied=tied)
    config.save_pretrained(directory)
    _save_weights(directory, _random_weights(config, size, seed, tied=tied), sharded=sharded, names=names)

    eos_token_ids = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    _write_json(
        directory / "generation_config.json",
        {"do_sample": False, "eos_token_id": eos_token_ids, "pad_token_id": eos_token_ids[1]},
    )
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "added_tokens_decoder": {
                str(tokenizer.token_to_id(token)): {
                    "content": token,
                    "lstrip": False,
                    "normalized": False,
                    "rstrip": False,
                    "single_word": False,
                    "special": True,
                }
                for token in SPECIAL_TOKENS
            },
            "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
            "add_prefix_space": False,
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": None,
            "errors": "replace",
            "clean_up_tokenization_spaces": False,
            "split_special_tokens": False,
            "model_max_length": 4096,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    _write_json(
        directory / "preprocessor_config.json",
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2_5_VLProcessor",
            "min_pixels": MIN_PIXELS,
            "max_pixels": MAX_PIXELS,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
        },
    )
    # As published: transformers' processor reads the template from its own file, not from the tokenizer's.
    _write_json(directory / "chat_template.json", {"chat_template": CHAT_TEMPLATE})
    return directory


def _model_config(size: Size, tokenizer: Tokenizer, *, tied: bool) -> Qwen2_5_VLConfig:
    token_id = tokenizer.token_to_id
    config = Qwen2_5_VLConfig(
        text_config={
            **TEXT_SHAPES[size],
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "use_sliding_window": False,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1_000_000.0,
                "mrope_section": MROPE_SECTIONS[size],
            },
            "bos_token_id": token_id("<|endoftext|>"),
            "eos_token_id": token_id("<|im_end|>"),
            "pad_token_id": token_id("<|endoftext|>"),
            "tie_word_embeddings": tied,
        },
        vision_config={
            **VISION_SHAPES[size],
            "out_hidden_size": TEXT_SHAPES[size]["hidden_size"],
            "in_channels": 3,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
        },
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"),
        vision_end_token_id=token_id("<|vision_end|>"),
        tie_word_embeddings=tied,
    )
    config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    config.dtype = "float32"
    return config


def _random_weights(config: Qwen2_5_VLConfig, size: Size, seed: int, *, tied: bool) -> dict[str, Tensor]:
    """Weights by transformers' names; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(config)
        weights = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
        for name, weight in weights.items():
            if name.endswith(".bias"):
                weight.normal_(std=0.1)
            elif weight.ndim == 1:
                weight.normal_(mean=1.0, std=0.1)
            elif ".layers." in name:
                weight.mul_(TEXT_SCALES[size])
            elif ".visual." in name:
                weight.mul_(VISION_SCALES[size])
    if tied:
        del weights["lm_head.weight"]
    return weights


def _save_weights(
    directory: Path, weights: dict[str, Tensor], *, sharded: bool, names: Literal["published", "transformers"]
) -> None:
    if names == "published":
        weights = {_published_name(name): weight for name, weight in weights.items()}
    if not sharded:
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        return
    num_shards = 3
    weight_map = {
        name: f"model-{index * num_shards // len(weights) + 1:05d}-of-{num_shards:05d}.safetensors"
        for index, name in enumerate(weights)
    }
    for file_name in sorted(set(weight_map.values())):
        shard = {name: weight for name, weight in weights.items() if weight_map[name] == file_name}
        save_file(shard, directory / file_name, metadata={"format": "pt"})
    total_size = sum(weight.nbytes for weight in weights.values())
    _write_json(
        directory / "model.safetensors.index.json", {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    )


def _published_name(name: str) -> str:
    return name.replace("model.language_model.", "model.", 1).replace("model.visual.", "visual.", 1)


def _train_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level BPE of exactly `vocab_size` tokens with the family's special tokens at the end."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    assert tokenizer.get_vocab_size() == vocab_size, f"{tokenizer.get_vocab_size()} tokens, wanted {vocab_size}"
    return tokenizer


def _corpus() -> list[str]:
    """English that the tests use, then words of all pairs and triples of syllables, so that any size can be trained."""
    sentences = ["You are a helpful assistant.", "What is in the picture? Describe the image.", "system user assistant"]
    heads = ("ba", "co", "di", "fu", "ga", "he", "ki", "lo", "mu", "na", "pe", "ri", "so", "tu", "ve", "zi")
    tails = ("n", "r", "st", "ll", "ck", "ng", "sh", "tion")
    words = [head + tail for head in heads for tail in tails]
    return sentences * 8 + [f"{a} {a}{b} {b}{a}" for a in words for b in words[::4]]


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
