"""Runs the decoder's part of a step: fills the inputs, runs the text model, samples, and remembers the tokens.

One step: give slots; fill the inputs; embed and put image rows in their places; replay a graph or run eager; sample
(the step's one device-to-host copy). Where that pays, the step after it is launched before its tokens are read: what
is on its way then, and what becomes of it, is `run_ahead`'s.

Knows no images but by the digests of their rows. What goes wrong here is an error of the engine's, unless a single
sequence's logits or grammar are at fault.

Legend: T tokens of a step, S sequences that sample, D hidden width, V vocabulary.
"""

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.executor.arena import retry_on_empty_cache
from runtime.executor.batch import Padding, Step, StepBatch, StepBuffers, StepShape, fill_batch
from runtime.executor.decoder_program import Decoder, DecoderInputs, DecoderProgram, attention_bucket
from runtime.executor.embedding_store import EmbeddingStore
from runtime.executor.grammar_masks import GrammarMasks
from runtime.executor.graphs import Bucket, GraphSet
from runtime.executor.request_slots import RequestSlots, RunningRequest
from runtime.executor.run_ahead import LaunchedStep
from runtime.executor.sampler import SampledBatch, Sampler
from runtime.executor.sampling_rows import SamplingRows
from runtime.model.attention import DecoderAttention
from runtime.processing.grammar import GrammarError, Matcher
from runtime.request import SamplingParams
from runtime.scheduler.output import SampledToken, StepResult


class DecoderRunner:
    """The text model with its slots, graphs and sampler; arguments as `ModelRunner` has them."""

    def __init__(
        self,
        *,
        decoder: Decoder,
        attention: DecoderAttention,
        store: EmbeddingStore,
        buffers: StepBuffers,
        max_num_seqs: int,
        max_model_len: int,
        vocab_size: int,
        device: torch.device,
        grammars: GrammarMasks | None,
        runs_ahead: bool,
    ) -> None:
        self._decoder = decoder
        self._attention = attention
        self._store = store
        self._buffers = buffers
        self._device = device
        self._slots = RequestSlots(
            num_slots=max_num_seqs, max_model_len=max_model_len, max_blocks=-(-max_model_len // buffers.block_size)
        )
        self._sampling = SamplingRows(num_rows=max_num_seqs, vocab_size=vocab_size, device=device)
        self._sampler = Sampler(self._sampling)
        self._grammars = grammars
        # None until the graphs are captured: what runs before is eager, and counts nowhere.
        self._graphs: GraphSet[DecoderInputs] | None = None
        self._runs_ahead = runs_ahead
        # The decode step that was launched before the scheduler asked for it.
        self._ahead: LaunchedStep | None = None

    @property
    def static_bytes(self) -> int:
        """Bytes on the device of step inputs, sampling rows and masks; where it is the CPU, of the slots too."""
        on_host = self._slots.num_bytes if self._device.type == "cpu" else 0
        mask_bytes = self._grammars.num_bytes if self._grammars is not None else 0
        return self._buffers.num_bytes + self._sampling.num_bytes + mask_bytes + on_host

    def program(self, *, max_mixed_tokens: int) -> DecoderProgram:
        """What the graph set captures. `max_mixed_tokens`: of the largest mixed bucket, 0 without one."""
        return DecoderProgram(self._decoder, self._attention, self._buffers, max_mixed_tokens=max_mixed_tokens)

    def use_graphs(self, graphs: GraphSet[DecoderInputs]) -> None:
        """Replays `graphs`, captured or disabled, from now on, and counts hits and misses there."""
        self._graphs = graphs

    def check(self, sampling: SamplingParams) -> None:
        """Sees whether a request's parameters can be served.

        Raises:
            ValueError: one of them cannot.
        """
        self._sampling.check(sampling)

    def release(self, running: RunningRequest) -> None:
        """Frees the slot of a request that ended."""
        self._slots.release(running)

    def forget_ahead(self) -> None:
        """Lets go of the step that was launched ahead: it holds requests, and so their pixels."""
        self._ahead = None

    def run(self, scheduled: Step) -> StepResult:
        """Does the decoder's part of a step. `failed` names the requests whose logits were no numbers, `refused` those
        whose grammar is at its limits."""
        self._give_slots(scheduled)
        steps: list[LaunchedStep] = []
        rest = scheduled
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            known, rest = ahead.split(scheduled)
            if known.rows:
                steps.append(known)
        if rest:
            launched = self._launch(rest)
            if launched is not None:
                steps.append(launched)
        if len(steps) == 1 and len(steps[0].rows) == len(scheduled):
            self._ahead = self._launch_ahead(steps[0])
        meanwhile = self._attention.anticipate if self._ahead is None else None
        sampled = [step.sample.wait(meanwhile) for step in steps]
        result = StepResult(tokens={}, failed={}, refused={})
        for step, batch in zip(steps, sampled, strict=True):
            self._take(step, batch, result)
        return result

    def _launch(self, scheduled: Step) -> LaunchedStep | None:
        """Starts a step; None if nobody samples in it."""
        batch, logits_SV = self._forward(scheduled, StepShape.of(scheduled))
        if logits_SV is None:
            return None
        slots_S = batch.sampling_slots_S
        rows = tuple(scheduled[b][0] for b in batch.sampling_B.tolist())
        # The device may still be at the forward: the host fills the masks meanwhile.
        masks = self._grammars.fill([running.matcher for running in rows]) if self._grammars is not None else None
        return LaunchedStep(
            rows=rows,
            slots_S=slots_S,
            lengths_S=batch.sampling_lengths_S,
            index_S=np.arange(len(rows)),
            sample=self._sampler.launch(logits_SV, slots_S, self._slots.num_outputs_N[slots_S], masks),
        )

    def _launch_ahead(self, step: LaunchedStep) -> LaunchedStep | None:
        """Starts the decode step that most likely follows `step`, whose tokens nobody has read yet; None where it would
        take more than a replay, or where what it samples depends on those tokens by way of the host."""
        if not self._runs_ahead or self._graphs is None:
            return None
        following = step.following(block_size=self._buffers.block_size, max_model_len=self._slots.max_model_len)
        if following is None:
            return None
        before, scheduled = following
        slots_S, lengths_S = before.slots_S, before.lengths_S
        if self._sampling.has_penalties[slots_S].any() or any(row.matcher is not None for row in before.rows):
            return None
        shape = StepShape(num_tokens=len(scheduled), num_seqs=len(scheduled), is_decode=True)
        if self._bucket(shape) is None:
            return None
        self._slots.foresee(slots_S, lengths_S)
        tokens_S = (before.sample.next_tokens_S, before.index_S)
        batch, logits_SV = self._forward(scheduled, shape, tokens_S)
        assert logits_SV is not None
        return LaunchedStep(
            rows=before.rows,
            slots_S=slots_S,
            lengths_S=batch.sampling_lengths_S,
            index_S=np.arange(len(scheduled)),
            sample=self._sampler.launch(logits_SV, slots_S, self._slots.num_outputs_N[slots_S] + 1),
        )

    def _take(self, step: LaunchedStep, batch: SampledBatch, result: StepResult) -> None:
        """Remembers what a step sampled, and adds it to the result."""
        index = step.index_S.tolist()
        token_ids = [batch.token_ids[row] for row in index]
        self._slots.append(step.slots_S, step.lengths_S, token_ids)
        for running, row, token_id in zip(step.rows, index, token_ids, strict=True):
            running.output_token_ids.append(token_id)
            refusal = _advance(running.matcher, token_id)
            if refusal is not None:
                result.refused[running.request_id] = refusal
            elif batch.is_valid[row]:
                logprobs = batch.logprobs[row] if batch.logprobs else None
                result.tokens[running.request_id] = SampledToken(token_id=token_id, logprobs=logprobs)
            else:
                result.failed[running.request_id] = "the model's logits are not numbers"

    def _give_slots(self, scheduled: Step) -> None:
        """Sees that every request of the step has a slot, a row for the sampler, and its blocks in the table."""
        step_ids: set[str] | None = None
        for running, part in scheduled:
            if running.slot is None:
                step_ids = step_ids or {other.request_id for other, _ in scheduled}
                slot = self._slots.acquire(running, step_request_ids=step_ids)
                self._sampling.assign(
                    slot,
                    running.request.sampling,
                    seed=running.seed,
                    prompt_token_ids=running.prompt_token_ids,
                    output_token_ids=np.array(running.output_token_ids, dtype=np.int64),
                )
            self._slots.set_blocks(running, part.block_ids)

    def _bucket(self, shape: StepShape) -> Bucket | None:
        """The decode bucket for a step; None where there is none."""
        assert self._graphs is not None
        choice = self._graphs.choose(tokens=shape.num_tokens, items=shape.num_seqs)
        return None if isinstance(choice, str) else choice

    def _forward(
        self, scheduled: Step, shape: StepShape, tokens_S: tuple[Tensor, NDArray[np.int64]] | None = None
    ) -> tuple[StepBatch, Tensor | None]:
        """The filled batch, and logits [S, V] of the sequences that sample; `None` if there are none. `tokens_S`: where
        the tokens of a decode step are, if they are on the device only, and which of them."""
        if self._graphs is not None:
            choice = self._graphs.choose(tokens=shape.num_tokens, items=shape.num_seqs, is_mixed=not shape.is_decode)
            if not isinstance(choice, str):
                padding = Padding(tokens=choice.tokens, is_mixed=choice.is_mixed, bucket=attention_bucket(choice))
                batch = fill_batch(self._buffers, self._slots, scheduled, shape, padding)
                if tokens_S is not None:
                    self._buffers.take_tokens(*tokens_S)
                embeds_TD = self._graphs.inputs(choice).embeds_TD
                if embeds_TD is not None:
                    embeds_TD.copy_(self._embed(batch))
                self._attention.plan(batch.attention)
                logits_SV = self._graphs.replay(choice, tokens=shape.num_tokens, items=shape.num_seqs)
                return batch, logits_SV[: len(batch.sampling_B)] if len(batch.sampling_B) else None
            self._graphs.count_miss(choice, items=shape.num_seqs)
        batch = fill_batch(self._buffers, self._slots, scheduled, shape)
        self._attention.plan(batch.attention)
        # Run again it stores the same keys and values in the same places.
        return batch, retry_on_empty_cache(partial(self._eager_logits, batch))

    def _eager_logits(self, batch: StepBatch) -> Tensor | None:
        embeds_TD = self._embed(batch)
        positions_3T = self._buffers.positions_3T.device[:, : batch.padded_tokens]
        num_sampling = len(batch.sampling_B)
        # Where nobody samples a row is computed that nobody reads.
        rows_S = self._buffers.logits_index_S.device[: max(1, num_sampling)]
        is_every_row = num_sampling == batch.padded_tokens
        hidden_SD = self._decoder.forward(embeds_TD, positions_3T, self._attention, None if is_every_row else rows_S)
        return self._decoder.logits(hidden_SD) if num_sampling else None

    def _embed(self, batch: StepBatch) -> Tensor:
        """Embeddings [T, D] of the step's tokens, with image rows in the places of placeholders."""
        embeds_TD = self._decoder.embed(self._buffers.token_ids_T.device[: batch.padded_tokens])
        for span in batch.image_spans:
            rows = self._store.rows(span.image_hash, span.row_start, span.row_end)
            embeds_TD[span.token_start : span.token_start + len(rows)] = rows
        return embeds_TD


def _advance(matcher: Matcher | None, token_id: int) -> str | None:
    """Takes a sampled token into the grammar; says why that cannot be."""
    if matcher is None:
        return None
    try:
        matcher.accept(token_id)
    except GrammarError as error:
        return f"the output cannot be kept within the grammar, which is too complex: {error}"
    return None
