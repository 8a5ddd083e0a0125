"""The HTTP side of one request to the model: reads the body, answers, notices that the client has left.

The one wall at which such a request's errors are caught. Before the answer starts they become a status; after that, the
last event of the stream.
"""

import asyncio
import contextlib
import logging
import time
import traceback
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Generic, TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from runtime.client import EngineDeadError
from server import errors
from server.byte_budget import Hold
from server.completion import Chunk
from server.dialects import AnswerFold, Dialect, StreamPrinter
from server.errors import ApiError
from server.lifecycle import FAREWELL_SECONDS, Lifecycle, RequestEndedError, RequestLife
from server.protocol import STALLED
from server.schemas import CompletionFields
from server.security import check_content_type, read_body
from server.service import Service
from server.sse import HEADERS, error_event

logger = logging.getLogger(__name__)

_STREAM_HEADERS = [(name.encode(), value.encode()) for name, value in HEADERS]

WireT = TypeVar("WireT", bound=BaseModel)
CompletionT = TypeVar("CompletionT", bound=CompletionFields)


class Exchange(Response, Generic[WireT]):
    """A response that does its work as it is sent, so that one task owns the request from its body to its last byte."""

    def __init__(self, service: Service, request_type: type[WireT]) -> None:
        self._service = service
        self._settings = service.settings
        self._lifecycle = service.lifecycle
        self._metrics = service.metrics
        self._request_type = request_type
        self._is_started = False
        self._error_event = error_event
        self.background = None

    async def _answer(self, request: WireT, arrival: float, hold: Hold, scope: Scope, send: Send) -> None:
        """Does what was asked for and sends the answer. `hold` counts what is held for it: pictures as they come beside
        the payload, and less once that is gone."""
        raise AssertionError("a kind of exchange says how it answers")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error: ApiError
        try:
            check_phase(self._lifecycle)
            async with self._lifecycle.request(self._settings.request_timeout_seconds) as life:
                await self._serve(scope, receive, send, life)
            return
        except RequestEndedError as ended:
            let_go(ended)
            self._metrics.aborted[ended.reason].inc()
            if ended.reason in ("disconnect", "stalled"):
                return
            timeout_seconds = self._settings.request_timeout_seconds
            error = errors.RequestTimeoutError(timeout_seconds) if ended.reason == "timeout" else errors.draining()
        except ClientDisconnect as left:
            let_go(left)
            self._metrics.aborted["disconnect"].inc()
            return
        except EngineDeadError as death:
            let_go(death)
            self._metrics.aborted["engine_dead"].inc()
            error = errors.engine_dead()
        except ApiError as raised:
            let_go(raised)
            error = raised
        except Exception as failure:
            logger.exception("a request failed", extra={"request_id": scope["state"]["request_id"]})
            let_go(failure)
            error = errors.InternalServerError()
        await self._fail(error, scope, receive, send)

    async def _fail(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        if self._is_started:
            self._metrics.stream_errors.inc()
            # A client that does not read would hold us here for ever; uvicorn closes the connection instead.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FAREWELL_SECONDS):
                    await _send_body(send, self._error_event(error.body()), is_last=True)
        else:
            self._metrics.rejected[error.reason].inc()
            await error.response()(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, life: RequestLife) -> None:
        arrival = time.perf_counter()
        check_content_type(scope)
        with self._service.body_budget.hold() as hold:
            body = await read_body(
                scope,
                receive,
                max_body_bytes=self._settings.max_body_bytes,
                timeout_seconds=self._settings.body_timeout_seconds,
                hold=hold,
            )
            # From here on nothing is to be received but the news that the client has left.
            watcher = asyncio.create_task(_watch(scope, receive, life))
            try:
                request = await self._service.body_parser.parse(self._request_type, body)
                del body
                await self._answer(request, arrival, hold, scope, send)
            finally:
                watcher.cancel()


class CompletionExchange(Exchange[CompletionT]):
    """A request whose answer is generated, folded or streamed."""

    def __init__(self, service: Service, dialect: Dialect[CompletionT]) -> None:
        super().__init__(service, dialect.request_type)
        self._dialect = dialect

    async def _answer(self, request: CompletionT, arrival: float, hold: Hold, scope: Scope, send: Send) -> None:
        service, dialect = self._service.chat, self._dialect
        service.check_model(request.model)
        admission = service.admit(request.num_choices)
        try:
            completion_id = f"{dialect.id_prefix}{uuid.uuid4().hex}"
            key_salt = scope["state"].get("key_salt", "")
            generation = await dialect.prepare(
                service, request, completion_id=completion_id, arrival=arrival, key_salt=key_salt, hold=hold
            )
            printer = dialect.printer(request, generation) if request.stream else None
            fold = None if request.stream else dialect.fold(request, generation)
            # Of pictures as text only the pixels are kept, for as long as the engine may want them.
            del request
            hold.replace(sum(array.nbytes for array in generation.pixels))
            chunks = service.chunks(generation, admission)
            async with aclosing(chunks):
                if printer is not None:
                    await self._stream(printer, chunks, send)
                elif fold is not None:
                    await self._fold(fold, chunks, send)
        finally:
            admission.close()

    async def _fold(self, fold: AnswerFold, chunks: AsyncGenerator[Chunk, None], send: Send) -> None:
        async for chunk in chunks:
            fold.add(chunk)
        await _send_json(send, fold.body())

    async def _stream(self, printer: StreamPrinter, chunks: AsyncGenerator[Chunk, None], send: Send) -> None:
        self._error_event = printer.error
        # The header waits for the engine's first word, so that what the engine refuses is still a status.
        first = await anext(chunks)
        self._is_started = True
        await send({"type": "http.response.start", "status": 200, "headers": list(_STREAM_HEADERS)})
        await _send_body(send, printer.start() + printer.chunk(first))
        async for chunk in chunks:
            if events := printer.chunk(chunk):
                await _send_body(send, events)
        await _send_body(send, printer.end(), is_last=True)


class DocumentExchange(Exchange[WireT]):
    """A request that is answered by one function with one document."""

    def __init__(
        self, service: Service, request_type: type[WireT], answer: Callable[[WireT, Hold], Awaitable[bytes]]
    ) -> None:
        super().__init__(service, request_type)
        self._document = answer

    async def _answer(self, request: WireT, arrival: float, hold: Hold, scope: Scope, send: Send) -> None:
        await _send_json(send, await self._document(request, hold))


def let_go(error: BaseException | None) -> None:
    """Lets a caught error forget where it came from. The frames that it passed hold the body, what was read from it,
    and pictures; these would wait for the garbage collector, which counts objects and no bytes."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        cause, error.__context__, error.__cause__ = error.__context__, None, None
        error = cause


def check_phase(lifecycle: Lifecycle) -> None:
    """
    Raises:
        ServiceUnavailableError: no request is taken now.
    """
    if lifecycle.phase == "starting":
        raise errors.still_loading()
    if lifecycle.phase == "draining":
        raise errors.draining()
    if lifecycle.phase == "dead":
        raise errors.engine_dead()


async def _watch(scope: Scope, receive: Receive, life: RequestLife) -> None:
    """Ends the request when the client leaves, or does not read."""
    while (await receive())["type"] != "http.disconnect":
        pass
    life.end("stalled" if scope["state"].get(STALLED) else "disconnect")


async def _send_body(send: Send, body: bytes, *, is_last: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": not is_last})


async def _send_json(send: Send, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await _send_body(send, body, is_last=True)
