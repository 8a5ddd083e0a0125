"""Picks the next token of every sequence of a step, on the device.

Knows logits and sampling rows; knows no requests and no schedule. One device-to-host copy a step, which `launch` starts
and `PendingSample.wait` waits for: nothing else reads the device.

The order is the field's (vLLM, transformers): bias, repetition penalty, frequency and presence penalties, the grammar's
mask, then greedy, or temperature, min-p, top-k, top-p and a draw. Repetition looks at prompt and output, the other two
at output only. Log-probabilities are of the model's own distribution, before all of these, as OpenAI and vLLM give them
by default.

Legend: S sequences that sample in this step, V vocabulary, N rows, K likeliest tokens looked at, L logprobs a row.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.executor.grammar_masks import TokenMasks
from runtime.executor.sampling_rows import NO_LOGPROBS, SamplingRows, uniform_numbers
from runtime.request import TokenLogprobs
from runtime.staging import HostCopy, PendingCopy

# What stands for the logarithm of nothing, so that no infinity and no NaN reaches JSON (vLLM's value).
MIN_LOGPROB = -9999.0

# Where penalties leave a logit at most: a repetition penalty near 0 divides by next to nothing, and two infinities have
# no distribution. Divided by the least temperature it is still a float32.
_MAX_PENALISED = 1e30

# Top-p first looks at so many likeliest tokens: sorting eight rows of 4,096 logits takes 335 us on a CPU, these 90.
_HEAD_SIZE = 256

# Token, peak, logprob, and the 20 likeliest tokens that OpenAI's API allows, with their logprobs.
_MAX_COLUMNS = 3 + 2 * 20


@dataclass(frozen=True, kw_only=True)
class SampledBatch:
    """What was picked for the S sequences, on the host. `is_valid` is false where the logits held a NaN or +inf."""

    token_ids: list[int]
    is_valid: list[bool]
    logprobs: list[TokenLogprobs | None] | None


@dataclass(frozen=True, kw_only=True)
class PendingSample:
    """Tokens that were picked on the device, and are on their way to the host.

    `next_tokens_S`: int64, on the device, for the step that follows.
    """

    next_tokens_S: Tensor
    copy: PendingCopy | None
    num_logprobs: Sequence[int] | None = None
    # Where logits are in the host's memory there is nothing to wait for.
    batch: SampledBatch | None = None

    def wait(self, meanwhile: Callable[[], None] | None = None) -> SampledBatch:
        """The tokens on the host; the step's one wait for the device. `meanwhile`: host work to do until then."""
        if self.batch is not None:
            return self.batch
        assert self.copy is not None
        return _unpack(self.copy.wait(meanwhile).view(np.int32), num_logprobs=self.num_logprobs)


class Sampler:
    """Samples for rows of `SamplingRows`, whose output counts it keeps up to date."""

    def __init__(self, rows: SamplingRows) -> None:
        self._rows = rows
        self._copy = HostCopy(len(rows.is_plain) * _MAX_COLUMNS * 4, rows.device)

    def sample(
        self,
        logits_SV: Tensor,
        rows: NDArray[np.int64],
        steps: NDArray[np.int64],
        masks: TokenMasks | None = None,
    ) -> SampledBatch:
        """As `launch`, waiting for the tokens."""
        return self.launch(logits_SV, rows, steps, masks).wait()

    def launch(
        self,
        logits_SV: Tensor,
        rows: NDArray[np.int64],
        steps: NDArray[np.int64],
        masks: TokenMasks | None = None,
    ) -> PendingSample:
        """Picks a token a sequence, and waits for nothing. `logits_SV` is left as it is.

        Args:
            logits_SV: float32, on the device.
            rows: the sampling row of each sequence; no row twice.
            steps: how many output tokens each sequence has already.
            masks: of the sequences that a grammar binds; each allows a token at least.
        """
        if masks is None and self._rows.is_plain[rows].all():
            if self._rows.device.type == "cpu":
                return _greedy_on_host(logits_SV.numpy())
            peak_S, next_tokens_S = logits_SV.max(dim=-1)  # of equal logits the lowest id, as torch documents
            return self._pending(next_tokens_S, _pack(next_tokens_S, peak_S))
        wanted = self._rows.num_logprobs[rows]
        processed_SV = self._process(logits_SV, rows)
        if masks is not None:
            processed_SV = masks.apply(processed_SV)
        next_tokens_S = self._pick(processed_SV, rows, steps)
        self._remember(next_tokens_S, rows)
        peak_S = logits_SV.amax(dim=-1)
        if (wanted == NO_LOGPROBS).all():
            return self._pending(next_tokens_S, _pack(next_tokens_S, peak_S))
        packed = _pack(next_tokens_S, peak_S, *_logprobs(logits_SV, next_tokens_S, int(wanted.max())))
        return self._pending(next_tokens_S, packed, wanted.tolist())

    def _pending(
        self, next_tokens_S: Tensor, packed: Tensor, num_logprobs: Sequence[int] | None = None
    ) -> PendingSample:
        """Starts the step's one device-to-host copy."""
        return PendingSample(next_tokens_S=next_tokens_S, copy=self._copy.start(packed), num_logprobs=num_logprobs)

    def _process(self, logits_SV: Tensor, rows: NDArray[np.int64]) -> Tensor:
        """Logits after bias and penalties; a copy if there are any."""
        has_bias = self._rows.has_bias[rows]
        has_penalties = self._rows.has_penalties[rows]
        if not has_bias.any() and not has_penalties.any():
            return logits_SV
        logits_SV = logits_SV.clone()
        if has_bias.any():
            positions, token_ids, values = (self._to_device(array) for array in self._rows.bias_of(rows.tolist()))
            logits_SV.index_put_((positions, token_ids), values, accumulate=True)
        if has_penalties.any():
            positions_cpu = np.flatnonzero(has_penalties)
            positions = self._to_device(positions_cpu)
            penalised = self._penalise(logits_SV.index_select(0, positions), rows[positions_cpu])
            logits_SV.index_copy_(0, positions, penalised)
        return logits_SV

    def _penalise(self, logits_SV: Tensor, rows: NDArray[np.int64]) -> Tensor:
        """Repetition as in CTRL (Keskar et al., 2019), frequency and presence as in OpenAI's reference."""
        rows_S = self._to_device(rows)
        counts_SV = self._rows.output_counts_NV.index_select(0, rows_S)
        is_output_SV = counts_SV > 0
        is_seen_SV = is_output_SV | self._rows.is_in_prompt_NV.index_select(0, rows_S)
        repetition_S1 = self._parameter(self._rows.repetition, rows)
        repeated_SV = torch.where(logits_SV > 0, logits_SV / repetition_S1, logits_SV * repetition_S1)
        logits_SV = torch.where(is_seen_SV, repeated_SV, logits_SV)
        logits_SV = logits_SV - self._parameter(self._rows.frequency, rows) * counts_SV
        logits_SV = logits_SV - self._parameter(self._rows.presence, rows) * is_output_SV
        return logits_SV.clamp_(-_MAX_PENALISED, _MAX_PENALISED)

    def _pick(self, logits_SV: Tensor, rows: NDArray[np.int64], steps: NDArray[np.int64]) -> Tensor:
        is_random = self._rows.is_random[rows]
        if not is_random.any():
            return logits_SV.argmax(dim=-1)
        if is_random.all():
            return self._draw(logits_SV, rows, steps)
        next_tokens_S = logits_SV.argmax(dim=-1)
        positions_cpu = np.flatnonzero(is_random)
        positions = self._to_device(positions_cpu)
        drawn = self._draw(logits_SV.index_select(0, positions), rows[positions_cpu], steps[positions_cpu])
        return next_tokens_S.index_copy_(0, positions, drawn)

    def _draw(self, logits_SV: Tensor, rows: NDArray[np.int64], steps: NDArray[np.int64]) -> Tensor:
        """One draw a row by inverting the cumulative distribution at the row's own number: no noise over the vocabulary
        is made, and small differences in the logits, as between batch sizes, rarely change the token."""
        scaled_SV = logits_SV / self._parameter(self._rows.temperature, rows)
        kept_SV = self._truncate(scaled_SV, rows)
        # In double precision, so that tokens of small probability keep theirs over a long vocabulary.
        cumulative_SV = kept_SV.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
        uniform_S1 = self._to_device(uniform_numbers(self._rows.seed[rows], steps)).unsqueeze(1)
        # The first token whose cumulative probability exceeds the number: never one of probability zero.
        picked_S1 = torch.searchsorted(cumulative_SV, uniform_S1 * cumulative_SV[:, -1:], right=True)
        return picked_S1.squeeze(1).clamp_max_(logits_SV.shape[-1] - 1)

    def _truncate(self, scaled_SV: Tensor, rows: NDArray[np.int64]) -> Tensor:
        """Minus infinity for what min-p, then top-k, then top-p leave out.

        By threshold, not by rank: tokens as likely as the last one kept stay too, so that the outcome depends neither
        on the order in which a sort leaves equals, nor on the other rows.
        """
        min_p, top_k, top_p = self._rows.min_p[rows], self._rows.top_k[rows], self._rows.top_p[rows]
        vocab_size = scaled_SV.shape[-1]
        if (min_p > 0).any():
            # p >= min_p * p_max, in logarithms; the logarithm of 0 keeps everything.
            with np.errstate(divide="ignore"):
                log_min_p_S1 = self._to_device(np.log(min_p)).unsqueeze(1)
            lowest_S1 = scaled_SV.amax(dim=-1, keepdim=True) + log_min_p_S1
            scaled_SV = scaled_SV.masked_fill(scaled_SV < lowest_S1, float("-inf"))
        top_k = np.where((top_k <= 0) | (top_k > vocab_size), vocab_size, top_k)
        has_top_k = top_k < vocab_size
        needs_mass = (top_p < 1) & ~has_top_k
        if not has_top_k.any() and not (top_p < 1).any():
            return scaled_SV
        head_size = int(top_k[has_top_k].max(initial=1))
        if needs_mass.any():
            # On a CPU a look at the result costs nothing, so it may try a short head; elsewhere it would stall.
            head_size = max(head_size, _HEAD_SIZE) if self._rows.device.type == "cpu" else vocab_size
        top_k_S1, top_p_S1 = self._to_device(top_k).unsqueeze(1), self._to_device(top_p).unsqueeze(1)
        all_S1 = scaled_SV.logsumexp(dim=-1, keepdim=True)
        threshold_S1, is_covered_S1 = _threshold(scaled_SV, all_S1, min(head_size, vocab_size), top_k_S1, top_p_S1)
        if needs_mass.any() and head_size < vocab_size and not bool(is_covered_S1.all()):
            threshold_S1, _ = _threshold(scaled_SV, all_S1, vocab_size, top_k_S1, top_p_S1)
        return scaled_SV.masked_fill(scaled_SV < threshold_S1, float("-inf"))

    def _remember(self, next_tokens_S: Tensor, rows: NDArray[np.int64]) -> None:
        has_penalties = self._rows.has_penalties[rows]
        if has_penalties.any():
            positions = np.flatnonzero(has_penalties)
            index = (self._to_device(rows[positions]), next_tokens_S.index_select(0, self._to_device(positions)))
            self._rows.output_counts_NV[index] += 1

    def _parameter(self, values: NDArray[np.float32], rows: NDArray[np.int64]) -> Tensor:
        return self._to_device(values[rows]).unsqueeze(1)

    def _to_device(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self._rows.device, non_blocking=True)


def _threshold(
    scaled_SV: Tensor, all_S1: Tensor, head_size: int, top_k_S1: Tensor, top_p_S1: Tensor
) -> tuple[Tensor, Tensor]:
    """The lowest logit [S, 1] that top-k and top-p keep, seen from the `head_size` largest, and whether these were
    enough to tell [S, 1]. A `top_k` of V and a `top_p` of 1 do nothing. Top-p counts what top-k left as the whole.

    `all_S1`: the logarithm of the sum over the whole vocabulary.
    """
    vocab_size = scaled_SV.shape[-1]
    head_SK = _sorted(scaled_SV) if head_size == vocab_size else scaled_SV.topk(head_size, dim=-1).values
    has_top_k_S1 = top_k_S1 < vocab_size
    ranks_K = torch.arange(head_size, device=head_SK.device)
    head_SK = head_SK.masked_fill(ranks_K >= top_k_S1, float("-inf"))
    total_S1 = torch.where(has_top_k_S1, head_SK.logsumexp(dim=-1, keepdim=True), all_S1)
    probabilities_SK = (head_SK - total_S1).exp()
    cumulative_SK = probabilities_SK.cumsum(dim=-1, dtype=torch.float64)
    # A token stays if those before it do not reach top_p, so that the first one always does.
    is_kept_SK = (cumulative_SK - probabilities_SK < top_p_S1) & (head_SK > float("-inf"))
    num_kept_S1 = is_kept_SK.sum(dim=-1, keepdim=True).clamp_min_(1)
    has_neither_S1 = ~has_top_k_S1 & (top_p_S1 >= 1)
    threshold_S1 = head_SK.gather(1, num_kept_S1 - 1).masked_fill(has_neither_S1, float("-inf"))
    return threshold_S1, has_top_k_S1 | has_neither_S1 | (cumulative_SK[:, -1:] >= top_p_S1)


def _sorted(scaled_SV: Tensor) -> Tensor:
    """Each row's values, largest first. On a CPU NumPy's sort takes a fifth of torch's time (4,096 logits: 42 us)."""
    if scaled_SV.device.type == "cpu":
        return torch.from_numpy(-np.sort(-scaled_SV.numpy(), axis=-1))
    return torch.sort(scaled_SV, dim=-1, descending=True).values


def _greedy_on_host(logits_SV: NDArray[np.float32]) -> PendingSample:
    """The likeliest tokens where logits are in the host's memory: nothing to pack, nothing to copy."""
    if len(logits_SV) == 1:  # numbers are faster than arrays of one
        next_token = int(logits_SV[0].argmax())
        is_valid = math.isfinite(logits_SV[0, next_token])
        batch = SampledBatch(token_ids=[next_token], is_valid=[is_valid], logprobs=None)
        return PendingSample(next_tokens_S=torch.tensor([next_token]), copy=None, batch=batch)
    next_tokens = logits_SV.argmax(axis=-1)  # of equal logits the lowest id, as NumPy documents
    peaks = logits_SV[np.arange(len(logits_SV)), next_tokens]
    batch = SampledBatch(token_ids=next_tokens.tolist(), is_valid=np.isfinite(peaks).tolist(), logprobs=None)
    return PendingSample(next_tokens_S=torch.from_numpy(next_tokens), copy=None, batch=batch)


def _logprobs(logits_SV: Tensor, next_tokens_S: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of the raw distribution: the picked token's logprob [S], and ids and logprobs [S, L] of the likeliest ones."""
    logprobs_SV = logits_SV.log_softmax(dim=-1)
    picked_S = logprobs_SV.gather(1, next_tokens_S.unsqueeze(1)).squeeze(1)
    top = logprobs_SV.topk(min(num_top, logprobs_SV.shape[-1]), dim=-1)
    return _finite(picked_S), top.indices, _finite(top.values)


def _finite(logprobs: Tensor) -> Tensor:
    return logprobs.nan_to_num(nan=MIN_LOGPROB, posinf=0.0, neginf=MIN_LOGPROB).clamp_min_(MIN_LOGPROB)


def _pack(
    next_tokens_S: Tensor,
    peak_S: Tensor,
    picked_S: Tensor | None = None,
    top_ids_SL: Tensor | None = None,
    top_SL: Tensor | None = None,
) -> Tensor:
    """Everything the host wants, as int32 columns (floats by their bits), so that one copy brings it."""
    columns = [next_tokens_S.to(torch.int32).unsqueeze(1), peak_S.view(torch.int32).unsqueeze(1)]
    if picked_S is not None and top_ids_SL is not None and top_SL is not None:
        columns += [picked_S.view(torch.int32).unsqueeze(1), top_ids_SL.to(torch.int32), top_SL.view(torch.int32)]
    return torch.cat(columns, dim=1)


def _unpack(columns: NDArray[np.int32], *, num_logprobs: Sequence[int] | None) -> SampledBatch:
    """Takes the columns that `_pack` made apart."""
    logprobs: list[TokenLogprobs | None] | None = None
    if num_logprobs is not None:
        num_top = (columns.shape[1] - 3) // 2
        picked = columns[:, 2].copy().view(np.float32).tolist()
        top_ids = columns[:, 3 : 3 + num_top].tolist()
        top = columns[:, 3 + num_top :].copy().view(np.float32).tolist()
        logprobs = [
            None
            if wanted == NO_LOGPROBS
            else TokenLogprobs(logprob, list(zip(ids[:wanted], values[:wanted], strict=True)))
            for wanted, logprob, ids, values in zip(num_logprobs, picked, top_ids, top, strict=True)
        ]
    return SampledBatch(
        token_ids=columns[:, 0].tolist(),
        is_valid=np.isfinite(columns[:, 1].copy().view(np.float32)).tolist(),
        logprobs=logprobs,
    )
