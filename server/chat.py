"""One request's life between the wire and the engine: checks, prompt, engine requests, and one stream of chunks.

Knows no HTTP. Streaming prints the chunks, not streaming folds them: there is one generator for both.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.client import EngineClient
from runtime.processing.detokenizer import Detokenizer
from runtime.processing.tokenizer import Tokenizer
from runtime.processing.tool_call_parser import ToolCallParser
from runtime.request import Request, RequestOutput
from server.answer_format import AnswerFormat, answer_format, call_tokens
from server.api_keys import join_salts, salted
from server.byte_budget import Hold
from server.completion import Chunk, Usage, logprob_entries
from server.errors import (
    ApiError,
    InternalServerError,
    InvalidRequestError,
    ModelNotFoundError,
    QueueFullError,
    context_length,
)
from server.grammar_checker import GrammarChecker
from server.metrics import Metrics
from server.prompts import MESSAGES, PreparedPrompt, PromptField, PromptPreparer
from server.sampling import SamplingDefaults, sampling_params
from server.schemas import ChatCompletionRequest, SamplingFields
from server.settings import Settings
from server.text_completion import TextCompletionRequest
from server.tool_calls import call_deltas

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A checked request, ready for the engine.

    `arrival` is `time.perf_counter()`. `requests` are its choices: `choices_per_prompt` for each prompt, prompt by
    prompt, all with the same `pixels`. `prompt_field` is where the prompt stands on the wire.
    """

    completion_id: str
    created: int
    model: str
    arrival: float
    pixels: tuple[NDArray[np.uint8], ...]
    requests: tuple[Request, ...]
    stop: tuple[str, ...]
    usage: Usage
    choices_per_prompt: int
    prompt_field: str
    answer: AnswerFormat


@dataclass(frozen=True, kw_only=True)
class ModelSide:
    """What the server knows of the model, loaded while the engine starts."""

    prompts: PromptPreparer
    sampling_defaults: SamplingDefaults
    grammars: GrammarChecker


class ChatService:
    """Turns requests into chunks. `model_side` is set once it is loaded; before that no request comes this far."""

    def __init__(self, client: EngineClient, settings: Settings, metrics: Metrics) -> None:
        self.model_side: ModelSide | None = None
        self._client = client
        self._settings = settings
        self._metrics = metrics
        self._num_waiting = 0

    def check_model(self, name: str) -> None:
        """
        Raises:
            ModelNotFoundError: no model of this name is served here.
        """
        if name not in self._settings.model_names:
            raise ModelNotFoundError(name, self._settings.model_names)

    def admit(self, num_choices: int) -> "Admission":
        """Takes places in the queue, which are held until the first tokens come.

        Raises:
            QueueFullError: there are not enough.
        """
        if self._num_waiting + num_choices > self._settings.max_queue_len:
            raise QueueFullError(self._settings.max_queue_len)
        return Admission(self, num_choices)

    async def prepare(
        self,
        request: ChatCompletionRequest,
        *,
        completion_id: str,
        arrival: float,
        hold: Hold,
        key_salt: str = "",
        field: PromptField = MESSAGES,
    ) -> Generation:
        """Everything that can be wrong with a request is found here, before the engine is asked.

        Args:
            hold: counts the pictures.
            key_salt: parts the caches of one API key from those of others.
            field: where in the wire's request the messages stood.

        Raises:
            ApiError: the request cannot be served; says why.
        """
        side = self._model_side
        special_tokens = call_tokens(side.prompts.tokenizer.added_ids)
        answer = answer_format(request, has_call_tokens=bool(special_tokens))
        if answer.grammar is not None:
            param = field.format_name if answer.param == MESSAGES.format_name else answer.param
            await side.grammars.check(answer.grammar, special_tokens=special_tokens, param=param)
        prompt = await side.prompts.prepare(request.messages, field, tools=answer.tools, hold=hold)
        return self._generation(request, [prompt], answer, completion_id, arrival, key_salt, field.name)

    async def prepare_text(
        self, request: TextCompletionRequest, *, completion_id: str, arrival: float, key_salt: str = ""
    ) -> Generation:
        """The same for prompts that are text or tokens.

        Raises:
            ApiError: the request cannot be served; says why.
        """
        prompts = [await self._model_side.prompts.prepare_text(prompt) for prompt in request.prompts]
        return self._generation(request, prompts, AnswerFormat(), completion_id, arrival, key_salt, "prompt")

    @property
    def _model_side(self) -> ModelSide:
        assert self.model_side is not None, "requests come only once the service is ready"
        return self.model_side

    def _generation(
        self,
        request: SamplingFields,
        prompts: Sequence[PreparedPrompt],
        answer: AnswerFormat,
        completion_id: str,
        arrival: float,
        key_salt: str,
        prompt_field: str,
    ) -> Generation:
        side, info = self._model_side, self._client.info
        assert info is not None, "requests come only once the engine is ready"
        now = time.time()
        max_tokens = request.requested_max_tokens
        cache_salt = join_salts(key_salt, request.cache_salt or "")
        requests: list[Request] = []
        for prompt in prompts:
            num_prompt_tokens = len(prompt.token_ids)
            room = info.max_model_len - num_prompt_tokens
            if room < 1:
                raise context_length(info.max_model_len, num_prompt_tokens, None, param=prompt_field)
            if max_tokens is not None and max_tokens > room:
                raise context_length(info.max_model_len, num_prompt_tokens, max_tokens, param=prompt_field)
            images = tuple(salted(image, cache_salt) for image in prompt.images)
            for index in range(request.choices_per_prompt):
                sampling = sampling_params(
                    request,
                    side.sampling_defaults,
                    index=index,
                    max_tokens=max_tokens or min(room, request.default_max_tokens or room),
                    vocab_size=side.prompts.tokenizer.vocab_size,
                    grammar=answer.grammar,
                )
                requests.append(
                    Request(
                        request_id=f"{completion_id}-{len(requests)}",
                        prompt_token_ids=prompt.token_ids,
                        images=images,
                        sampling=sampling,
                        arrival_time=now,
                        cache_salt=cache_salt,
                    )
                )
        self._metrics.preprocess_time.observe(time.perf_counter() - arrival)
        return Generation(
            completion_id=completion_id,
            created=int(now),
            model=self._settings.model_names[0],
            arrival=arrival,
            pixels=prompts[0].pixels,
            requests=tuple(requests),
            stop=request.stop_strings,
            usage=Usage(
                prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts),
                image_tokens=sum(prompt.num_image_tokens for prompt in prompts),
            ),
            choices_per_prompt=request.choices_per_prompt,
            prompt_field=prompt_field,
            answer=answer,
        )

    async def chunks(self, generation: Generation, admission: "Admission") -> AsyncGenerator[Chunk, None]:
        """The chunks of all choices as they come. Closing the generator aborts what still runs in the engine.

        Raises:
            EngineDeadError: the engine died on the way.
            ApiError: the engine could not run the request.
        """
        metrics = self._metrics
        metrics.prompt_tokens.inc(generation.usage.prompt_tokens)
        metrics.image_tokens.inc(generation.usage.image_tokens)
        metrics.request_prompt_tokens.observe(generation.usage.prompt_tokens)
        metrics.request_max_tokens.observe(generation.requests[0].sampling.max_tokens)
        choices = [self._choice(generation, index, admission) for index in range(len(generation.requests))]
        # A single choice, the usual case, needs no tasks.
        merged = choices[0] if len(choices) == 1 else _merge(choices)
        async with aclosing(merged):
            async for chunk in merged:
                yield chunk
        metrics.cached_tokens.inc(generation.usage.cached_tokens)
        metrics.e2e_latency.observe(time.perf_counter() - generation.arrival)

    async def _choice(self, generation: Generation, index: int, admission: "Admission") -> AsyncGenerator[Chunk, None]:
        """The chunks of one choice, and its metrics, which are flushed once at the end."""
        assert self.model_side is not None
        request = generation.requests[index]
        reader = ChoiceReader(index, request, self.model_side.prompts.tokenizer, generation)
        gaps: list[float] = []
        last_time: float | None = None
        finish_reason = "abort"
        output: RequestOutput | None = None
        outputs = self._client.generate(request, generation.pixels)
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    if output.finish_reason in ("error", "abort"):
                        finish_reason = output.finish_reason
                        raise engine_refusal(output, generation.prompt_field)
                    if output.new_token_ids:
                        now = time.perf_counter()
                        if last_time is None:
                            admission.leave_queue()
                            self._metrics.time_to_first_token.observe(now - generation.arrival)
                        else:
                            gaps.append(now - last_time)
                        last_time = now
                    chunk = reader.read(output)
                    if chunk.finish_reason is not None:
                        finish_reason = chunk.finish_reason
                        yield chunk
                        return
                    if chunk.text or chunk.logprobs or chunk.calls:
                        yield chunk
            # The engine's promise is a last output with a reason.
            finish_reason = "error"
            logger.error("the engine's outputs ended without a finish reason", extra={"request": request.request_id})
            raise InternalServerError()
        finally:
            if last_time is None:
                admission.leave_queue()
            self._record(reader.num_tokens, gaps, finish_reason, output, request)

    def _record(
        self, num_tokens: int, gaps: Sequence[float], finish_reason: str, last: RequestOutput | None, request: Request
    ) -> None:
        metrics = self._metrics
        metrics.finished[finish_reason].inc()
        metrics.generation_tokens.inc(num_tokens)
        metrics.request_generation_tokens.observe(num_tokens)
        metrics.inter_token_latency.observe_many(gaps)
        if last is not None and last.scheduled_time is not None:
            now = time.time()
            metrics.queue_time.observe(max(0.0, last.scheduled_time - request.arrival_time))
            metrics.inference_time.observe(max(0.0, now - last.scheduled_time))
            if last.first_token_time is not None:
                metrics.prefill_time.observe(max(0.0, last.first_token_time - last.scheduled_time))
                metrics.decode_time.observe(max(0.0, now - last.first_token_time))
        if num_tokens > 1:
            metrics.time_per_output_token.observe(sum(gaps) / (num_tokens - 1))


class ChoiceReader:
    """Reads one choice's outputs into chunks: text without stop strings, calls of tools, log-probabilities, the end."""

    def __init__(self, index: int, request: Request, tokenizer: Tokenizer, generation: Generation) -> None:
        self.num_tokens = 0
        self._index = index
        self._prompt = index // generation.choices_per_prompt
        self._num_top = request.sampling.num_logprobs
        self._tokenizer = tokenizer
        answer = generation.answer
        shown = call_tokens(tokenizer.added_ids) if answer.may_call else ()
        self._detokenizer = Detokenizer(tokenizer, generation.stop, shown=shown)
        self._parser = ToolCallParser(only_calls=answer.only_calls) if answer.may_call else None
        self._is_legacy = answer.is_legacy
        self._usage = generation.usage

    def read(self, output: RequestOutput) -> Chunk:
        """One output as a chunk, which is empty while all text is held back."""
        text = self._detokenizer.push(output.new_token_ids)
        num_new = self._detokenizer.num_tokens - self.num_tokens
        self.num_tokens += num_new
        self._usage.completion_tokens += num_new
        logprobs = None
        if self._num_top is not None and output.logprobs is not None:
            token_ids, found = output.new_token_ids[:num_new], output.logprobs[:num_new]
            logprobs = logprob_entries(token_ids, found, self._tokenizer, self._num_top)
        finish_reason: str | None = output.finish_reason
        if self._detokenizer.stopped is not None:
            finish_reason = "stop"
        elif finish_reason is not None:
            text += self._detokenizer.finish()
        if finish_reason is not None:
            self._usage.count_cached(self._prompt, output.num_cached_tokens)
        if self._parser is None:
            return Chunk(self._index, text, logprobs, finish_reason)
        reading = self._parser.push(text)
        text, pieces = reading.text, reading.calls
        if finish_reason is not None:
            if finish_reason == "stop" and self._parser.num_calls and not self._parser.is_in_call:
                finish_reason = "function_call" if self._is_legacy else "tool_calls"
            rest = self._parser.finish()
            text, pieces = text + rest.text, pieces + rest.calls
        calls = call_deltas(pieces, is_legacy=self._is_legacy)
        return Chunk(self._index, text, logprobs, finish_reason, calls)


class Admission:
    """Places of one request in the queue, one a choice. `leave_queue` gives one back."""

    def __init__(self, service: ChatService, num_places: int) -> None:
        self._service = service
        self._num_places = num_places
        service._num_waiting += num_places

    def leave_queue(self) -> None:
        assert self._num_places > 0, "a choice left the queue twice"
        self._num_places -= 1
        self._service._num_waiting -= 1

    def close(self) -> None:
        """Gives back what is left."""
        self._service._num_waiting -= self._num_places
        self._num_places = 0


def engine_refusal(output: RequestOutput, prompt_field: str) -> ApiError:
    """The error of a request that the engine would not or could not run. Why it could not stays in the log; why it
    would not is meant for people."""
    if output.is_rejected:
        message = output.error or "the request can never be served"
        return InvalidRequestError(f"The engine refused the request: {message}.", param=prompt_field)
    logger.error("the engine failed a request: %s", output.error, extra={"request": output.request_id})
    return InternalServerError()


async def _merge(choices: Sequence[AsyncGenerator[Chunk, None]]) -> AsyncGenerator[Chunk, None]:
    """Chunks of several choices in the order in which they come; the first error ends all."""
    queue: asyncio.Queue[Chunk | BaseException | None] = asyncio.Queue()

    async def pump(choice: AsyncGenerator[Chunk, None]) -> None:
        try:
            async with aclosing(choice):
                async for chunk in choice:
                    queue.put_nowait(chunk)
        except Exception as error:
            queue.put_nowait(error)
        else:
            queue.put_nowait(None)

    tasks = [asyncio.create_task(pump(choice)) for choice in choices]
    num_running = len(tasks)
    try:
        while num_running:
            item = await queue.get()
            if isinstance(item, Chunk):
                yield item
            elif item is None:
                num_running -= 1
            else:
                raise item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # Errors that nobody took would hold the queue that holds them, and with it the request.
        while not queue.empty():
            queue.get_nowait()
