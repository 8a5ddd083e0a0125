"""The engine without a server: requests in, answers out, in this process.

    engine = OfflineEngine(EngineConfig(model="demo"))
    answers = engine.generate([engine.chat([{"role": "user", "content": "Hello"}], max_tokens=16)])

Knows requests, pictures and times; the engine behind it is the server's own. Pictures are resized and hashed by a few
threads ahead of their turn, as the server does it in processes. What is ready counts in the memory plan's `requests`
from the moment that it is begun; each thread holds one picture in its own size beside it.
"""

import itertools
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from runtime.checkpoint import locate_model, read_model_config, read_processor_config
from runtime.config import EngineConfig, ResolvedConfig, resolve_config
from runtime.encoder_engine import EncoderEngine
from runtime.processing.image_processor import as_seen, image_hash, resize, smart_resize
from runtime.processing.prompt import PromptBuilder
from runtime.request import FinishReason, ImageInput, PlaceholderRange, Request, SamplingParams, TokenLogprobs
from runtime.request_budget import RequestBudget, planned_bytes
from runtime.startup import build
from runtime.stats import EngineInfo, EngineStats

# Pictures are made ready by so many threads: Pillow and hashlib let go of the interpreter's lock.
NUM_IMAGE_THREADS = 2

Picture = Image.Image | NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class OfflineRequest:
    """One request. `prompt_token_ids` holds one `image_token_id` for each of `images`, where its tokens shall be.

    An image is a Pillow image, or uint8 [height, width, 3]. `abort_after_tokens`: the request is aborted once its
    answer has so many tokens, as if its client left; with 0, as soon as it is in the engine.
    """

    prompt_token_ids: Sequence[int]
    images: Sequence[Picture] = ()
    sampling: SamplingParams
    abort_after_tokens: int | None = None


@dataclass(kw_only=True)
class Answer:
    """What became of one request; times are `time.perf_counter()` seconds. `error` says why it has no answer."""

    num_prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    start: float = 0.0
    token_times: list[float] = field(default_factory=list)

    @property
    def first_token_seconds(self) -> float | None:
        """From the request's start to its first token."""
        return self.token_times[0] - self.start if self.token_times else None

    @property
    def gap_seconds(self) -> list[float]:
        """Between neighbouring tokens."""
        return [later - earlier for earlier, later in itertools.pairwise(self.token_times)]


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    """A request as the engine takes it."""

    request: Request
    pixels: list[NDArray[np.uint8]]
    abort_after_tokens: int | None


@dataclass(frozen=True, kw_only=True)
class _Running:
    """A request in the engine."""

    answer: Answer
    abort_after_tokens: int | None

    @property
    def must_abort(self) -> bool:
        return self.abort_after_tokens is not None and len(self.answer.token_ids) >= self.abort_after_tokens


class OfflineEngine:
    """One engine in this process."""

    def __init__(self, config: EngineConfig) -> None:
        """Starts the engine.

        Raises:
            ConfigError, CheckpointError: as `runtime.startup.build_engine`.
        """
        self._directory = locate_model(config.model, config.revision)
        self.model_config = read_model_config(self._directory)
        self._resolved = resolve_config(config, self.model_config, read_processor_config(self._directory))
        self._engine = build(config)
        self._prompts: PromptBuilder | None = None
        self._numbers = itertools.count()

    @property
    def info(self) -> EngineInfo:
        """What the engine says of itself: plan, graphs, phases of the start."""
        return self._engine.info

    @property
    def config(self) -> ResolvedConfig:
        """The configuration with nothing left open."""
        return self._resolved

    def stats(self) -> EngineStats:
        """A snapshot of everything that is counted."""
        return self._engine.stats()

    def chat(
        self, messages: Sequence[Mapping[str, Any]], images: Sequence[Picture] = (), **sampling: Any
    ) -> OfflineRequest:
        """A request from messages, with `{"type": "image"}` parts where the images stand, through the chat template.

        Args:
            sampling: fields of `SamplingParams`; `max_tokens` is needed.

        Raises:
            ChatTemplateError: the template refuses the messages.
        """
        if self._prompts is None:
            self._prompts = PromptBuilder.from_checkpoint(self._directory)
        # One token an image: `generate` knows their sizes after resizing.
        side = self.model_config.vision.pixels_per_token_side
        prompt = self._prompts.build(messages, [(side, side)] * len(images))
        return OfflineRequest(prompt_token_ids=prompt.token_ids, images=images, sampling=SamplingParams(**sampling))

    def text(self, answer: Answer) -> str:
        """An answer's text."""
        if self._prompts is None:
            self._prompts = PromptBuilder.from_checkpoint(self._directory)
        return self._prompts.tokenizer.decode(answer.token_ids)

    def generate(self, requests: Iterable[OfflineRequest], *, concurrency: int | None = None) -> list[Answer]:
        """Answers to all requests, in their order.

        Args:
            concurrency: requests in the engine at a time; by default as many as `max_num_seqs`. Fewer while their
                pictures hold all that the memory plan has for them.

        Raises:
            ValueError: the number of images is not the number of image tokens, or a picture is too long and thin.
        """
        limit = concurrency or self._resolved.engine.max_num_seqs
        answers: list[Answer] = []
        running: dict[str, _Running] = {}
        budget = RequestBudget(self.info.max_request_bytes)
        with ThreadPoolExecutor(NUM_IMAGE_THREADS, thread_name_prefix="images") as pool:
            ahead = _LookAhead(self, pool, requests, budget, depth=limit + NUM_IMAGE_THREADS)
            while running or ahead.has_more:
                while len(running) < limit and (prepared := ahead.next()) is not None:
                    request_id = prepared.request.request_id
                    answer = Answer(num_prompt_tokens=len(prepared.request.prompt_token_ids), start=time.perf_counter())
                    answers.append(answer)
                    if self._add(prepared, answer):
                        one = _Running(answer=answer, abort_after_tokens=prepared.abort_after_tokens)
                        running[request_id] = one
                    else:
                        budget.release(request_id)
                before = list(running)
                self._abort_those_that_leave(running)
                self._step(running)
                for request_id in before:
                    if request_id not in running:
                        budget.release(request_id)
        return answers

    def encode(self, images: Sequence[Picture]) -> list[Tensor]:
        """Rows [T, D] of each image, on the host in float32. The engine must have been started with `mm_encoder_only`.

        Raises:
            ValueError: it was not, or an image cannot be served.
        """
        if not isinstance(self._engine, EncoderEngine):
            raise ValueError("encode needs an engine that was started with mm_encoder_only")
        return self._engine.embed([self._pixels(image) for image in images])

    def _add(self, prepared: _Prepared, answer: Answer) -> bool:
        try:
            self._engine.add(prepared.request, prepared.pixels)
        except ValueError as error:
            answer.finish_reason, answer.error = "error", str(error)
            return False
        return True

    def _abort_those_that_leave(self, running: dict[str, _Running]) -> None:
        for request_id in [request_id for request_id, one in running.items() if one.must_abort]:
            self._engine.abort(request_id)
            running.pop(request_id).answer.finish_reason = "abort"

    def _step(self, running: dict[str, _Running]) -> None:
        outputs = self._engine.step()
        now = time.perf_counter()
        for output in outputs:
            answer = running[output.request_id].answer
            answer.token_ids += output.new_token_ids
            answer.logprobs += output.logprobs or []
            answer.token_times += [now] * len(output.new_token_ids)
            if output.finish_reason is not None:
                answer.finish_reason, answer.error = output.finish_reason, output.error
                del running[output.request_id]

    def planned_bytes(self, offline: OfflineRequest) -> int:
        """What the request will hold of the engine's memory.

        Raises:
            ValueError: the number of images is not the number of image tokens, or a picture is too long and thin.
        """
        num_markers = list(offline.prompt_token_ids).count(self.model_config.image_token_id)
        if num_markers != len(offline.images):
            raise ValueError(f"the prompt has {num_markers} image tokens for {len(offline.images)} images")
        sizes = [self._size(image) for image in offline.images]
        num_pixels = sum(height * width for height, width in sizes)
        num_image_tokens = num_pixels // self.model_config.vision.pixels_per_token_side**2
        num_prompt_tokens = len(offline.prompt_token_ids) - num_markers + num_image_tokens
        return planned_bytes(3 * num_pixels, num_prompt_tokens, offline.sampling)

    def prepare(self, request_id: str, offline: OfflineRequest) -> _Prepared:
        """Resizes and hashes the images, and gives each its tokens."""
        image_token_id = self.model_config.image_token_id
        side = self.model_config.vision.pixels_per_token_side
        pixels = [self._pixels(image) for image in offline.images]
        token_ids: list[int] = []
        images: list[ImageInput] = []
        for token_id in offline.prompt_token_ids:
            if token_id != image_token_id:
                token_ids.append(token_id)
                continue
            own = pixels[len(images)]
            height, width = own.shape[:2]
            placeholder = PlaceholderRange(len(token_ids), height * width // side**2)
            images.append(ImageInput(image_hash=image_hash(own), height=height, width=width, placeholder=placeholder))
            token_ids += [image_token_id] * placeholder.length
        return _Prepared(
            request=Request(
                request_id=request_id,
                prompt_token_ids=token_ids,
                images=tuple(images),
                sampling=offline.sampling,
                arrival_time=time.time(),
            ),
            pixels=pixels,
            abort_after_tokens=offline.abort_after_tokens,
        )

    def new_request_id(self) -> str:
        """One that no other request of this engine has."""
        return f"offline-{next(self._numbers)}"

    def _size(self, image: Picture) -> tuple[int, int]:
        """Height and width of the image as the encoder takes it, or the other way round if it lies on its side."""
        if isinstance(image, Image.Image):
            width, height = image.size
        else:
            height, width = image.shape[:2]
        return smart_resize(height, width, **self._bounds)

    def _pixels(self, image: Picture) -> NDArray[np.uint8]:
        """The image as the encoder takes it, and as people see it."""
        picture = image if isinstance(image, Image.Image) else Image.fromarray(image)
        return resize(as_seen(picture), **self._bounds)

    @property
    def _bounds(self) -> dict[str, int]:
        return {
            "factor": self.model_config.vision.pixels_per_token_side,
            "min_pixels": self._resolved.min_pixels,
            "max_pixels": self._resolved.max_pixels,
        }


class _LookAhead:
    """Requests made ready ahead of their turn, in order: `depth` of them under way or ready at most, and fewer while
    they and those in the engine hold all that `budget` has."""

    def __init__(
        self,
        engine: OfflineEngine,
        pool: ThreadPoolExecutor,
        requests: Iterable[OfflineRequest],
        budget: RequestBudget,
        *,
        depth: int,
    ) -> None:
        self._engine = engine
        self._pool = pool
        self._source = iter(requests)
        self._budget = budget
        self._depth = depth
        self._begun: deque[Future[_Prepared]] = deque()
        # The caller's next one, while there is no room for it.
        self._upcoming = next(self._source, None)

    @property
    def has_more(self) -> bool:
        return bool(self._begun) or self._upcoming is not None

    def next(self) -> _Prepared | None:
        """The next one; None if there is none, or no room for it yet."""
        while self._upcoming is not None and len(self._begun) < self._depth and self._begin(self._upcoming):
            self._upcoming = next(self._source, None)
        return self._begun.popleft().result() if self._begun else None

    def _begin(self, request: OfflineRequest) -> bool:
        request_id = self._engine.new_request_id()
        if not self._budget.take(request_id, self._engine.planned_bytes(request)):
            return False
        self._begun.append(self._pool.submit(self._engine.prepare, request_id, request))
        return True
