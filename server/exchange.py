"""The HTTP side of one chat request: reads the body, answers folded or streamed, notices that the client has left.

The one wall at which a chat request's errors are caught. Before the answer starts they become a status; after that, the
last event of the stream.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

from pydantic import ValidationError
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from runtime.client import EngineDeadError
from server import errors
from server.chat import ChatService, Generation
from server.completion import Chunk, Fold
from server.errors import ApiError
from server.lifecycle import FAREWELL_SECONDS, Lifecycle, RequestEndedError, RequestLife
from server.metrics import Metrics
from server.schemas import ChatCompletionRequest
from server.security import check_content_type, parse_json, read_body
from server.settings import Settings
from server.sse import HEADERS, ChunkPrinter, error_event

logger = logging.getLogger(__name__)

_STREAM_HEADERS = [(name.encode(), value.encode()) for name, value in HEADERS]


class ChatExchange(Response):
    """A response that does its work as it is sent, so that one task owns the request from its body to its last byte."""

    def __init__(self, service: ChatService, settings: Settings, lifecycle: Lifecycle, metrics: Metrics) -> None:
        self._service = service
        self._settings = settings
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._is_started = False
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error: ApiError
        try:
            check_phase(self._lifecycle)
            async with self._lifecycle.request(self._settings.request_timeout_seconds) as life:
                await self._serve(scope, receive, send, life)
            return
        except RequestEndedError as ended:
            self._metrics.aborted[ended.reason].inc()
            if ended.reason == "disconnect":
                return
            timeout_seconds = self._settings.request_timeout_seconds
            error = errors.RequestTimeoutError(timeout_seconds) if ended.reason == "timeout" else errors.draining()
        except ClientDisconnect:
            self._metrics.aborted["disconnect"].inc()
            return
        except EngineDeadError:
            self._metrics.aborted["engine_dead"].inc()
            error = errors.engine_dead()
        except ApiError as raised:
            error = raised
        except Exception:
            logger.exception("a chat request failed", extra={"request_id": scope["state"]["request_id"]})
            error = errors.InternalServerError()
        await self._fail(error, scope, receive, send)

    async def _fail(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        if self._is_started:
            self._metrics.stream_errors.inc()
            # A client that does not read would hold us here for ever; uvicorn closes the connection instead.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FAREWELL_SECONDS):
                    await _send_body(send, error_event(error.body()), is_last=True)
        else:
            self._metrics.rejected[error.reason].inc()
            await error.response()(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, life: RequestLife) -> None:
        arrival = time.perf_counter()
        check_content_type(scope)
        body = await read_body(scope, receive, self._settings.max_body_bytes)
        # From here on nothing is to be received but the news that the client has left.
        watcher = asyncio.create_task(_watch(receive, life))
        try:
            request = validated(body)
            del body
            self._service.check_model(request.model)
            admission = self._service.admit(request.num_choices)
            try:
                completion_id = f"chatcmpl-{uuid.uuid4().hex}"
                generation = await self._service.prepare(request, completion_id=completion_id, arrival=arrival)
                chunks = self._service.chunks(generation, admission)
                async with aclosing(chunks):
                    if request.stream:
                        await self._stream(request, generation, chunks, send)
                    else:
                        await self._fold(generation, chunks, scope, receive, send)
            finally:
                admission.close()
        finally:
            watcher.cancel()

    async def _fold(
        self, generation: Generation, chunks: AsyncGenerator[Chunk, None], scope: Scope, receive: Receive, send: Send
    ) -> None:
        fold = Fold(len(generation.requests))
        async for chunk in chunks:
            fold.add(chunk)
        body = fold.body(
            completion_id=generation.completion_id,
            created=generation.created,
            model=generation.model,
            usage=generation.usage,
        )
        await Response(body, media_type="application/json")(scope, receive, send)

    async def _stream(
        self, request: ChatCompletionRequest, generation: Generation, chunks: AsyncGenerator[Chunk, None], send: Send
    ) -> None:
        options = request.stream_options
        has_usage = options is not None and bool(options.include_usage)
        printer = ChunkPrinter(
            completion_id=generation.completion_id,
            created=generation.created,
            model=generation.model,
            usage=generation.usage if has_usage else None,
            continuous_usage=options is not None and bool(options.continuous_usage_stats),
        )
        # The header waits for the engine's first word, so that what the engine refuses is still a status.
        first = await anext(chunks)
        self._is_started = True
        await send({"type": "http.response.start", "status": 200, "headers": list(_STREAM_HEADERS)})
        roles = b"".join(printer.role(index) for index in range(len(generation.requests)))
        await _send_body(send, roles + printer.chunk(first))
        async for chunk in chunks:
            await _send_body(send, printer.chunk(chunk))
        await _send_body(send, printer.end(), is_last=True)


def check_phase(lifecycle: Lifecycle) -> None:
    """
    Raises:
        ServiceUnavailableError: no request is taken now.
    """
    if lifecycle.phase == "starting":
        raise errors.ServiceUnavailableError("The model is still loading.", reason="not_ready")
    if lifecycle.phase == "draining":
        raise errors.draining()
    if lifecycle.phase == "dead":
        raise errors.engine_dead()


def validated(body: bytes) -> ChatCompletionRequest:
    """
    Raises:
        InvalidRequestError: the body is no chat request; names the field.
    """
    try:
        return ChatCompletionRequest.model_validate(parse_json(body))
    except ValidationError as error:
        raise errors.from_validation(error.errors(include_url=False, include_input=False)) from None


async def _watch(receive: Receive, life: RequestLife) -> None:
    """Ends the request when the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
    life.end("disconnect")


async def _send_body(send: Send, body: bytes, *, is_last: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": not is_last})
