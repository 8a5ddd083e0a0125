"""Prompts of text and pictures, and the greedy tokens that transformers generates for them."""

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from runtime.checkpoint import ModelConfig, read_processor_config
from runtime.request import ImageInput, PlaceholderRange

NUM_TOKENS = 16
SIDE = 28


@dataclass(frozen=True, kw_only=True)
class Case:
    """A prompt: pieces of token ids, with pictures between them."""

    name: str
    pieces: tuple[list[int] | NDArray[np.uint8], ...]

    @property
    def images(self) -> list[NDArray[np.uint8]]:
        return [piece for piece in self.pieces if isinstance(piece, np.ndarray)]


def words(seed: int, count: int) -> list[int]:
    """Token ids of plain text: the vocabulary's last few are special."""
    return np.random.default_rng(seed).integers(0, 480, count).tolist()


def picture(seed: int, rows: int, columns: int) -> NDArray[np.uint8]:
    """`rows` x `columns` output tokens of smooth colour with noise; read-only, as pixels from a socket are."""
    rng = np.random.default_rng(seed)
    height, width = rows * SIDE, columns * SIDE
    ramp = np.linspace(0, 1, height)[:, None, None] * rng.uniform(0, 255, 3)
    ramp = ramp + np.linspace(0, 1, width)[None, :, None] * rng.uniform(-255, 255, 3)
    pixels = np.clip(ramp + rng.normal(0, 25, (height, width, 3)), 0, 255).astype(np.uint8)
    pixels.flags.writeable = False
    return pixels


CASES = {
    case.name: case
    for case in (
        Case(name="text", pieces=(words(19, 23),)),
        Case(name="short text", pieces=(words(11, 3),)),
        Case(name="long text", pieces=(words(5, 150),)),
        # 4 x 4 tokens is exactly one window of 112 pixels.
        Case(name="one image", pieces=(words(4, 5), picture(23, 4, 4), words(5, 9))),
        Case(name="other image", pieces=(words(4, 5), picture(4, 4, 4), words(5, 9))),
        Case(
            name="three images",
            pieces=(
                words(14, 4),
                picture(3, 3, 5),
                words(7, 2),
                picture(4, 8, 8),
                picture(5, 2, 7),
                words(8, 12),
            ),
        ),
        Case(name="partial windows", pieces=(words(16, 6), picture(6, 5, 9), words(10, 7))),
        Case(name="thin image", pieces=(words(5, 3), picture(7, 1, 13), words(12, 8))),
        Case(name="large image", pieces=(words(9, 6), picture(8, 16, 15), words(14, 6))),
        Case(name="image first", pieces=(picture(9, 6, 3), words(6, 11))),
    )
}


def prompt_of(case: Case, config: ModelConfig) -> tuple[list[int], tuple[ImageInput, ...]]:
    token_ids: list[int] = []
    images: list[ImageInput] = []
    for piece in case.pieces:
        if isinstance(piece, list):
            token_ids += piece
            continue
        height, width = piece.shape[:2]
        length = (height // SIDE) * (width // SIDE)
        token_ids.append(config.vision_start_token_id)
        images.append(
            ImageInput(
                image_hash=sha256(piece.tobytes() + bytes([height // SIDE, width // SIDE])).digest(),
                height=height,
                width=width,
                placeholder=PlaceholderRange(len(token_ids), length),
            )
        )
        token_ids += [config.image_token_id] * length
        token_ids.append(config.vision_end_token_id)
    return token_ids, tuple(images)


@dataclass(frozen=True, kw_only=True)
class Generated:
    """Greedy tokens, and by how much the likeliest logit led the next at the closest of them."""

    token_ids: list[int]
    margin: float


def generate(checkpoint: Path, config: ModelConfig) -> dict[str, Generated]:
    """What transformers generates for each case; end tokens do not stop it."""
    from transformers import Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    limits = read_processor_config(checkpoint)
    processor = Qwen2VLImageProcessorPil(min_pixels=SIDE * SIDE, max_pixels=limits.max_pixels)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    results: dict[str, Generated] = {}
    for case in CASES.values():
        token_ids, _ = prompt_of(case, config)
        ids = torch.tensor([token_ids])
        inputs = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": (ids == config.image_token_id).int(),
        }
        if case.images:
            inputs |= dict(processor([Image.fromarray(image) for image in case.images], return_tensors="pt"))
        with torch.inference_mode():
            output = model.generate(
                **inputs,
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        first, second = torch.cat(output.logits).topk(2).values.unbind(1)
        results[case.name] = Generated(
            token_ids=output.sequences[0, len(token_ids) :].tolist(), margin=float((first - second).min())
        )
    return results
