"""Makes small requests and schedulers, and plays the executor: every sampled token is what the test says."""

import hashlib
from collections.abc import Callable, Sequence

from runtime.request import ImageInput, PlaceholderRange, Request, RequestOutput, SamplingParams
from runtime.scheduler.admission import SchedulerLimits
from runtime.scheduler.output import SampledToken, SchedulerOutput, StepResult
from runtime.scheduler.scheduler import Scheduler
from runtime.stats import EngineStats

EOS = 1
IMAGE_TOKEN = 9
BLOCK_SIZE = 4


def picture(name: str, offset: int, length: int) -> ImageInput:
    return ImageInput(
        image_hash=hashlib.sha256(name.encode()).digest(),
        height=28,
        width=28 * length,
        placeholder=PlaceholderRange(offset, length),
    )


def request(
    request_id: str,
    tokens: int | Sequence[int] = 6,
    *,
    images: Sequence[ImageInput] = (),
    max_tokens: int = 4,
    ignore_eos: bool = False,
    stop_token_ids: tuple[int, ...] = (),
    cache_salt: str = "",
) -> Request:
    """A request whose prompt is `tokens` (or so many from 100 on), with placeholders where images are."""
    token_ids = list(range(100, 100 + tokens)) if isinstance(tokens, int) else list(tokens)
    for image in images:
        place = image.placeholder
        token_ids[place.offset : place.end] = [IMAGE_TOKEN] * place.length
    return Request(
        request_id=request_id,
        prompt_token_ids=token_ids,
        images=tuple(images),
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, stop_token_ids=stop_token_ids),
        arrival_time=0.0,
        cache_salt=cache_salt,
    )


def scheduler(
    *,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 64,
    max_encoder_tokens_per_step: int = 64,
    num_blocks: int = 65,
    encoder_cache_tokens: int = 64,
    enable_prefix_caching: bool = True,
    max_shared_encoder_tokens: int | None = None,
) -> Scheduler:
    return Scheduler(
        SchedulerLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            max_encoder_tokens_per_step=max_encoder_tokens_per_step,
        ),
        eos_token_ids=[EOS],
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        encoder_cache_tokens=encoder_cache_tokens,
        enable_prefix_caching=enable_prefix_caching,
        max_shared_encoder_tokens=max_shared_encoder_tokens,
        clock=lambda: 12.5,
    )


def step(
    target: Scheduler, *, token: int | Callable[[str], int] = 50, failed: dict[str, str] | None = None
) -> tuple[SchedulerOutput, list[RequestOutput]]:
    """One whole step, with the invariants checked on both sides of the executor's part."""
    output = target.schedule()
    target.check_integrity()
    tokens = {
        part.request_id: SampledToken(token_id=token if isinstance(token, int) else token(part.request_id))
        for part in output.requests
        if part.is_sampling
    }
    outputs = target.update(output, StepResult(tokens=tokens, failed=failed or {}))
    target.check_integrity()
    return output, outputs


def run_until_done(target: Scheduler, *, token: int = 50, max_steps: int = 200) -> dict[str, list[int]]:
    """Steps until there is no work; the output tokens by request."""
    tokens: dict[str, list[int]] = {}
    for _ in range(max_steps):
        if not target.has_work:
            return tokens
        for output in step(target, token=token)[1]:
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    raise AssertionError(f"still work after {max_steps} steps")


def parts(output: SchedulerOutput) -> list[tuple[str, int, int]]:
    """Who runs: (request_id, first token, number of tokens)."""
    return [(part.request_id, part.num_computed_tokens, part.num_scheduled_tokens) for part in output.requests]


def stats(target: Scheduler) -> EngineStats:
    snapshot = EngineStats()
    target.write_stats(snapshot)
    return snapshot
