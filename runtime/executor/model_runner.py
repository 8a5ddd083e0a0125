"""Obeys the scheduler: encodes, embeds, runs the decoder, samples. Decides nothing about who runs when.

One step: drop what ended or was evicted; encode the missing images; fill the inputs; embed and put image rows in their
places; replay a graph or run eager; sample (the step's one device-to-host copy); remember the tokens.

What goes wrong with one request's images ends that request alone, unless it leaves the device unusable. Anything else
is an error of the engine's.

Legend: T tokens of a step, S sequences that sample, D hidden width, V vocabulary.
"""

import logging
import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.device_errors import raise_if_device_lost
from runtime.executor.batch import Padding, Step, StepBatch, StepBuffers, StepShape, fill_batch
from runtime.executor.decoder_program import Decoder, DecoderInputs, DecoderProgram, attention_bucket
from runtime.executor.embedding_store import EmbeddingStore
from runtime.executor.encoder_runner import EncoderItem
from runtime.executor.grammar_masks import GrammarMasks
from runtime.executor.graphs import Bucket, GraphSet
from runtime.executor.request_slots import RequestSlots, RunningRequest
from runtime.executor.retry import retry_on_empty_cache
from runtime.executor.run_ahead import LaunchedStep
from runtime.executor.sampler import SampledBatch, Sampler
from runtime.executor.sampling_rows import SamplingRows
from runtime.model.attention import DecoderAttention
from runtime.processing.grammar import GrammarError, Matcher
from runtime.processing.positions import rope_positions
from runtime.request import Request
from runtime.scheduler.output import SampledToken, SchedulerOutput, StepResult

log = logging.getLogger(__name__)

Pixels = NDArray[np.uint8]


class ImageEncoder(Protocol):
    """Encodes images and stores their rows in the embedding store."""

    def encode(self, items: Sequence[EncoderItem]) -> None: ...


class ModelRunner:
    """Runs the steps of one engine on one device.

    Args:
        decoder, attention: the text model, and its attention over the KV cache.
        encoder, store: the vision side; the encoder writes to the store.
        buffers: the step's static inputs, large enough for every bucket.
        max_num_seqs: requests that a step may have.
        max_model_len: tokens that a request may reach.
        vocab_size: of the decoder's logits.
        pixels_per_token_side: side in pixels of the square that becomes one token.
        seed: of the requests that bring none.
        grammars: masks of the requests that bring a grammar; without it they are refused.
        runs_ahead: launch a decode step's successor before its tokens are read (`run_ahead`).
    """

    def __init__(
        self,
        *,
        decoder: Decoder,
        attention: DecoderAttention,
        encoder: ImageEncoder,
        store: EmbeddingStore,
        buffers: StepBuffers,
        max_num_seqs: int,
        max_model_len: int,
        vocab_size: int,
        pixels_per_token_side: int,
        seed: int,
        device: torch.device,
        grammars: GrammarMasks | None = None,
        runs_ahead: bool = False,
    ) -> None:
        self._decoder = decoder
        self._attention = attention
        self._encoder = encoder
        self._store = store
        self._buffers = buffers
        self._device = device
        self._pixels_per_token_side = pixels_per_token_side
        self._seeds = random.Random(seed)
        self._requests: dict[str, RunningRequest] = {}
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

    @property
    def serves_grammars(self) -> bool:
        """Whether requests may bring a grammar."""
        return self._grammars is not None

    def decoder_program(self, *, max_mixed_tokens: int) -> DecoderProgram:
        """What the decoder's graph set captures. `max_mixed_tokens`: of the largest mixed bucket, 0 without one."""
        return DecoderProgram(self._decoder, self._attention, self._buffers, max_mixed_tokens=max_mixed_tokens)

    def use_graphs(self, graphs: GraphSet[DecoderInputs]) -> None:
        """Replays `graphs`, captured or disabled, from now on, and counts hits and misses there."""
        self._graphs = graphs

    def add(self, request: Request, pixels: Sequence[Pixels]) -> None:
        """Keeps a request until `remove`, or until the scheduler says that it ended. An id that is in use is replaced:
        the scheduler took it anew before the end of the former request was told.

        Args:
            pixels: uint8 [height, width, 3], one for each of `request.images`.

        Raises:
            ValueError: the images and their pixels do not match, or a sampling parameter or the grammar cannot be
                served.
        """
        self._check(request, pixels)
        matcher = self._matcher(request.sampling.grammar)
        self.remove(request.request_id)
        positions_3P, next_position = rope_positions(
            len(request.prompt_token_ids), request.images, pixels_per_token_side=self._pixels_per_token_side
        )
        seed = request.sampling.seed
        self._requests[request.request_id] = RunningRequest(
            request=request,
            pixels=pixels,
            prompt_token_ids=np.array(request.prompt_token_ids, dtype=np.int64),
            positions_3P=positions_3P,
            next_position=next_position,
            seed=self._seeds.getrandbits(64) if seed is None else seed,
            matcher=matcher,
        )

    def remove(self, request_id: str) -> None:
        """Forgets a request; an unknown one is no error."""
        running = self._requests.pop(request_id, None)
        if running is not None:
            self._slots.release(running)
        if not self._requests:
            self._ahead = None  # it holds pixels

    @torch.inference_mode()
    def run(self, output: SchedulerOutput) -> StepResult:
        """Does one step. `failed` names the requests whose images could not be encoded, or whose logits were no
        numbers; they stay known until the scheduler says that they ended."""
        for request_id in output.finished_request_ids:
            self.remove(request_id)
        for image_hash in output.evicted_images:
            self._store.drop(image_hash)
        scheduled = [(self._requests[part.request_id], part) for part in output.requests]
        errors = self._encode_missing(output, scheduled)
        failed: dict[str, str] = {}
        if errors:
            failed = self._failures(scheduled, errors)
            scheduled = [(running, part) for running, part in scheduled if running.request_id not in failed]
        refused: dict[str, str] = {}
        tokens = self._run_decoder(scheduled, failed, refused) if scheduled else {}
        return StepResult(tokens=tokens, failed=failed, refused=refused)

    def _matcher(self, grammar: str | None) -> Matcher | None:
        if grammar is None:
            return None
        if self._grammars is None:
            raise ValueError("this engine serves no grammars: it knows the tokens of none")
        return self._grammars.matcher(grammar)

    def _check(self, request: Request, pixels: Sequence[Pixels]) -> None:
        if len(pixels) != len(request.images):
            raise ValueError(f"request has {len(request.images)} images, but pixels of {len(pixels)}")
        for index, (image, array) in enumerate(zip(request.images, pixels, strict=True)):
            if array.shape != (image.height, image.width, 3) or array.dtype != np.uint8:
                raise ValueError(
                    f"image {index} is {image.height} x {image.width} pixels, but its pixels are "
                    f"{array.dtype} {list(array.shape)}"
                )
            side = self._pixels_per_token_side
            if image.height % side or image.width % side:
                raise ValueError(f"image {index} is {image.height} x {image.width} pixels, no multiples of {side}")
            num_tokens = (image.height // side) * (image.width // side)
            if image.placeholder.length != num_tokens:
                raise ValueError(f"image {index} has {image.placeholder.length} tokens; its size makes {num_tokens}")
        self._sampling.check(request.sampling)

    def _encode_missing(self, output: SchedulerOutput, scheduled: Step) -> dict[bytes, str]:
        """Encodes what the scheduler asks for, and what its tokens need and the store lost. Gives what went wrong, by
        digest."""
        pixels_by_hash: dict[bytes, Pixels] = {}
        for planned in output.images:
            pixels_by_hash[planned.image_hash] = self._requests[planned.request_id].pixels[planned.image_index]
        needed: set[bytes] = set()
        for running, part in scheduled:
            start = part.num_computed_tokens
            for index, image in running.images_within(start, start + part.num_scheduled_tokens):
                needed.add(image.image_hash)
                if image.image_hash not in self._store and image.image_hash not in pixels_by_hash:
                    log.warning("an embedding is gone and is computed again", extra={"request_id": running.request_id})
                    pixels_by_hash[image.image_hash] = running.pixels[index]
        missing = [
            EncoderItem(image_hash=image_hash, pixels=pixels)
            for image_hash, pixels in pixels_by_hash.items()
            if image_hash not in self._store
        ]
        if not missing:
            return {}
        needed.update(pixels_by_hash)
        num_missing_tokens = sum(self._num_tokens(item.pixels) for item in missing)
        if num_missing_tokens > self._store.num_free_tokens:
            # The scheduler accounts for the same rows, so this follows only on a recomputation. What is dropped here
            # beyond its accounts is computed again when it is needed.
            self._store.keep_only(needed)
        try:
            self._encoder.encode(missing)
        except Exception as error:
            raise_if_device_lost(error)
            log.exception("encoding failed; each image is tried alone", extra={"images": len(missing)})
            return self._encode_one_by_one(missing)
        return {}

    def _encode_one_by_one(self, items: Sequence[EncoderItem]) -> dict[bytes, str]:
        errors: dict[bytes, str] = {}
        for item in items:
            if item.image_hash in self._store:
                continue
            try:
                self._encoder.encode([item])
            except Exception as error:
                raise_if_device_lost(error)
                log.exception("an image could not be encoded")
                errors[item.image_hash] = f"{type(error).__name__}: {error}"
        return errors

    def _failures(self, scheduled: Step, errors: Mapping[bytes, str]) -> dict[str, str]:
        failed: dict[str, str] = {}
        for running, part in scheduled:
            start = part.num_computed_tokens
            for index, image in running.images_within(start, start + part.num_scheduled_tokens):
                if image.image_hash in errors:
                    failed[running.request_id] = f"image {index} could not be encoded: {errors[image.image_hash]}"
                    break
        return failed

    def _run_decoder(self, scheduled: Step, failed: dict[str, str], refused: dict[str, str]) -> dict[str, SampledToken]:
        """Tokens by request; adds to `failed` where the logits are no numbers, to `refused` where a grammar is at its
        limits."""
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
        tokens: dict[str, SampledToken] = {}
        for step, batch in zip(steps, sampled, strict=True):
            self._take(step, batch, tokens, failed, refused)
        return tokens

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

    def _take(
        self,
        step: LaunchedStep,
        batch: SampledBatch,
        tokens: dict[str, SampledToken],
        failed: dict[str, str],
        refused: dict[str, str],
    ) -> None:
        """Remembers what a step sampled."""
        index = step.index_S.tolist()
        token_ids = [batch.token_ids[row] for row in index]
        self._slots.append(step.slots_S, step.lengths_S, token_ids)
        for running, row, token_id in zip(step.rows, index, token_ids, strict=True):
            running.output_token_ids.append(token_id)
            refusal = _advance(running.matcher, token_id)
            if refusal is not None:
                refused[running.request_id] = refusal
            elif batch.is_valid[row]:
                logprobs = batch.logprobs[row] if batch.logprobs else None
                tokens[running.request_id] = SampledToken(token_id=token_id, logprobs=logprobs)
            else:
                failed[running.request_id] = "the model's logits are not numbers"

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
        hidden_TD = self._decoder.forward(embeds_TD, positions_3T, self._attention)
        num_sampling = len(batch.sampling_B)
        if num_sampling == 0:
            return None
        if num_sampling < batch.padded_tokens:
            hidden_TD = hidden_TD.index_select(0, self._buffers.logits_index_S.device[:num_sampling])
        return self._decoder.logits(hidden_TD)

    def _embed(self, batch: StepBatch) -> Tensor:
        """Embeddings [T, D] of the step's tokens, with image rows in the places of placeholders."""
        embeds_TD = self._decoder.embed(self._buffers.token_ids_T.device[: batch.padded_tokens])
        for span in batch.image_spans:
            rows = self._store.rows(span.image_hash, span.row_start, span.row_end)
            embeds_TD[span.token_start : span.token_start + len(rows)] = rows
        return embeds_TD

    def _num_tokens(self, pixels: Pixels) -> int:
        height, width = pixels.shape[:2]
        return int(height * width) // self._pixels_per_token_side**2


def _advance(matcher: Matcher | None, token_id: int) -> str | None:
    """Takes a sampled token into the grammar; says why that cannot be."""
    if matcher is None:
        return None
    try:
        matcher.accept(token_id)
    except GrammarError as error:
        return f"the output cannot be kept within the grammar, which is too complex: {error}"
    return None
