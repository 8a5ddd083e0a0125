"""The worst step that a configuration allows, run through the real path for its peak of memory.

Knows limits, no weights and no device. All blocks of its tables are the null block, so that it needs no KV cache yet.
"""

from collections.abc import Iterator

from runtime.config import ResolvedConfig
from runtime.executor.kv_cache import NULL_BLOCK
from runtime.executor.model_runner import ModelRunner
from runtime.request import Request, SamplingParams
from runtime.scheduler.output import ScheduledRequest, SchedulerOutput

MAX_LOGPROBS = 20

# Everything that a sampler can be asked at once; so flat a distribution that top-p must sort the whole vocabulary.
SAMPLING = SamplingParams(
    max_tokens=1,
    temperature=2.0,
    top_p=0.999,
    min_p=1e-6,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    repetition_penalty=1.1,
    logit_bias={0: 1.0},
    seed=0,
    num_logprobs=MAX_LOGPROBS,
)


def run_worst_step(runner: ModelRunner, config: ResolvedConfig) -> None:
    """`max_num_seqs` requests at `max_model_len`, together `max_num_batched_tokens` tokens, all sampling with every
    feature: prefills at the end of a full context beside decodes of full contexts.

    Counts nowhere as long as the runner has no graphs, and leaves nothing behind in the runner.
    """
    prompt_length = max(1, config.max_model_len - 1)
    num_blocks = -(-prompt_length // config.engine.block_size)
    parts = [
        ScheduledRequest(
            request_id=f"profile-{index}",
            num_computed_tokens=prompt_length - num_tokens,
            num_scheduled_tokens=num_tokens,
            block_ids=(NULL_BLOCK,) * num_blocks,
            is_sampling=True,
        )
        for index, num_tokens in enumerate(_shares(config, prompt_length))
    ]
    for part in parts:
        runner.add(
            Request(
                request_id=part.request_id,
                prompt_token_ids=[0] * prompt_length,
                sampling=SAMPLING,
                arrival_time=0.0,
            ),
            (),
        )
    try:
        runner.run(
            SchedulerOutput(
                requests=tuple(parts), num_scheduled_tokens=sum(part.num_scheduled_tokens for part in parts)
            )
        )
    finally:
        for part in parts:
            runner.remove(part.request_id)


def _shares(config: ResolvedConfig, prompt_length: int) -> Iterator[int]:
    """Tokens of each request: the first take as many as a prompt has, the others one."""
    num_seqs, left = config.engine.max_num_seqs, config.engine.max_num_batched_tokens
    for index in range(num_seqs):
        num_tokens = min(prompt_length, left - (num_seqs - 1 - index))
        yield num_tokens
        left -= num_tokens
