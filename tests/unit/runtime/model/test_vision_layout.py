"""Layouts: permutations, windows, static sizes and the padded tail."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

from runtime.checkpoint import VisionConfig
from runtime.model.vision_layout import EncoderLayout, encoder_layout, encoder_sizes, max_windows, window_side

CONFIG = VisionConfig(
    depth=2,
    hidden_size=64,
    intermediate_size=100,
    num_heads=4,
    in_channels=3,
    out_hidden_size=64,
    patch_size=14,
    temporal_patch_size=2,
    spatial_merge_size=2,
    window_size=112,
    fullatt_block_indexes=(1,),
)
UNIT = 28

grids = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4)


def pixels(grid: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(rows * UNIT, columns * UNIT) for rows, columns in grid]


def windows_of(index: np.ndarray, cu_seqlens: np.ndarray) -> set[frozenset[int]]:
    bounds = itertools.pairwise((cu_seqlens // 4).tolist())
    return {frozenset(index[start:end].tolist()) for start, end in bounds if end > start}


@given(grids)
def test_windows_and_positions_are_those_of_transformers(grid: list[tuple[int, int]]) -> None:
    layout = encoder_layout(pixels(grid), CONFIG)
    grid_thw = torch.tensor([(1, rows * 2, columns * 2) for rows, columns in grid])
    index, cu_seqlens = get_vision_window_index(grid_thw, spatial_merge_size=2, window_size=112, patch_size=14)

    assert windows_of(layout.window_index_T, layout.cu_window_seqlens) == windows_of(index.numpy(), cu_seqlens.numpy())
    assert np.array_equal(layout.position_ids_P2, get_vision_position_ids(grid_thw, 2).numpy())


@given(grids, st.integers(0, 70))
def test_permutation_is_undone_and_keeps_images_apart(grid: list[tuple[int, int]], spare: int) -> None:
    tokens = [rows * columns for rows, columns in grid]
    layout = encoder_layout(pixels(grid), CONFIG, capacity_tokens=sum(tokens) + spare, max_items=4)

    assert np.array_equal(layout.window_index_T[layout.reverse_index_T], np.arange(sum(tokens) + spare))
    start = 0
    for count in tokens:
        assert set(layout.window_index_T[start : start + count].tolist()) == set(range(start, start + count))
        start += count


@given(grids, st.integers(0, 200))
def test_padded_layout_has_the_planned_sizes_and_covers_the_capacity(grid: list[tuple[int, int]], spare: int) -> None:
    capacity = sum(rows * columns for rows, columns in grid) + spare
    sizes = encoder_sizes(CONFIG, capacity_tokens=capacity, max_items=4)
    layout = encoder_layout(pixels(grid), CONFIG, capacity_tokens=capacity, max_items=4)

    assert layout.num_tokens == capacity - spare
    assert len(layout.window_index_T) == len(layout.reverse_index_T) == sizes.num_tokens
    assert len(layout.position_ids_P2) == sizes.num_patches
    assert (layout.max_seqlen, layout.max_window_seqlen) == (sizes.max_seqlen, sizes.max_window_seqlen)
    for cu_seqlens, size, longest in (
        (layout.cu_seqlens, sizes.cu_seqlens, sizes.max_seqlen),
        (layout.cu_window_seqlens, sizes.cu_window_seqlens, sizes.max_window_seqlen),
    ):
        assert len(cu_seqlens) == size
        assert cu_seqlens[0] == 0
        assert cu_seqlens[-1] == capacity * 4
        assert 0 <= np.diff(cu_seqlens).min() <= np.diff(cu_seqlens).max() <= longest
    assert (np.diff(layout.cu_seqlens) > 0).sum() == len(grid) + (spare > 0)


def count_windows(layout: EncoderLayout) -> int:
    return int((np.diff(layout.cu_window_seqlens) > 0).sum())


@pytest.mark.parametrize("window_size", [28, 56, 84, 112])
@pytest.mark.parametrize("max_items", [1, 2, 3])
@pytest.mark.parametrize("capacity", [1, 2, 3, 5, 8, 13])
def test_planned_number_of_windows_is_reached_and_never_exceeded(
    window_size: int, max_items: int, capacity: int
) -> None:
    config = replace(CONFIG, window_size=window_size)
    shapes = [(h, w) for h in range(1, capacity + 1) for w in range(1, capacity // h + 1)]
    worst = 0
    for count in range(1, max_items + 1):
        for images in itertools.combinations_with_replacement(shapes, count):
            if sum(h * w for h, w in images) <= capacity:
                layout = encoder_layout(pixels(list(images)), config, capacity_tokens=capacity, max_items=max_items)
                worst = max(worst, count_windows(layout))

    assert worst == max_windows(capacity, max_items, window_side(config))


def test_unpadded_layout_states_the_longest_segments() -> None:
    layout = encoder_layout(pixels([(1, 2), (3, 3)]), CONFIG)

    assert layout.cu_seqlens.tolist() == [0, 8, 44]
    assert (layout.max_seqlen, layout.max_window_seqlen) == (36, 36)


def test_an_image_has_at_most_four_runs_of_equal_windows() -> None:
    layout = encoder_layout(pixels([(9, 11)]), CONFIG)

    assert np.diff(layout.cu_window_seqlens).tolist() == [64] * 4 + [48] * 2 + [16] * 2 + [12]


def test_too_much_for_the_bucket_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="9 tokens for a capacity of 8"):
        encoder_layout(pixels([(3, 3)]), CONFIG, capacity_tokens=8, max_items=1)
    with pytest.raises(AssertionError, match="2 images, made for 1"):
        encoder_layout(pixels([(1, 1), (1, 1)]), CONFIG, capacity_tokens=8, max_items=1)
    with pytest.raises(AssertionError, match="steps of 28"):
        encoder_layout([(28, 30)], CONFIG)
