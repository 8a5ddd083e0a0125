"""Says whether a request can ever be served, before it waits. Pure functions over sizes: no state.

Whatever passes here can run once it is alone; so a request at the head of the queue never waits for what cannot come.
"""

from dataclasses import dataclass

from runtime.config import ResolvedConfig
from runtime.request import Request


class RequestRejected(ValueError):
    """The request can never be served as it is; the message gives the value, the limit and the knob."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerLimits:
    """What bounds a request and a step. Tokens are decoder tokens, except `*_encoder_tokens`: output tokens of it."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_encoder_tokens_per_step: int

    def __post_init__(self) -> None:
        for knob in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_encoder_tokens_per_step"):
            if getattr(self, knob) < 1:
                raise ValueError(f"{knob} is {getattr(self, knob)}; it must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): a step gives every running request one token"
            )

    @classmethod
    def of(cls, config: ResolvedConfig) -> "SchedulerLimits":
        """The limits of a configuration. The encoder may do as many tokens in a step as the decoder, or one image."""
        engine = config.engine
        return cls(
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            max_encoder_tokens_per_step=max(engine.max_num_batched_tokens, config.max_tokens_per_image),
        )


def clip_max_tokens(request: Request, limits: SchedulerLimits) -> int:
    """How many tokens the request may generate: `max_tokens`, but never beyond `max_model_len`."""
    return min(request.sampling.max_tokens, limits.max_model_len - len(request.prompt_token_ids))


def check_request(
    request: Request, limits: SchedulerLimits, *, num_blocks: int, block_size: int, encoder_cache_tokens: int
) -> None:
    """Passes a request that can run when it is alone.

    Args:
        num_blocks: those that requests may have, without the null block.

    Raises:
        RequestRejected: it cannot.
    """
    _check_lengths(request, limits)
    _check_images(request, limits, encoder_cache_tokens=encoder_cache_tokens)
    # The last token is never computed, only returned.
    num_tokens = len(request.prompt_token_ids) + clip_max_tokens(request, limits) - 1
    needed = -(-num_tokens // block_size)
    if needed > num_blocks:
        raise RequestRejected(
            f"prompt ({len(request.prompt_token_ids)} tokens) and max_tokens ({clip_max_tokens(request, limits)}) need "
            f"{needed} KV blocks of {block_size} tokens; the KV cache has {num_blocks}: lower max_tokens, or give the "
            f"KV cache more memory (kv_cache_memory_bytes)"
        )


def _check_lengths(request: Request, limits: SchedulerLimits) -> None:
    num_prompt_tokens = len(request.prompt_token_ids)
    if num_prompt_tokens < 1:
        raise RequestRejected("prompt has no tokens; it must have at least 1")
    if request.sampling.max_tokens < 1:
        raise RequestRejected(f"max_tokens is {request.sampling.max_tokens}; it must be at least 1")
    if num_prompt_tokens > limits.max_model_len - 1:
        of_images = ""
        if request.images:
            num_image_tokens = sum(image.placeholder.length for image in request.images)
            of_images = f" ({num_image_tokens} of them from {len(request.images)} images)"
        raise RequestRejected(
            f"prompt has {num_prompt_tokens} tokens{of_images} and one more is to be generated; "
            f"max_model_len is {limits.max_model_len}"
        )


def _check_images(request: Request, limits: SchedulerLimits, *, encoder_cache_tokens: int) -> None:
    free_from = 0
    for index, image in enumerate(request.images):
        place = image.placeholder
        if place.length < 1 or place.offset < free_from or place.end > len(request.prompt_token_ids):
            raise RequestRejected(
                f"image {index} has tokens {place.offset}..{place.end}; they must begin at {free_from} or later and "
                f"end within the prompt's {len(request.prompt_token_ids)} tokens"
            )
        free_from = place.end
        if place.length > encoder_cache_tokens:
            raise RequestRejected(
                f"image {index} has {place.length} tokens; encoder_cache_tokens is {encoder_cache_tokens}"
            )
        if place.length > limits.max_encoder_tokens_per_step:
            raise RequestRejected(
                f"image {index} has {place.length} tokens; max_encoder_tokens_per_step is "
                f"{limits.max_encoder_tokens_per_step}"
            )
