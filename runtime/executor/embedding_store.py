"""Holds the encoder's output rows on the device, by image digest, in one tensor allocated at start.

Knows tensors only: which image to keep or drop is decided by the scheduler's `EncoderCache`, which accounts for the
same rows. Rows of one image need not be neighbours, so the store never fragments.

Legend: R rows of the store, T rows of one image, D hidden width.
"""

from collections.abc import Collection

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class MissingEmbeddingError(LookupError):
    """The store holds no rows for the digest (any more): encode the image again."""


class EmbeddingStoreFullError(RuntimeError):
    """The free rows do not suffice for the image."""


class EmbeddingStore:
    """`capacity_tokens` rows of width `hidden`, lent to images and given back one row at a time."""

    def __init__(self, *, capacity_tokens: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        self._rows_RD = torch.zeros((capacity_tokens, hidden), dtype=dtype, device=device)
        # A stack: the top `_num_free` entries are free rows. The lowest rows go out first.
        self._free: NDArray[np.int64] = np.arange(capacity_tokens - 1, -1, -1, dtype=np.int64)
        self._num_free = capacity_tokens
        # The row numbers of each image: on the host to give them back, on the device to gather by.
        self._held: dict[bytes, tuple[NDArray[np.int64], Tensor]] = {}

    @property
    def capacity_tokens(self) -> int:
        return len(self._free)

    @property
    def num_free_tokens(self) -> int:
        return self._num_free

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor of rows."""
        return self._rows_RD.numel() * self._rows_RD.element_size()

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self._rows_RD.shape[1] * self._rows_RD.element_size()

    def __contains__(self, image_hash: bytes) -> bool:
        return image_hash in self._held

    def __len__(self) -> int:
        """Number of images held."""
        return len(self._held)

    def put(self, image_hash: bytes, rows_TD: Tensor) -> None:
        """Copies the image's rows in. An image that is held already stays as it is: equal digests, equal rows.

        Raises:
            EmbeddingStoreFullError: fewer than T rows are free; nothing changed.
        """
        if image_hash in self._held:
            return
        num_rows = len(rows_TD)
        if num_rows > self._num_free:
            raise EmbeddingStoreFullError(
                f"image has {num_rows} rows, but {self._num_free} of {self.capacity_tokens} are free"
            )
        taken = self._free[self._num_free - num_rows : self._num_free][::-1].copy()
        index_T = torch.from_numpy(taken).to(self._rows_RD.device, non_blocking=True)
        self._rows_RD.index_copy_(0, index_T, rows_TD.to(self._rows_RD.dtype))
        self._num_free -= num_rows
        self._held[image_hash] = (taken, index_T)

    def drop(self, image_hash: bytes) -> None:
        """Gives the image's rows back; does nothing if it is not held."""
        held = self._held.pop(image_hash, None)
        if held is None:
            return
        taken, _ = held
        self._free[self._num_free : self._num_free + len(taken)] = taken[::-1]
        self._num_free += len(taken)

    def keep_only(self, image_hashes: Collection[bytes]) -> None:
        """Drops every image but these."""
        for image_hash in [held for held in self._held if held not in image_hashes]:
            self.drop(image_hash)

    def rows(self, image_hash: bytes, start: int, end: int) -> Tensor:
        """Rows `start .. end` of the image, a copy [end - start, D].

        Raises:
            MissingEmbeddingError: the image is not held.
        """
        held = self._held.get(image_hash)
        if held is None:
            raise MissingEmbeddingError(f"no rows for image {image_hash.hex()[:16]}")
        _, index_T = held
        assert 0 <= start <= end <= len(index_T), (start, end, len(index_T))
        return self._rows_RD.index_select(0, index_T[start:end])

    def check_integrity(self) -> None:
        """Asserts that every row is free or belongs to exactly one image."""
        rows = np.concatenate([self._free[: self._num_free], *(taken for taken, _ in self._held.values())])
        assert np.array_equal(np.sort(rows), np.arange(self.capacity_tokens)), "rows leaked or lent twice"
