"""Lays images out for the vision encoder: positions, windows, segments, padding. NumPy only: no tensors, no weights.

An image's patches come in merge blocks (the `spatial_merge_size` ** 2 patches of one output token lie together, tokens
row by row). For window attention, tokens are permuted so that each window is one run. With s tokens to a window's side:

    s      s    rest
    +------+------+---+     all whole windows first, then the right edge, the bottom edge and the corner, so that
    |  1   |  2   | 5 |     windows of one size are neighbours (SDPA takes each run in one call). Attention does not
    +------+------+---+     care for the order of windows, and the permutation is undone at the end.
    |  3   |  4   | 6 |
    +------+------+---+
    |  7   |  8   | 9 |
    +------+------+---+

With a capacity, images are followed by a tail that fills it. The tail is a real sequence (one segment of full
attention, whole windows of window attention), so that padding stays finite; unused entries at the ends are empty
segments.

Legend: T output tokens, P patches, S segments.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.checkpoint import VisionConfig


@dataclass(frozen=True, kw_only=True)
class EncoderLayout:
    """Everything data-dependent of one forward of the encoder. Rows of tokens 0 .. num_tokens are the images', in
    their order; the rest is padding. `window_index_T`: permuted row i is token `window_index_T[i]`."""

    num_tokens: int
    position_ids_P2: NDArray[np.int32]
    window_index_T: NDArray[np.int64]
    reverse_index_T: NDArray[np.int64]
    cu_seqlens: NDArray[np.int32]
    max_seqlen: int
    cu_window_seqlens: NDArray[np.int32]
    max_window_seqlen: int


@dataclass(frozen=True, kw_only=True)
class EncoderSizes:
    """Sizes of a padded layout's arrays, whatever it holds: `num_tokens` T, `num_patches` P, entries of `cu_*`."""

    num_tokens: int
    num_patches: int
    cu_seqlens: int
    cu_window_seqlens: int
    max_seqlen: int
    max_window_seqlen: int


def encoder_sizes(config: VisionConfig, *, capacity_tokens: int, max_items: int) -> EncoderSizes:
    """Static sizes of a bucket of `capacity_tokens` output tokens and at most `max_items` images."""
    block = config.spatial_merge_size**2
    side = window_side(config)
    return EncoderSizes(
        num_tokens=capacity_tokens,
        num_patches=capacity_tokens * block,
        cu_seqlens=max_items + 2,
        cu_window_seqlens=max_windows(capacity_tokens, max_items, side) + 1,
        max_seqlen=capacity_tokens * block,
        max_window_seqlen=side * side * block,
    )


def window_side(config: VisionConfig) -> int:
    """Output tokens to a window's side: 4 in the published models."""
    return config.window_size // config.patch_size // config.spatial_merge_size


def max_windows(capacity_tokens: int, max_items: int, side: int) -> int:
    """Most windows that a padded layout can need: exact, and reached.

    An image of a tokens has at most ceil(a / side) windows (a strip one token high has as many), and n strips that
    share A tokens have at most floor((A + n (side - 1)) / side). A tail of one token is one window: as good as one
    more strip; a longer tail spends side ** 2 tokens on each further window, a strip no more than side.
    """
    return min(capacity_tokens, (capacity_tokens + (max_items + 1) * (side - 1)) // side)


def encoder_layout(
    grids: Sequence[tuple[int, int]],
    config: VisionConfig,
    *,
    capacity_tokens: int | None = None,
    max_items: int | None = None,
) -> EncoderLayout:
    """The layout of images one after another.

    Args:
        grids: height and width of each image in pixels, multiples of `config.pixels_per_token_side`.
        capacity_tokens: pad to this many output tokens, and all arrays to the sizes that `encoder_sizes` gives.
        max_items: with a capacity, the most images that it is made for.
    """
    merge, side, unit = config.spatial_merge_size, window_side(config), config.pixels_per_token_side
    block = merge * merge
    positions: list[NDArray[np.int32]] = []
    indices: list[NDArray[np.int64]] = []
    lengths: list[NDArray[np.int64]] = []
    image_tokens: list[int] = []
    start = 0
    for height, width in grids:
        assert height % unit == width % unit == 0, f"image of {height} x {width} pixels, not in steps of {unit}"
        rows, columns = height // unit, width // unit
        positions.append(_patch_positions(rows, columns, merge))
        index, window_lengths = _window_order(rows, columns, side)
        indices.append(index + start)
        lengths.append(window_lengths)
        image_tokens.append(rows * columns)
        start += rows * columns
    num_tokens = start

    if capacity_tokens is not None:
        assert num_tokens <= capacity_tokens, f"{num_tokens} tokens for a capacity of {capacity_tokens}"
        tail = capacity_tokens - num_tokens
        positions.append(np.zeros((tail * block, 2), np.int32))
        indices.append(np.arange(num_tokens, capacity_tokens))
        lengths.append(_tail_windows(tail, side * side))
        image_tokens.extend([tail] if tail else [])

    window_index = np.concatenate(indices) if indices else np.zeros(0, np.int64)
    reverse_index = np.empty_like(window_index)
    reverse_index[window_index] = np.arange(len(window_index))
    full = _cumulative(np.asarray(image_tokens, np.int64) * block)
    windows = _cumulative(np.concatenate(lengths) * block if lengths else np.zeros(0, np.int64))
    max_seqlen = max(image_tokens, default=0) * block
    max_window_seqlen = int(np.diff(windows).max(initial=0))
    if capacity_tokens is not None:
        assert max_items is not None, "a capacity without max_items"
        assert len(grids) <= max_items, f"{len(grids)} images, made for {max_items}"
        sizes = encoder_sizes(config, capacity_tokens=capacity_tokens, max_items=max_items)
        full = _padded(full, sizes.cu_seqlens)
        windows = _padded(windows, sizes.cu_window_seqlens)
        max_seqlen, max_window_seqlen = sizes.max_seqlen, sizes.max_window_seqlen
    return EncoderLayout(
        num_tokens=num_tokens,
        position_ids_P2=np.concatenate(positions) if positions else np.zeros((0, 2), np.int32),
        window_index_T=window_index,
        reverse_index_T=reverse_index,
        cu_seqlens=full,
        max_seqlen=max_seqlen,
        cu_window_seqlens=windows,
        max_window_seqlen=max_window_seqlen,
    )


def _patch_positions(rows: int, columns: int, merge: int) -> NDArray[np.int32]:
    """Row and column of each patch of an image of `rows` x `columns` tokens, in merge blocks [P, 2]."""
    grid = np.indices((rows * merge, columns * merge), dtype=np.int32)
    blocks = grid.reshape(2, rows, merge, columns, merge).transpose(1, 3, 2, 4, 0)
    return np.ascontiguousarray(blocks.reshape(-1, 2))


def _window_order(rows: int, columns: int, side: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """An image's tokens window by window [T], and the tokens in each window."""
    grid = np.arange(rows * columns).reshape(rows, columns)
    whole_rows, whole_columns = rows - rows % side, columns - columns % side
    indices: list[NDArray[np.int64]] = []
    lengths: list[NDArray[np.int64]] = []
    for part, height, width in (
        (grid[:whole_rows, :whole_columns], side, side),
        (grid[:whole_rows, whole_columns:], side, columns - whole_columns),
        (grid[whole_rows:, :whole_columns], rows - whole_rows, side),
        (grid[whole_rows:, whole_columns:], rows - whole_rows, columns - whole_columns),
    ):
        if part.size:
            windows = part.reshape(part.shape[0] // height, height, part.shape[1] // width, width)
            indices.append(windows.transpose(0, 2, 1, 3).reshape(-1))
            lengths.append(np.full(part.size // (height * width), height * width, np.int64))
    return np.concatenate(indices), np.concatenate(lengths)


def _tail_windows(tail: int, window: int) -> NDArray[np.int64]:
    whole, rest = divmod(tail, window)
    return np.asarray([window] * whole + [rest] * (rest > 0), np.int64)


def _cumulative(lengths: NDArray[np.int64]) -> NDArray[np.int32]:
    sums = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=sums[1:])
    return sums


def _padded(sums: NDArray[np.int32], size: int) -> NDArray[np.int32]:
    """Empty segments at the end, up to `size` entries."""
    assert len(sums) <= size, f"{len(sums)} entries of segments, at most {size} planned"
    padded = np.full(size, sums[-1], np.int32)
    padded[: len(sums)] = sums
    return padded
