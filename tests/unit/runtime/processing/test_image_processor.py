"""Sizes and pixels equal those of transformers' processor, and hashes tell pictures apart."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image

from runtime.processing.image_processor import (
    SideRatioError,
    image_hash,
    pixel_budget,
    resize,
    smart_resize,
)

SIZES = [(1, 1), (1, 2), (3, 1), (500, 19), (224, 224), (225, 223), (640, 480), (41, 42), (1000, 1500), (13, 2600)]


def noise(width: int, height: int) -> Image.Image:
    generator = np.random.default_rng(width * 10_000 + height)
    return Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_pixels_equal_those_of_transformers(width: int, height: int) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    picture = noise(width, height)
    reference = Qwen2VLImageProcessorPil(min_pixels=3136, max_pixels=200704, do_rescale=False, do_normalize=False)
    expected = reference(images=[picture], return_tensors="np")
    pixels = resize(picture, factor=28, min_pixels=3136, max_pixels=200704)

    assert pixels.dtype == np.uint8
    assert expected["image_grid_thw"].tolist() == [[1, pixels.shape[0] // 14, pixels.shape[1] // 14]]
    # Flattened as there: merge blocks of 2 x 2 patches together, channels first, every patch doubled in time.
    rows, columns = pixels.shape[0] // 28, pixels.shape[1] // 28
    patches = pixels.reshape(rows, 2, 14, columns, 2, 14, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    doubled = np.repeat(patches[:, :, :, :, :, None], 2, axis=5).reshape(rows * columns * 4, -1)
    np.testing.assert_array_equal(doubled, expected["pixel_values"])


@given(
    height=st.integers(1, 6000),
    width=st.integers(1, 6000),
    max_pixels=st.sampled_from([784, 3136, 50_176, 200_704, 12_845_056]),
)
def test_size_equals_that_of_transformers_or_keeps_the_maximum(height: int, width: int, max_pixels: int) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as reference

    assume(max(height, width) <= 200 * min(height, width))
    min_pixels = min(3136, max_pixels)
    size = smart_resize(height, width, factor=28, min_pixels=min_pixels, max_pixels=max_pixels)
    expected = reference(height, width, factor=28, min_pixels=min_pixels, max_pixels=max_pixels)
    assert size[0] % 28 == size[1] % 28 == 0
    assert 784 <= size[0] * size[1] <= max_pixels
    if expected[0] * expected[1] <= max_pixels:
        assert size == expected


def test_thin_picture_keeps_within_a_small_maximum() -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as reference

    assert reference(28, 5600, factor=28, min_pixels=3136, max_pixels=50_176) == (28, 3164)
    assert smart_resize(28, 5600, factor=28, min_pixels=3136, max_pixels=50_176) == (28, 1792)
    assert smart_resize(5600, 28, factor=28, min_pixels=3136, max_pixels=50_176) == (1792, 28)


def test_small_picture_is_enlarged_to_the_minimum() -> None:
    assert smart_resize(1, 1, factor=28, min_pixels=3136, max_pixels=200704) == (56, 56)


def test_too_long_and_thin_is_an_error_that_names_the_limit() -> None:
    assert smart_resize(1, 200, factor=28, min_pixels=3136, max_pixels=200704)
    with pytest.raises(SideRatioError, match=r"201 x 1 pixels.* at most 200 times"):
        smart_resize(1, 201, factor=28, min_pixels=3136, max_pixels=200704)


@pytest.mark.parametrize("max_pixels", [200_704, 1_003_520, 12_845_056])
def test_low_detail_costs_fewer_tokens_than_high(max_pixels: int) -> None:
    def num_tokens(detail: str) -> int:
        budget = pixel_budget(detail, min_pixels=3136, max_pixels=max_pixels)  # type: ignore[arg-type]
        height, width = smart_resize(3000, 4000, factor=28, min_pixels=3136, max_pixels=budget)
        return height * width // 784

    assert num_tokens("low") < num_tokens("high") / 2
    assert num_tokens("low") * 784 <= 512 * 512
    assert num_tokens("high") == num_tokens("auto") == num_tokens("original")


def test_low_detail_respects_the_minimum() -> None:
    assert pixel_budget("low", min_pixels=3136, max_pixels=3136) == 3136


def test_hash_covers_shape_and_content() -> None:
    pixels = np.arange(28 * 56 * 3, dtype=np.int64).astype(np.uint8).reshape(28, 56, 3)
    other = pixels.copy()
    other[5, 5, 1] ^= 1
    hashes = {image_hash(pixels), image_hash(pixels.reshape(56, 28, 3)), image_hash(other)}
    assert len(hashes) == 3
    assert all(len(each) == 32 for each in hashes)
    assert image_hash(pixels[:, ::-1][:, ::-1]) == image_hash(pixels)
