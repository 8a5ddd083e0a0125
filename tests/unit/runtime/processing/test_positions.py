"""Positions equal transformers' `get_rope_index`."""

from pathlib import Path

import numpy as np
import pytest

from runtime.processing.positions import rope_positions
from runtime.request import ImageInput, PlaceholderRange


def image(offset: int, rows: int, columns: int) -> ImageInput:
    return ImageInput(
        image_hash=b"", height=rows * 28, width=columns * 28, placeholder=PlaceholderRange(offset, rows * columns)
    )


CASES = {
    "text only": (17, []),
    "one token": (1, []),
    "one square image": (30, [image(5, 4, 4)]),
    "wide image at the end": (5 + 2 * 9, [image(5, 2, 9)]),
    "tall image at the start": (40, [image(0, 9, 2)]),
    "three images": (120, [image(3, 2, 3), image(11, 6, 1), image(40, 5, 8)]),
}


@pytest.mark.parametrize("case", CASES)
def test_positions_equal_those_of_transformers(case: str, tiny_checkpoint: Path) -> None:
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel

    num_tokens, images = CASES[case]
    with torch.device("meta"):
        model = Qwen2_5_VLModel(Qwen2_5_VLConfig.from_pretrained(tiny_checkpoint))
    types = torch.zeros(1, num_tokens, dtype=torch.int32)
    for each in images:
        types[0, each.placeholder.offset : each.placeholder.end] = 1
    grids = torch.tensor([[1, each.height // 14, each.width // 14] for each in images]) if images else None
    expected, delta = model.get_rope_index(torch.zeros(1, num_tokens, dtype=torch.int64), types, grids)

    positions, next_position = rope_positions(num_tokens, images, pixels_per_token_side=28)
    assert positions.dtype == np.int64
    np.testing.assert_array_equal(positions, expected[:, 0].numpy())
    assert next_position == num_tokens + int(delta)


def test_empty_prompt_has_no_positions() -> None:
    positions, next_position = rope_positions(0, [], pixels_per_token_side=28)
    assert positions.shape == (3, 0)
    assert next_position == 0


def test_overlapping_placeholders_are_a_mistake_of_ours() -> None:
    with pytest.raises(AssertionError, match="overlap"):
        rope_positions(20, [image(2, 2, 2), image(5, 2, 2)], pixels_per_token_side=28)


def test_placeholder_of_another_length_is_a_mistake_of_ours() -> None:
    wrong = ImageInput(image_hash=b"", height=56, width=56, placeholder=PlaceholderRange(0, 5))
    with pytest.raises(AssertionError, match="length"):
        rope_positions(20, [wrong], pixels_per_token_side=28)
