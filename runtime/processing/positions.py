"""Positions of a prompt's tokens for multimodal rotary embedding: one temporal, one of rows, one of columns."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.request import ImageInput


def rope_positions(
    num_tokens: int, images: Sequence[ImageInput], *, pixels_per_token_side: int
) -> tuple[NDArray[np.int64], int]:
    """Positions of a prompt of `num_tokens` tokens, and the position of the token after it.

    A text token takes the next position in all three rows. An image that starts at position p and is h x w tokens has
    p in the temporal row, p + its row, p + its column, and the text after it goes on at p + max(h, w):

        token        text text | image 2 x 3 ............ | text
        temporal     0    1    | 2   2   2   2   2   2    | 5
        row          0    1    | 2   2   2   3   3   3    | 5
        column       0    1    | 2   3   4   2   3   4    | 5

    Equal to `get_rope_index` of transformers' Qwen2_5_VLModel. Positions of output tokens go on in steps of one: that
    of the token at index i >= `num_tokens` is `next_position + i - num_tokens` in all three rows.

    Args:
        images: in the order of their placeholders, whose lengths are h * w.
        pixels_per_token_side: side in pixels of the square that becomes one token.

    Returns:
        int64 [3, num_tokens], and the next position.
    """
    positions = np.empty((3, num_tokens), dtype=np.int64)
    token = 0
    position = 0
    for image in images:
        start, end = image.placeholder.offset, image.placeholder.end
        rows, columns = image.height // pixels_per_token_side, image.width // pixels_per_token_side
        assert token <= start <= end <= num_tokens, "placeholders overlap or lie outside of the prompt"
        assert rows * columns == image.placeholder.length, "the placeholder's length is not the image's"
        positions[:, token:start] = np.arange(position, position + start - token)
        position += start - token
        grid = positions[:, start:end].reshape(3, rows, columns)
        grid[0] = position
        grid[1] = position + np.arange(rows)[:, None]
        grid[2] = position + np.arange(columns)[None, :]
        positions[:, start:end] = grid.reshape(3, -1)
        position += max(rows, columns)
        token = end
    positions[:, token:] = np.arange(position, position + num_tokens - token)
    return positions, position + num_tokens - token
