"""What a request is and what comes back: the data that crosses between server and engine. No I/O, no torch."""

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]


class PlaceholderRange(msgspec.Struct, frozen=True):
    """Where one image's tokens stand in the prompt: `length` placeholder tokens from index `offset` on."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


class ImageInput(msgspec.Struct, frozen=True, kw_only=True):
    """One picture of a request. Its pixels, uint8 [height, width, 3], travel beside the request as a raw frame.

    `image_hash` is a SHA-256 digest over size and pixels after resizing: equal digests mean equal embeddings.
    `height` and `width` are multiples of the vision encoder's `pixels_per_token_side`.
    """

    image_hash: bytes
    height: int
    width: int
    placeholder: PlaceholderRange


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to pick tokens and when to stop. Stop *strings* are the server's: the engine knows tokens only.

    `temperature` 0, and one below 1e-5, is greedy (ties go to the lowest id).
    `top_k` 0 and `top_p` 1 and `min_p` 0 do nothing.
    `num_logprobs` None: none; 0: the sampled token's only; n: the n likeliest too.
    `grammar`: what the output must be (`runtime.processing.grammar`). It may end only where the grammar may, and does
    so where that allows nothing else, with `ignore_eos` too.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    num_logprobs: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    grammar: str | None = None


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate. `arrival_time` is `time.time()` at the server; `cache_salt` parts prefix caches."""

    request_id: str
    prompt_token_ids: list[int]
    images: tuple[ImageInput, ...] = ()
    sampling: SamplingParams
    arrival_time: float
    cache_salt: str = ""


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probability of the sampled token, and of the likeliest ones as (token_id, logprob), likeliest first."""

    logprob: float
    top: list[tuple[int, float]]


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What one step added to one request. The last one of a request has a `finish_reason`.

    `new_token_ids` never holds the end or stop token that ended a request: an output may have a `finish_reason` "stop"
    and no tokens. `error` says what went wrong when `finish_reason` is "error"; with `is_rejected` the request itself
    was at fault (it can never fit), not the engine.
    `scheduled_time` and `first_token_time` are `time.time()` in the engine, set once known.
    `logprobs` runs parallel to `new_token_ids` when the request asked for them.
    """

    request_id: str
    new_token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    is_rejected: bool = False
    num_cached_tokens: int = 0
    scheduled_time: float | None = None
    first_token_time: float | None = None
