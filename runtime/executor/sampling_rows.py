"""How each running request wants its tokens picked: one row a request, kept from step to step.

Knows parameters and what the penalties must remember. Picks nothing (`sampler` does) and knows no schedule. Numbers
that decide *which* work a step needs stay on the host, so that nothing is read back to find out; what the penalties
count lives on the device. A row can be rebuilt at any time from the request's tokens.

Legend: N rows, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.request import SamplingParams

NO_LOGPROBS = -1

_WORD = (1 << 64) - 1

# Below it a draw is greedy: logits divided by less may leave float32's range, and a distribution of infinities is none.
# vLLM draws the line here too.
MIN_TEMPERATURE = 1e-5
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


class SamplingRows:
    """Parameters of at most `num_rows` requests over a vocabulary of `vocab_size` tokens."""

    def __init__(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        # Set by `assign`, read each step.
        self.temperature: NDArray[np.float32] = np.ones(num_rows, dtype=np.float32)
        self.top_k: NDArray[np.int64] = np.zeros(num_rows, dtype=np.int64)
        self.top_p: NDArray[np.float32] = np.ones(num_rows, dtype=np.float32)
        self.min_p: NDArray[np.float32] = np.zeros(num_rows, dtype=np.float32)
        self.presence: NDArray[np.float32] = np.zeros(num_rows, dtype=np.float32)
        self.frequency: NDArray[np.float32] = np.zeros(num_rows, dtype=np.float32)
        self.repetition: NDArray[np.float32] = np.ones(num_rows, dtype=np.float32)
        self.seed: NDArray[np.uint64] = np.zeros(num_rows, dtype=np.uint64)
        self.num_logprobs: NDArray[np.int64] = np.full(num_rows, NO_LOGPROBS, dtype=np.int64)
        self.bias: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}
        # What a step has to do for the row.
        self.is_plain: NDArray[np.bool_] = np.ones(num_rows, dtype=np.bool_)  # greedy, and nothing else asked
        self.is_random: NDArray[np.bool_] = np.zeros(num_rows, dtype=np.bool_)
        self.has_penalties: NDArray[np.bool_] = np.zeros(num_rows, dtype=np.bool_)
        self.has_bias: NDArray[np.bool_] = np.zeros(num_rows, dtype=np.bool_)
        # What the penalties remember. On a CPU, rows that never had a penalty cost no memory.
        self.output_counts_NV = torch.zeros((num_rows, vocab_size), dtype=torch.int32, device=device)
        self.is_in_prompt_NV = torch.zeros((num_rows, vocab_size), dtype=torch.bool, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes on the device, whether or not they were touched yet."""
        return self.output_counts_NV.nbytes + self.is_in_prompt_NV.nbytes

    def check(self, sampling: SamplingParams) -> None:
        """Says whether the parameters can be served.

        Raises:
            ValueError: a biased token is not in the vocabulary.
        """
        for token_id in sampling.logit_bias:
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(f"logit_bias names token {token_id}; the vocabulary has {self.vocab_size} tokens")

    def assign(
        self,
        row: int,
        sampling: SamplingParams,
        *,
        seed: int,
        prompt_token_ids: NDArray[np.int64],
        output_token_ids: NDArray[np.int64],
    ) -> None:
        """Gives `row` to a request, which may have output tokens already (after a preemption).

        `seed` is the request's own, or one drawn for it; only its low 64 bits count.
        """
        is_random = sampling.temperature >= MIN_TEMPERATURE
        self.temperature[row] = sampling.temperature if is_random else 1.0
        self.top_k[row] = sampling.top_k
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.presence[row] = sampling.presence_penalty
        self.frequency[row] = sampling.frequency_penalty
        self.repetition[row] = sampling.repetition_penalty
        self.seed[row] = seed & _WORD
        self.num_logprobs[row] = NO_LOGPROBS if sampling.num_logprobs is None else sampling.num_logprobs
        self.is_random[row] = is_random
        self.has_penalties[row] = (
            sampling.presence_penalty != 0 or sampling.frequency_penalty != 0 or sampling.repetition_penalty != 1
        )
        self.has_bias[row] = bool(sampling.logit_bias)
        self.is_plain[row] = not (
            self.is_random[row] or self.has_penalties[row] or self.has_bias[row] or sampling.num_logprobs is not None
        )
        self.bias.pop(row, None)
        if sampling.logit_bias:
            self.bias[row] = (
                np.fromiter(sampling.logit_bias.keys(), dtype=np.int64),
                np.fromiter(sampling.logit_bias.values(), dtype=np.float32),
            )
        if self.has_penalties[row]:
            counts = np.bincount(output_token_ids, minlength=self.vocab_size).astype(np.int32)
            self.output_counts_NV[row].copy_(torch.from_numpy(counts), non_blocking=True)
            self.is_in_prompt_NV[row] = False
            prompt = torch.from_numpy(prompt_token_ids).to(self.device, non_blocking=True)
            self.is_in_prompt_NV[row].index_fill_(0, prompt, True)

    def bias_of(self, rows: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
        """The biases of a step's rows, end to end: (position in `rows`, token id, bias)."""
        parts = [(position, *self.bias[row]) for position, row in enumerate(rows) if row in self.bias]
        return (
            np.concatenate([np.full(len(ids), position, dtype=np.int64) for position, ids, _ in parts]),
            np.concatenate([ids for _, ids, _ in parts]),
            np.concatenate([values for _, _, values in parts]),
        )


def uniform_numbers(seeds: NDArray[np.uint64], steps: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1 - 2**-48] for each pair of seed and step, whatever else is asked for with it.

    The generator is counter-based: output `steps` of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom
    number generators", 2014) started at the mixed seed. So a request's draws depend on its seed and on how many tokens
    it has, not on its company, nor on preemptions.
    """
    state = _mix(seeds) + _GOLDEN * (steps.astype(np.uint64) + np.uint64(1))
    return (_mix(state) >> np.uint64(16)).astype(np.float64) * 2.0**-48


def _mix(word: NDArray[np.uint64]) -> NDArray[np.uint64]:
    word = (word ^ (word >> np.uint64(30))) * _MIX_1
    word = (word ^ (word >> np.uint64(27))) * _MIX_2
    return word ^ (word >> np.uint64(31))
