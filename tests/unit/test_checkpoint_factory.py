"""The random checkpoint must be worth testing on: varied texts that depend on the picture."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from runtime.checkpoint import read_model_config, read_processor_config
from tests.checkpoint_factory import MAX_PIXELS, MIN_PIXELS, build_checkpoint


@pytest.mark.parametrize("size", ["tiny", "bench"])
def test_greedy_texts_vary_and_depend_on_the_picture(size: str, tmp_path: Path) -> None:
    directory = build_checkpoint(tmp_path, size=size)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(directory).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    processor = Qwen2VLImageProcessorPil.from_pretrained(directory)
    conversation = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}]
    text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)

    outputs = []
    for seed in range(2):
        pixels = np.random.default_rng(seed).integers(0, 256, (56, 84, 3), dtype=np.uint8)
        image = processor(pixels, return_tensors="pt")
        num_tokens = int(image["image_grid_thw"].prod()) // 4
        prompt = tokenizer(text.replace("<|image_pad|>", "<|image_pad|>" * num_tokens), return_tensors="pt")
        is_image = (prompt["input_ids"] == model.config.image_token_id).int()
        with torch.inference_mode():
            ids = model.generate(**prompt, **image, mm_token_type_ids=is_image, max_new_tokens=24, do_sample=False)
        outputs.append(ids[0, prompt["input_ids"].shape[1] :].tolist())

    assert all(len(set(output)) >= 8 for output in outputs)
    assert outputs[0] != outputs[1]


def test_files_say_what_the_runtime_reads(tiny_checkpoint: Path) -> None:
    config = read_model_config(tiny_checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    processor = read_processor_config(tiny_checkpoint)

    assert len(tokenizer) == config.text.vocab_size
    assert config.image_token_id == tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert tokenizer.eos_token_id in config.eos_token_ids
    assert config.text.tie_word_embeddings
    assert (processor.min_pixels, processor.max_pixels) == (MIN_PIXELS, MAX_PIXELS)


def test_one_seed_gives_one_checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> None:
    same = build_checkpoint(tmp_path / "same")
    other = build_checkpoint(tmp_path / "other", seed=1)

    for name in ("model.safetensors", "tokenizer.json"):
        assert (same / name).read_bytes() == (tiny_checkpoint / name).read_bytes()
    assert (other / "model.safetensors").read_bytes() != (same / "model.safetensors").read_bytes()
