"""The completion APIs as the exchange sees them: how each one's request is read, prepared and answered.

All share one generator of chunks; a dialect only says in which words they are printed or folded.
"""

from typing import Protocol, TypeVar

from server.byte_budget import Hold
from server.chat import ChatService, Generation
from server.completion import Chunk, Fold
from server.response_events import ResponseFold, ResponseObject, ResponsePrinter
from server.responses import ResponsesRequest
from server.schemas import ChatCompletionRequest, CompletionFields, SamplingFields
from server.sse import ChunkPrinter, error_event
from server.text_completion import TextCompletionRequest, TextFold, TextPrinter


class StreamPrinter(Protocol):
    """Chunks to events. `error` makes the last event of a stream that failed from an error's JSON document."""

    def start(self) -> bytes: ...
    def chunk(self, chunk: Chunk) -> bytes: ...
    def end(self) -> bytes: ...
    def error(self, body: bytes) -> bytes: ...


class AnswerFold(Protocol):
    """Chunks to the one document of an answer that is not streamed."""

    def add(self, chunk: Chunk) -> None: ...
    def body(self) -> bytes: ...


RequestT = TypeVar("RequestT", bound=CompletionFields)


class Dialect(Protocol[RequestT]):
    """One completion API. `prepare` raises `ApiError` for all that can be wrong with a request; `hold` counts what it
    makes of it."""

    @property
    def request_type(self) -> type[RequestT]: ...
    @property
    def id_prefix(self) -> str: ...
    async def prepare(
        self, service: ChatService, request: RequestT, *, completion_id: str, arrival: float, key_salt: str, hold: Hold
    ) -> Generation: ...
    def printer(self, request: RequestT, generation: Generation) -> StreamPrinter: ...
    def fold(self, request: RequestT, generation: Generation) -> AnswerFold: ...


class ChatDialect:
    """/v1/chat/completions."""

    request_type = ChatCompletionRequest
    id_prefix = "chatcmpl-"

    async def prepare(
        self,
        service: ChatService,
        request: ChatCompletionRequest,
        *,
        completion_id: str,
        arrival: float,
        key_salt: str,
        hold: Hold,
    ) -> Generation:
        return await service.prepare(
            request, completion_id=completion_id, arrival=arrival, key_salt=key_salt, hold=hold
        )

    def printer(self, request: ChatCompletionRequest, generation: Generation) -> StreamPrinter:
        has_usage, continuous_usage = usage_options(request)
        return ChatPrinter(
            ChunkPrinter(
                completion_id=generation.completion_id,
                created=generation.created,
                model=generation.model,
                usage=generation.usage if has_usage else None,
                continuous_usage=continuous_usage,
            ),
            len(generation.requests),
        )

    def fold(self, request: ChatCompletionRequest, generation: Generation) -> AnswerFold:
        return ChatFold(generation)


class ChatPrinter:
    """A chat completion's events, which begin with a role for each choice."""

    def __init__(self, printer: ChunkPrinter, num_choices: int) -> None:
        self._printer = printer
        self._num_choices = num_choices
        self.chunk = printer.chunk
        self.end = printer.end
        self.error = error_event

    def start(self) -> bytes:
        return b"".join(self._printer.role(index) for index in range(self._num_choices))


class ChatFold:
    """A chat completion in one document."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._fold = Fold(len(generation.requests))
        self.add = self._fold.add

    def body(self) -> bytes:
        generation = self._generation
        return self._fold.body(
            completion_id=generation.completion_id,
            created=generation.created,
            model=generation.model,
            usage=generation.usage,
        )


class TextDialect:
    """/v1/completions."""

    request_type = TextCompletionRequest
    id_prefix = "cmpl-"

    async def prepare(
        self,
        service: ChatService,
        request: TextCompletionRequest,
        *,
        completion_id: str,
        arrival: float,
        key_salt: str,
        hold: Hold,
    ) -> Generation:
        return await service.prepare_text(request, completion_id=completion_id, arrival=arrival, key_salt=key_salt)

    def printer(self, request: TextCompletionRequest, generation: Generation) -> StreamPrinter:
        has_usage, continuous_usage = usage_options(request)
        return TextPrinter(
            self._head(generation),
            len(generation.requests),
            generation.usage,
            has_usage=has_usage,
            continuous_usage=continuous_usage,
        )

    def fold(self, request: TextCompletionRequest, generation: Generation) -> AnswerFold:
        return TextFold(self._head(generation), len(generation.requests), generation.usage)

    def _head(self, generation: Generation) -> dict[str, object]:
        return {
            "id": generation.completion_id,
            "object": "text_completion",
            "created": generation.created,
            "model": generation.model,
        }


class ResponsesDialect:
    """/v1/responses."""

    request_type = ResponsesRequest
    id_prefix = "resp_"

    async def prepare(
        self,
        service: ChatService,
        request: ResponsesRequest,
        *,
        completion_id: str,
        arrival: float,
        key_salt: str,
        hold: Hold,
    ) -> Generation:
        return await service.prepare(
            request.chat(),
            completion_id=completion_id,
            arrival=arrival,
            key_salt=key_salt,
            hold=hold,
            field=request.field,
        )

    def printer(self, request: ResponsesRequest, generation: Generation) -> StreamPrinter:
        return ResponsePrinter(ResponseObject(request, generation))

    def fold(self, request: ResponsesRequest, generation: Generation) -> AnswerFold:
        return ResponseFold(ResponseObject(request, generation))


def usage_options(request: SamplingFields) -> tuple[bool, bool]:
    """Whether a stream ends with the usage, and whether every chunk tells it."""
    options = request.stream_options
    if options is None:
        return False, False
    return bool(options.include_usage), bool(options.continuous_usage_stats)
