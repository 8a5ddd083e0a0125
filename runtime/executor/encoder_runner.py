"""Encodes images: packs them into buckets, replays a graph or runs eager with a counted reason, stores the rows.

Knows no requests and no scheduling: it is told which images to encode, and their rows go to the embedding store under
their digests.

Legend: P patches, T output (post-merge) tokens, C values of a patch, D hidden width of the decoder.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.checkpoint import VisionConfig
from runtime.executor.arena import retry_on_empty_cache
from runtime.executor.embedding_store import EmbeddingStore
from runtime.executor.graphs import Bucket, GraphSet, SelfTestFill
from runtime.executor.packing import Pack, pack_eager, pack_images
from runtime.model.qwen2_5_vl_vision import EncoderInputs, VisionEncoder, encoder_inputs, patch_grid
from runtime.model.vision_layout import EncoderLayout, encoder_layout
from runtime.staging import PinnedArena

_NOISE_SEED = 20

# Of the pinned memory beside pixels and indices: cumulative sums, and what alignment leaves between arrays.
_ARENA_SLACK_BYTES = 1 << 16


Pixels = NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class EncoderItem:
    """One image to encode: pixels uint8 [height, width, 3] after resizing, sides multiples of a token's."""

    image_hash: bytes
    pixels: Pixels


@dataclass(frozen=True, kw_only=True)
class StaticEncoderInputs:
    """A bucket's buffers. Everything that depends on the images' sizes is in them; nothing of it is baked."""

    inputs: EncoderInputs

    def tensors(self) -> Sequence[Tensor]:
        inputs = self.inputs
        return (
            inputs.patches_PC,
            inputs.position_ids_P2,
            inputs.window_index_T,
            inputs.reverse_index_T,
            inputs.full.cu_seqlens_S,
            inputs.windows.cu_seqlens_S,
        )


class EncoderProgram:
    """What the encoder's graph set captures."""

    def __init__(self, encoder: VisionEncoder, config: VisionConfig, device: torch.device) -> None:
        self._encoder = encoder
        self._config = config
        self._device = device
        self._arena = PinnedArena(0, device)

    def allocate(self, bucket: Bucket) -> StaticEncoderInputs:
        """Buffers of a bucket that holds one smallest image and padding."""
        num_patches, num_values = self._patch_shape(bucket.tokens)
        # Pixels and positions of the patches, two permutations and at most as many windows as tokens.
        self._arena.grow(num_patches * (num_values + 8) + bucket.tokens * 20 + _ARENA_SLACK_BYTES)
        layout = self._layout([self._smallest], bucket)
        patches_PC = torch.zeros(self._patch_shape(bucket.tokens), dtype=torch.uint8, device=self._device)
        return StaticEncoderInputs(inputs=encoder_inputs(patches_PC, layout, device=self._device))

    def forward(self, bucket: Bucket, inputs: StaticEncoderInputs) -> Tensor:
        """Rows [bucket.tokens, D], of which those past the images' tokens mean nothing, but are finite."""
        return self._encoder.forward(inputs.inputs)

    def fill_for_self_test(self, bucket: Bucket, inputs: StaticEncoderInputs, fill: SelfTestFill) -> None:
        """Noise: one image of one token, or as many images as the bucket holds, its tokens shared among them."""
        sizes = [1]
        if fill == "large":
            share, rest = divmod(bucket.tokens, bucket.max_items)
            sizes = [share + (i < rest) for i in range(bucket.max_items)]
        self.fill(bucket, inputs, [self.noise(size) for size in sizes])

    def noise(self, tokens: int) -> Pixels:
        """A reproducible picture of noise with that many output tokens, as square as their number allows."""
        side = self._config.pixels_per_token_side
        rows = next(rows for rows in range(math.isqrt(tokens), 0, -1) if tokens % rows == 0)
        generator = np.random.default_rng(_NOISE_SEED)
        return generator.integers(0, 256, (rows * side, tokens // rows * side, 3), dtype=np.uint8)

    def fill(self, bucket: Bucket, inputs: StaticEncoderInputs, pixels: Sequence[Pixels]) -> None:
        """Writes the images and their layout into the static buffers; the tail becomes black padding."""
        layout = self._layout([(image.shape[0], image.shape[1]) for image in pixels], bucket)
        buffers = inputs.inputs
        self._arena.reuse()
        start = self._write_patches(buffers.patches_PC, pixels)
        buffers.patches_PC[start:].zero_()
        for buffer, values in (
            (buffers.position_ids_P2, layout.position_ids_P2),
            (buffers.window_index_T, layout.window_index_T),
            (buffers.reverse_index_T, layout.reverse_index_T),
            (buffers.full.cu_seqlens_S, layout.cu_seqlens),
            (buffers.windows.cu_seqlens_S, layout.cu_window_seqlens),
        ):
            self._arena.copy(values, buffer)
        self._arena.finish()

    def eager(self, pixels: Sequence[Pixels]) -> Tensor:
        """Rows [T, D] of the images end to end, without any padding: the plain twin."""
        sizes = [(image.shape[0], image.shape[1]) for image in pixels]
        layout = encoder_layout(sizes, self._config)
        patches_PC = torch.empty(
            self._patch_shape(sum(map(self.num_tokens, pixels))), dtype=torch.uint8, device=self._device
        )
        self._arena.reuse()
        self._write_patches(patches_PC, pixels)
        self._arena.finish()
        return self._encoder.forward(encoder_inputs(patches_PC, layout, device=self._device))

    def num_tokens(self, pixels: Pixels) -> int:
        """Output tokens of an image."""
        height, width = pixels.shape[:2]
        return int(height) * int(width) // self._config.pixels_per_token_side**2

    @property
    def pixels_per_token_side(self) -> int:
        """Side in pixels of the square that becomes one token."""
        return self._config.pixels_per_token_side

    @property
    def _smallest(self) -> tuple[int, int]:
        return self._config.pixels_per_token_side, self._config.pixels_per_token_side

    def _layout(self, sizes: Sequence[tuple[int, int]], bucket: Bucket) -> EncoderLayout:
        return encoder_layout(sizes, self._config, capacity_tokens=bucket.tokens, max_items=bucket.max_items)

    def _patch_shape(self, tokens: int) -> tuple[int, int]:
        config = self._config
        return tokens * config.spatial_merge_size**2, config.in_channels * config.patch_size**2

    def _write_patches(self, patches_PC: Tensor, pixels: Sequence[Pixels]) -> int:
        """Patchifies the images, one after the other, into the front of the buffer; returns how many patches."""
        config = self._config
        start = 0
        for image in pixels:
            pixels_HWC = self._arena.stage(image).to(self._device, non_blocking=True)
            grid = patch_grid(pixels_HWC, config.patch_size, config.spatial_merge_size)
            end = start + grid.numel() // patches_PC.shape[1]
            patches_PC[start:end].view(grid.shape).copy_(grid)
            start = end
        return start


class EncoderRunner:
    """Runs the encoder for a step's images. Counters are cumulative."""

    def __init__(
        self,
        program: EncoderProgram,
        graphs: GraphSet[StaticEncoderInputs],
        store: EmbeddingStore,
        *,
        max_eager_tokens: int,
    ) -> None:
        """`max_eager_tokens`: images that run eager share a forward up to this many output tokens, the size that the
        plan's transient was measured at."""
        self.program = program
        self.graphs = graphs
        self._store = store
        self._max_eager_tokens = max_eager_tokens
        # Of the graphs' static inputs and outputs, and of the counters.
        self._replaying, self._counting = threading.Lock(), threading.Lock()
        self.num_images = 0
        self.num_tokens = 0
        self.num_batches = 0
        self.encode_seconds = 0.0

    def encode(self, items: Sequence[EncoderItem]) -> None:
        """Encodes the images and stores their rows. An image that comes twice is encoded once.

        Raises:
            EmbeddingStoreFullError: the scheduler asked for more rows than there are.
        """
        self._encode(list({item.image_hash: item for item in items}.values()), self._store.put)

    def compute(self, items: Sequence[EncoderItem]) -> list[Tensor]:
        """Encodes the images, each another one; gives their rows [T, D], which are the caller's. Any thread may ask."""
        rows: dict[bytes, Tensor] = {}
        self._encode(items, lambda image_hash, rows_TD: rows.update({image_hash: rows_TD.clone()}))
        return [rows[item.image_hash] for item in items]

    @torch.inference_mode()
    def _encode(self, items: Sequence[EncoderItem], take: Callable[[bytes, Tensor], None]) -> None:
        """Gives `take` the digest and the rows of each image, which live until the next pack is encoded. While another
        thread replays, images run eager."""
        started = time.perf_counter()
        sizes = [self.program.num_tokens(item.pixels) for item in items]
        packs = self._packs(sizes)
        may_replay = self._replaying.acquire(blocking=False)
        try:
            for pack in packs:
                self._run(pack, [items[i] for i in pack.images], [sizes[i] for i in pack.images], take, may_replay)
        finally:
            if may_replay:
                self._replaying.release()
        with self._counting:
            self.num_images += len(items)
            self.num_tokens += sum(sizes)
            self.num_batches += len(packs)
            self.encode_seconds += time.perf_counter() - started

    @torch.inference_mode()
    def profile(self, *, max_tokens_per_image: int) -> None:
        """The largest eager forward that there can be, through the real path: noise of `max_eager_tokens` tokens, in
        images of at most `max_tokens_per_image`. Counts and stores nothing."""
        count = max(1, self._max_eager_tokens // max_tokens_per_image)
        self.program.eager([self.program.noise(max_tokens_per_image)] * count)

    def _packs(self, sizes: Sequence[int]) -> list[Pack]:
        if not self.graphs.is_enabled:
            return pack_eager(sizes, max_tokens=self._max_eager_tokens)
        return pack_images(sizes, self.graphs.buckets)

    def _run(
        self,
        pack: Pack,
        items: Sequence[EncoderItem],
        sizes: Sequence[int],
        take: Callable[[bytes, Tensor], None],
        may_replay: bool,
    ) -> None:
        pixels = [item.pixels for item in items]
        choice = self.graphs.choose(tokens=pack.tokens, items=len(items))
        if isinstance(choice, Bucket) and not may_replay:
            choice = "busy"
        if isinstance(choice, Bucket):
            self.program.fill(choice, self.graphs.inputs(choice), pixels)
            rows_TD = self.graphs.replay(choice, tokens=pack.tokens, items=len(items))
        else:
            with self._counting:
                self.graphs.count_miss(choice, items=len(items))
            rows_TD = retry_on_empty_cache(partial(self.program.eager, pixels))
        start = 0
        for item, size in zip(items, sizes, strict=True):
            take(item.image_hash, rows_TD[start : start + size])
            start += size
