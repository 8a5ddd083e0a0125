"""Limits on what a client may send, before anything looks at its meaning: bytes, depth, headers. No schemas here."""

import asyncio
import re
import uuid
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from server.byte_budget import Hold
from server.errors import BodyTimeoutError, BodyTooLargeError, InvalidRequestError

# Deeper than any request or JSON schema that people write; bounds every recursive walk behind it.
MAX_JSON_DEPTH = 64
# Commas and opening brackets, of which there is one for each value. Each value costs about 60 bytes and more once it is
# parsed: 64 MiB of "[]," would become gigabytes. Base64 has none of these signs, long texts a few for each line.
MAX_JSON_VALUES = 2_000_000
SANE_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


def header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)


def request_id_of(scope: Scope) -> str:
    """The client's `x-request-id` if it is short and printable, else a new one."""
    sent = (header(scope, b"x-request-id") or b"").decode("latin-1")
    return sent if SANE_REQUEST_ID.fullmatch(sent) else new_request_id()


def new_request_id() -> str:
    return f"req_{uuid.uuid4().hex}"


async def read_body(
    scope: Scope, receive: Receive, *, max_body_bytes: int, timeout_seconds: float, hold: Hold
) -> bytes:
    """The whole body, whether its length was announced or it comes in chunks. `hold` counts it as it comes.

    Raises:
        BodyTooLargeError: it is larger than `max_body_bytes`; no more than that was kept.
        BodyTimeoutError: nothing of it came for `timeout_seconds`.
        ServerBusyError: too many bytes of requests are in work.
        ClientDisconnect: the client left before the end.
    """
    announced = header(scope, b"content-length")
    if announced is not None and announced.isdigit() and int(announced[:20]) > max_body_bytes:
        raise BodyTooLargeError(max_body_bytes)
    parts: list[bytes] = []
    num_bytes = 0
    while True:
        try:
            async with asyncio.timeout(timeout_seconds):
                message = await receive()
        except TimeoutError:
            raise BodyTimeoutError(timeout_seconds) from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part = message.get("body", b"")
        num_bytes += len(part)
        if num_bytes > max_body_bytes:
            raise BodyTooLargeError(max_body_bytes)
        hold.add(len(part))
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def check_content_type(scope: Scope) -> None:
    """A page of another origin can send forms and plain text to a local server without asking; JSON it cannot.

    Raises:
        InvalidRequestError: the body is announced as something else than JSON, or as compressed.
    """
    if (header(scope, b"content-encoding") or b"identity").strip().lower() != b"identity":
        raise InvalidRequestError("The request body must not be compressed: leave the Content-Encoding header out.")
    kind = (header(scope, b"content-type") or b"").split(b";")[0].strip().lower()
    if kind != b"application/json" and not (kind.startswith(b"application/") and kind.endswith(b"+json")):
        raise InvalidRequestError("The Content-Type header must be 'application/json'.")


def num_values(body: bytes) -> int:
    """At least as many as the JSON has: what looks like more within a text counts, too."""
    return sum(map(body.count, (b",", b"[", b"{")))


def parse_json(body: bytes) -> dict[str, Any]:
    """A JSON object of bounded depth.

    Raises:
        InvalidRequestError: it is no JSON, no object, or too deep. The message repeats nothing of it.
    """
    if num_values(body) > MAX_JSON_VALUES:
        raise InvalidRequestError(f"The JSON has more than {MAX_JSON_VALUES} values.")
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise InvalidRequestError(f"The JSON is nested deeper than {MAX_JSON_DEPTH} levels.") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise InvalidRequestError("The request body is not valid JSON.") from None
    if not isinstance(value, dict):
        raise InvalidRequestError("The request body must be a JSON object.")
    check_depth(value)
    return value


def check_depth(value: Any) -> None:
    """
    Raises:
        InvalidRequestError: arrays and objects are nested deeper than `MAX_JSON_DEPTH`.
    """
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [
            item
            for container in level
            for item in (container.values() if isinstance(container, dict) else container)
            if isinstance(item, dict | list)
        ]
        if not level:
            return
    raise InvalidRequestError(f"The JSON is nested deeper than {MAX_JSON_DEPTH} levels.")
