"""Bodies to requests: parses and checks, large ones beside the event loop and one after the other. Knows no sockets."""

import asyncio
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from server import errors
from server.security import num_values, parse_json

# Parsing what is longer delays others more than a hop to a thread and back delays this one.
MAX_INLINE_BODY_BYTES = 1 << 20
MAX_INLINE_VALUES = 10_000

WireT = TypeVar("WireT", bound=BaseModel)


def validated(request_type: type[WireT], body: bytes) -> WireT:
    """
    Raises:
        InvalidRequestError: the body is no such request; names the field.
    """
    try:
        return request_type.model_validate(parse_json(body))
    except ValidationError as error:
        raise errors.from_validation(error.errors(include_url=False, include_input=False)) from None


class BodyParser:
    """One for each application.

    Large bodies wait for each other. Their parser holds the interpreter's lock, so that nothing is lost, and what one
    becomes on the way, up to a quarter of a gigabyte, is there once and not once for each thread.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Semaphore(1)

    async def parse(self, request_type: type[WireT], body: bytes) -> WireT:
        """
        Raises:
            InvalidRequestError: the body is no such request; names the field.
        """
        if len(body) <= MAX_INLINE_BODY_BYTES and num_values(body) <= MAX_INLINE_VALUES:
            return validated(request_type, body)
        await self._turn.acquire()
        job = asyncio.get_running_loop().run_in_executor(None, validated, request_type, body)
        # Not earlier: when its client has left, the thread still works on it.
        job.add_done_callback(self._release)
        return await asyncio.shield(job)

    def _release(self, job: "asyncio.Future[WireT]") -> None:
        if not job.cancelled():
            job.exception()  # whoever asked may be gone; then nobody else looks
        self._turn.release()
