"""Obeys the scheduler: keeps requests, encodes their images, has the decoder run. Decides nothing about who runs when.

One step: drop what ended or was evicted; encode the missing images; run the decoder (`decoder_runner`).

What goes wrong with one request's images ends that request alone, unless it leaves the device unusable. Anything else
is an error of the engine's.
"""

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.device_errors import raise_if_device_lost
from runtime.executor.batch import Step, StepBuffers
from runtime.executor.decoder_program import Decoder, DecoderInputs, DecoderProgram
from runtime.executor.decoder_runner import DecoderRunner
from runtime.executor.embedding_store import EmbeddingStore
from runtime.executor.encoder_runner import EncoderItem
from runtime.executor.grammar_masks import GrammarMasks
from runtime.executor.graphs import GraphSet
from runtime.executor.request_slots import RunningRequest
from runtime.model.attention import DecoderAttention
from runtime.processing.grammar import Matcher
from runtime.processing.positions import rope_positions
from runtime.request import Request
from runtime.scheduler.output import SchedulerOutput, StepResult

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
        self._encoder = encoder
        self._store = store
        self._pixels_per_token_side = pixels_per_token_side
        self._seeds = random.Random(seed)
        self._requests: dict[str, RunningRequest] = {}
        self._grammars = grammars
        self._decoder = DecoderRunner(
            decoder=decoder,
            attention=attention,
            store=store,
            buffers=buffers,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            device=device,
            grammars=grammars,
            runs_ahead=runs_ahead,
        )

    @property
    def static_bytes(self) -> int:
        """Bytes on the device of step inputs, sampling rows and masks; where it is the CPU, of the slots too."""
        return self._decoder.static_bytes

    @property
    def serves_grammars(self) -> bool:
        """Whether requests may bring a grammar."""
        return self._grammars is not None

    def decoder_program(self, *, max_mixed_tokens: int) -> DecoderProgram:
        """What the decoder's graph set captures. `max_mixed_tokens`: of the largest mixed bucket, 0 without one."""
        return self._decoder.program(max_mixed_tokens=max_mixed_tokens)

    def use_graphs(self, graphs: GraphSet[DecoderInputs]) -> None:
        """Replays `graphs`, captured or disabled, from now on, and counts hits and misses there."""
        self._decoder.use_graphs(graphs)

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
            self._decoder.release(running)
        if not self._requests:
            self._decoder.forget_ahead()

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
        if not scheduled:
            return StepResult(tokens={}, failed=failed)
        result = self._decoder.run(scheduled)
        return replace(result, failed=failed | result.failed) if failed else result

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
        self._decoder.check(request.sampling)

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

    def _num_tokens(self, pixels: Pixels) -> int:
        height, width = pixels.shape[:2]
        return int(height * width) // self._pixels_per_token_side**2
