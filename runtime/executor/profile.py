"""The worst step that a configuration allows, run through the real path for its peak of memory.

Knows limits, no weights and no device. All blocks of its tables are the null block, so that it needs no KV cache yet.
"""

import logging
from collections.abc import Iterable

import msgspec
import torch.nn.functional as F

from runtime.config import ResolvedConfig
from runtime.executor.kv_cache import NULL_BLOCK
from runtime.executor.model_runner import ModelRunner
from runtime.model.layers import Linear
from runtime.request import Request, SamplingParams
from runtime.scheduler.output import ScheduledRequest, SchedulerOutput

log = logging.getLogger(__name__)

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


# What requests ask of the sampler one by one.
USUAL = (
    SamplingParams(max_tokens=1),
    SamplingParams(max_tokens=1, num_logprobs=3),
    SamplingParams(max_tokens=1, temperature=1.0, seed=0),
    SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, seed=0),
    SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, top_k=40, num_logprobs=3, seed=0),
)

# Up to so many rows a library's kernels change every few rows.
FEW_ROWS = 512

# Allows any text, so that the distribution stays as flat as it is; its masks are as large as any grammar's.
GRAMMAR = "start: TEXT\nTEXT: /(.|\\n)*/\n"

# A prefill at the end of a full context needs no more memory with more tokens than this: attention works in pieces, and
# the step's other tokens can come from an empty context, which costs a quarter of the time.
FULL_CONTEXT_TOKENS = 256


def run_worst_step(runner: ModelRunner, config: ResolvedConfig) -> None:
    """`max_num_seqs` requests with `max_num_batched_tokens` tokens among them, sampling with every feature: prefills of
    empty contexts, one at the end of a full one, and decodes of full contexts.

    Counts nowhere as long as the runner has no graphs, and leaves nothing behind in the runner.
    """
    _run(
        runner, _parts(config, config.engine.max_num_batched_tokens, config.engine.max_num_seqs), _all_features(runner)
    )


def run_first_step(runner: ModelRunner, config: ResolvedConfig) -> None:
    """A decode of one full context with every feature: makes what is made once."""
    _run(runner, _parts(config, 1, 1), _all_features(runner))


def _all_features(runner: ModelRunner) -> SamplingParams:
    return msgspec.structs.replace(SAMPLING, grammar=GRAMMAR) if runner.serves_grammars else SAMPLING


def run_steps_of_all_sizes(runner: ModelRunner, config: ResolvedConfig) -> None:
    """Steps of one, two, four, ... requests, decodes alone and prefills of as many tokens, sampled in each usual way.

    A driver loads a kernel's code at its first launch, into memory that it keeps: libraries choose kernels by size, so
    what the worst step launches is not all that requests will.
    """
    most_tokens, most_seqs = config.engine.max_num_batched_tokens, config.engine.max_num_seqs
    for power in range(most_tokens.bit_length()):
        tokens = 2**power
        # The sampler has a row for each sequence: beyond all of them it launches nothing else.
        for sampling in USUAL if tokens <= 2 * most_seqs else USUAL[:1]:
            _run(runner, _parts(config, tokens, min(tokens, most_seqs)), sampling)
        _run(runner, _parts(config, tokens, 1), USUAL[0])


def load_products(linears: Iterable[Linear], max_rows: int) -> None:
    """Multiplies rows by a matrix of each shape: a library has dozens of kernels for one, by number of rows."""
    counts = (*range(8, FEW_ROWS, 8), *range(FEW_ROWS, max_rows, 64), max_rows)
    by_shape = {(one.weight.shape, one.bias is None): one for one in linears if one.packed is None}
    for linear in by_shape.values():
        num_outputs, num_inputs = linear.weight.shape
        rows = linear.weight.new_zeros((max_rows, num_inputs))
        sums = linear.weight.new_zeros((max_rows, num_outputs))
        for count in counts:
            if count <= max_rows:
                F.linear(rows[:count], linear.weight, linear.bias)
                if linear.bias is None:  # as a product that adds the residual
                    sums[:count].addmm_(rows[:count], linear.weight.t())


def _run(runner: ModelRunner, parts: list[ScheduledRequest], sampling: SamplingParams) -> None:
    for part in parts:
        runner.add(
            Request(
                request_id=part.request_id,
                prompt_token_ids=[0] * (part.num_computed_tokens + part.num_scheduled_tokens),
                sampling=sampling,
                arrival_time=0.0,
            ),
            (),
        )
    try:
        result = runner.run(
            SchedulerOutput(
                requests=tuple(parts), num_scheduled_tokens=sum(part.num_scheduled_tokens for part in parts)
            )
        )
        if result.failed:
            log.warning("the profile's step gave no numbers", extra={"failed": result.failed})
    finally:
        for part in parts:
            runner.remove(part.request_id)


def _parts(config: ResolvedConfig, max_tokens: int, num_seqs: int) -> list[ScheduledRequest]:
    """Decodes of full contexts; as many prefills as it takes to use up the tokens, the first at a full context."""
    full = max(1, config.max_model_len - 1)
    left = max_tokens - num_seqs  # beyond one token for each
    parts: list[ScheduledRequest] = []
    for index in range(num_seqs):
        is_first = index == 0
        room = full if num_seqs == 1 or not is_first else min(full, FULL_CONTEXT_TOKENS)
        num_tokens = 1 + min(room - 1, left)
        left -= num_tokens - 1
        length = full if is_first or num_tokens == 1 else num_tokens
        parts.append(
            ScheduledRequest(
                request_id=f"profile-{index}",
                num_computed_tokens=length - num_tokens,
                num_scheduled_tokens=num_tokens,
                block_ids=(NULL_BLOCK,) * -(-length // config.engine.block_size),
                is_sampling=True,
            )
        )
    return parts
