"""Requests that measurements ask of an engine: the reference's workload, and a mix of everything. Seeded, no two alike.

Knows a model's special tokens and sizes of pictures; starts nothing and measures nothing.
"""

import math
from collections.abc import Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime.checkpoint import ModelConfig
from runtime.config import ResolvedConfig
from runtime.offline import OfflineRequest
from runtime.request import SamplingParams

# Of the mix: what a prompt and an answer have at most, and how many pictures.
MAX_TEXT_TOKENS = 60
MAX_OUTPUT_TOKENS = 24
MAX_IMAGES = 3

# One of so many requests is aborted, after none to three tokens.
ABORT_EVERY = 11


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The reference's (docs/decisions.md): pictures of noise in turns of sizes, random text, answers of a fixed length.

    `image_sizes`: (width, height) in turns; empty for text alone.
    """

    num_requests: int
    num_warmups: int
    concurrency: int
    image_sizes: tuple[tuple[int, int], ...]
    num_text_tokens: int
    num_output_tokens: int
    seed: int = 0


def requests_of(workload: Workload, model: ModelConfig) -> Iterator[OfflineRequest]:
    """Warm-ups, then the measured requests."""
    sampling = SamplingParams(max_tokens=workload.num_output_tokens, ignore_eos=True)
    for index in range(workload.num_warmups + workload.num_requests):
        generator = np.random.default_rng([workload.seed, index])
        token_ids = _words(generator, workload.num_text_tokens, model)
        images = []
        if workload.image_sizes:
            width, height = workload.image_sizes[index % len(workload.image_sizes)]
            images.append(noise(generator, width=width, height=height))
            token_ids = [*_marker(model), *token_ids]
        yield OfflineRequest(prompt_token_ids=token_ids, images=images, sampling=sampling)


def mixed_requests(
    num_requests: int, *, model: ModelConfig, config: ResolvedConfig, seed: int = 0
) -> Iterator[OfflineRequest]:
    """Text alone and one to three pictures, in turns; pictures of every size from `min_pixels` to `largest_picture` and
    of many shapes; greedy and drawn tokens, with logprobs and without; some that leave before their end. None is longer
    than `max_model_len`."""
    for index in range(num_requests):
        generator = np.random.default_rng([seed, index])
        sampling = SamplingParams(
            max_tokens=int(generator.integers(1, MAX_OUTPUT_TOKENS + 1)),
            ignore_eos=True,
            temperature=float(index % 3 == 0),
            top_p=0.9 if index % 6 == 0 else 1.0,
            num_logprobs=3 if index % 5 == 0 else None,
        )
        room = config.max_model_len - sampling.max_tokens
        token_ids = _words(generator, int(generator.integers(1, MAX_TEXT_TOKENS + 1)), model)[:room]
        room -= len(token_ids)
        images = []
        for _ in range(index % (MAX_IMAGES + 1)):
            picture = noise(generator, **_size(generator, model, config))
            num_tokens = picture.shape[0] * picture.shape[1] // model.vision.pixels_per_token_side**2 + 2
            if num_tokens > room:
                continue
            room -= num_tokens
            images.append(picture)
            token_ids = [*_marker(model), *token_ids]
        leaves = index % ABORT_EVERY == ABORT_EVERY - 1
        yield OfflineRequest(
            prompt_token_ids=token_ids,
            images=images,
            sampling=sampling,
            abort_after_tokens=int(generator.integers(0, 4)) if leaves else None,
        )


def largest_picture(config: ResolvedConfig) -> int:
    """Tokens of the mix's largest picture: as the limits allow, and no more than half of what a request may have."""
    return min(config.max_tokens_per_image, config.max_model_len // 2)


def noise(generator: np.random.Generator, *, width: int, height: int) -> NDArray[np.uint8]:
    """A picture of noise, uint8 [height, width, 3]."""
    return generator.integers(0, 256, (height, width, 3), dtype=np.uint8)


def _words(generator: np.random.Generator, count: int, model: ModelConfig) -> list[int]:
    """Random text. It holds no token with a meaning of its own: those lie above the words."""
    special = (model.image_token_id, model.vision_start_token_id, model.vision_end_token_id, *model.eos_token_ids)
    token_ids: list[int] = generator.integers(0, min(special), count).tolist()
    return token_ids


def _marker(model: ModelConfig) -> tuple[int, int, int]:
    """Where a picture stands."""
    return model.vision_start_token_id, model.image_token_id, model.vision_end_token_id


def _size(generator: np.random.Generator, model: ModelConfig, config: ResolvedConfig) -> dict[str, int]:
    """A size that is kept when the picture is resized: as many tokens as are drawn, or a few more; sides up to 4:1."""
    side = model.vision.pixels_per_token_side
    smallest = -(-config.min_pixels // side**2)
    largest = largest_picture(config)
    tokens = int(generator.integers(smallest, max(smallest, largest) + 1))
    narrow, wide = max(1, math.isqrt(tokens) // 2), 2 * math.isqrt(tokens)
    rows = int(generator.integers(narrow, wide + 1))
    columns = max(1, min(-(-tokens // rows), largest // rows))
    return {"width": columns * side, "height": rows * side}
