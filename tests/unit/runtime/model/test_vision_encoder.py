"""The vision encoder against transformers' processor and tower, packed against one by one, padded against not."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from runtime.checkpoint import ModelConfig
from runtime.model.loader import LoadedModel, load_model
from runtime.model.qwen2_5_vl_vision import encoder_inputs, patchify
from runtime.model.sdpa import SdpaEncoderAttention
from runtime.model.vision_layout import encoder_layout

CPU = torch.device("cpu")
# Whole windows, partial windows at each edge and at both, one token, wide and tall.
SIZES = [(224, 224), (140, 196), (252, 112), (112, 252), (28, 28), (56, 336), (84, 28)]


def picture(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def encode(
    model: LoadedModel,
    pictures: Sequence[NDArray[np.uint8]],
    *,
    capacity_tokens: int | None = None,
    max_items: int | None = None,
    padding: int = 0,
) -> Tensor:
    sizes = [(p.shape[0], p.shape[1]) for p in pictures]
    layout = encoder_layout(sizes, model.vision.config, capacity_tokens=capacity_tokens, max_items=max_items)
    patches = torch.cat([patchify(torch.from_numpy(p), 14, 2) for p in pictures])
    tail = len(layout.position_ids_P2) - len(patches)
    patches = torch.cat([patches, torch.full((tail, patches.shape[1]), padding, dtype=torch.uint8)])
    rows = model.vision(encoder_inputs(patches, layout, device=CPU))
    assert rows.isfinite().all()
    return rows[: layout.num_tokens]


def golden_rows(golden: Qwen2_5_VLForConditionalGeneration, pictures: Sequence[NDArray[np.uint8]]) -> Tensor:
    processor = Qwen2VLImageProcessorPil()
    inputs = processor(list(pictures), do_resize=False, return_tensors="pt")
    return golden.model.visual(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output


def test_patches_are_those_of_transformers_before_normalisation() -> None:
    pixels = picture(84, 140)
    processor = Qwen2VLImageProcessorPil()
    expected = processor(pixels, do_resize=False, do_rescale=False, do_normalize=False, return_tensors="pt")

    patches = patchify(torch.from_numpy(pixels), 14, 2)

    frames = expected["pixel_values"].view(-1, 3, 2, 14 * 14)
    assert patches.dtype == torch.uint8
    for frame in (0, 1):
        assert torch.equal(patches.float(), frames[:, :, frame].flatten(1))


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_rows_equal_transformers(
    model: LoadedModel, golden: Qwen2_5_VLForConditionalGeneration, height: int, width: int
) -> None:
    pixels = picture(height, width)

    torch.testing.assert_close(encode(model, [pixels]), golden_rows(golden, [pixels]), rtol=1e-5, atol=1e-5)


def test_packed_images_equal_transformers_and_one_by_one(
    model: LoadedModel, golden: Qwen2_5_VLForConditionalGeneration
) -> None:
    pictures = [picture(*size, seed=seed) for seed, size in enumerate(SIZES)]

    packed = encode(model, pictures)

    torch.testing.assert_close(packed, golden_rows(golden, pictures), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(packed, torch.cat([encode(model, [p]) for p in pictures]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spare", [0, 1, 17, 100])
@pytest.mark.parametrize("padding", [0, 255])
def test_padding_changes_no_row_whatever_it_holds(model: LoadedModel, spare: int, padding: int) -> None:
    pictures = [picture(140, 196), picture(56, 84, seed=1)]
    capacity = 5 * 7 + 2 * 3 + spare

    padded = encode(model, pictures, capacity_tokens=capacity, max_items=4, padding=padding)

    torch.testing.assert_close(padded, encode(model, pictures), rtol=1e-5, atol=1e-5)


def test_another_picture_gives_other_rows(model: LoadedModel) -> None:
    assert not torch.allclose(encode(model, [picture(56, 56)]), encode(model, [picture(56, 56, seed=1)]), atol=0.1)


def test_wider_mlp_changes_no_row(tiny_checkpoint: Path, config: ModelConfig, model: LoadedModel) -> None:
    from runtime.model import loader

    pixels = picture(140, 196)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "mlp_multiple", lambda device: 128)
        wide = load_model(tiny_checkpoint, config, dtype=torch.float32, device=CPU, parts="vision")

    assert wide.vision.blocks[0].mlp.padded_size == 128
    torch.testing.assert_close(encode(wide, [pixels]), encode(model, [pixels]), rtol=1e-5, atol=1e-5)


def test_bfloat16_stays_near_float32(tiny_checkpoint: Path, config: ModelConfig, model: LoadedModel) -> None:
    half = load_model(tiny_checkpoint, config, dtype=torch.bfloat16, device=CPU, parts="vision")
    pixels = picture(140, 196)

    rows = encode(half, [pixels])

    assert rows.dtype == torch.bfloat16
    expected = encode(model, [pixels])
    assert (rows.float() - expected).norm() < 0.05 * expected.norm()


def test_equal_neighbours_are_attended_in_one_call(model: LoadedModel) -> None:
    layout = encoder_layout([(224, 224), (112, 112), (140, 112)], model.vision.config)
    inputs = encoder_inputs(torch.zeros(len(layout.position_ids_P2), 588, dtype=torch.uint8), layout, device=CPU)

    runs = SdpaEncoderAttention().prepare(inputs.windows)

    assert [(run.start, run.count, run.length) for run in runs] == [(0, 6, 64), (384, 1, 16)]
