"""The vision encoder alone: images in, embeddings out. No requests, no steps, no KV cache.

It looks like an engine to those who only want its plan and its counts; a request is refused.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.executor.embedding_store import EmbeddingStore
from runtime.executor.encoder_runner import EncoderItem, EncoderRunner
from runtime.processing.image_processor import image_hash
from runtime.request import Request, RequestOutput
from runtime.stats import EngineInfo, EngineStats

Pixels = NDArray[np.uint8]


class EncoderEngine:
    """Made by `runtime.startup.build_encoder_engine`."""

    has_work = False

    def __init__(
        self,
        encoder: EncoderRunner,
        store: EmbeddingStore,
        info: EngineInfo,
        *,
        read_unplanned_bytes: Callable[[], int],
    ) -> None:
        self.info = info
        self._encoder = encoder
        self._store = store
        self._read_unplanned_bytes = read_unplanned_bytes

    @torch.inference_mode()
    def embed(self, images: Sequence[Pixels]) -> list[Tensor]:
        """Rows [T, D] of each image, on the host in float32; T is its area in squares of a token.

        Args:
            images: uint8 [height, width, 3] after resizing, sides multiples of a token's.

        Raises:
            ValueError: an image has other sides, another type, or more tokens than the store holds.
        """
        items = [self._item(index, pixels) for index, pixels in enumerate(images)]
        sizes = [self._encoder.program.num_tokens(item.pixels) for item in items]
        rows: list[Tensor] = []
        start = 0
        while start < len(items):
            end, tokens = start, 0
            while end < len(items) and tokens + sizes[end] <= self._store.capacity_tokens:
                tokens += sizes[end]
                end += 1
            self._store.keep_only(())
            self._encoder.encode(items[start:end])
            for item, size in zip(items[start:end], sizes[start:end], strict=True):
                rows.append(self._store.rows(item.image_hash, 0, size).float().cpu())
            start = end
        return rows

    def stats(self) -> EngineStats:
        """A snapshot of everything that is counted."""
        graphs = self._encoder.graphs
        return EngineStats(
            unplanned_bytes=self._read_unplanned_bytes(),
            num_images_encoded=self._encoder.num_images,
            num_image_tokens_encoded=self._encoder.num_tokens,
            encode_batches=self._encoder.num_batches,
            encode_seconds=self._encoder.encode_seconds,
            graphs={graphs.family: graphs.counts},
        )

    def add(self, request: Request, pixels: Sequence[Pixels]) -> None:
        """Raises:
        ValueError: always; there is no decoder.
        """
        raise ValueError("mm_encoder_only is on: this engine embeds images and answers no requests")

    def abort(self, request_id: str) -> None:
        """There is no request to end."""

    def step(self) -> list[RequestOutput]:
        """There is nothing to do."""
        return []

    def _item(self, index: int, pixels: Pixels) -> EncoderItem:
        side = self._encoder.program.pixels_per_token_side
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
            raise ValueError(
                f"image {index} is {pixels.dtype} {list(pixels.shape)}; it must be uint8 [height, width, 3]"
            )
        height, width, _ = pixels.shape
        if not height or not width or height % side or width % side:
            raise ValueError(f"image {index} is {height} x {width} pixels; its sides must be multiples of {side}")
        if (tokens := self._encoder.program.num_tokens(pixels)) > self._store.capacity_tokens:
            raise ValueError(
                f"image {index} has {tokens} tokens; encoder_cache_tokens is {self._store.capacity_tokens}"
            )
        return EncoderItem(image_hash=image_hash(pixels), pixels=pixels)
