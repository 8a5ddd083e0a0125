"""The errors a client can get, in OpenAI's shape. Knows status codes and wording, nothing of how they come about.

    ApiError
    ├── InvalidRequestError        400  a field is malformed, out of range, or asks for what we cannot honour
    │   ├── InvalidImageError      400  a picture cannot be used (invalid_image, invalid_image_url, ...)
    │   └── ContextLengthError     400  context_length_exceeded
    ├── UnauthorizedError          401  WWW-Authenticate
    ├── ModelNotFoundError         404
    ├── RouteNotFoundError         404
    ├── MethodNotAllowedError      405
    ├── BodyTimeoutError           408
    ├── BodyTooLargeError          413
    ├── HeadersTooLargeError       431
    ├── QueueFullError             429  Retry-After
    ├── ServerBusyError            429  Retry-After (too many bytes of bodies in flight)
    ├── InternalServerError        500  never says why; the log does
    ├── ServiceUnavailableError    503  Retry-After (starting, draining, the engine is gone)
    └── RequestTimeoutError        504

Messages are written here or by the code that raises; the text of a foreign exception never reaches a client, nor does
any part of the payload.
"""

from collections.abc import Sequence
from typing import ClassVar

import msgspec
from pydantic_core import ErrorDetails
from starlette.responses import Response


class ErrorBody(msgspec.Struct, frozen=True):
    """The inner object; clients need all four keys."""

    message: str
    type: str
    param: str | None
    code: str | None


class ApiError(Exception):
    """An answer that is an error. `message` is for the client's eyes; `param` is the path of the offending field.

    `reason` is the bounded label under which rejections are counted.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = None
    reason: str = "internal"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else self.default_code
        self.headers = headers or {}

    def body(self) -> bytes:
        """The JSON document `{"error": {...}}`; in a stream it is the data of the last event."""
        return msgspec.json.encode({"error": ErrorBody(self.message, self.type, self.param, self.code)})

    def response(self) -> Response:
        return Response(self.body(), self.status, self.headers, media_type="application/json")


class InvalidRequestError(ApiError):
    status = 400
    type = "invalid_request_error"
    reason = "invalid_request"


class InvalidImageError(InvalidRequestError):
    default_code = "invalid_image"
    reason = "invalid_image"


class ContextLengthError(InvalidRequestError):
    default_code = "context_length_exceeded"
    reason = "context_length"


class UnauthorizedError(ApiError):
    status = 401
    type = "invalid_request_error"
    default_code = "invalid_api_key"
    reason = "unauthorized"

    def __init__(self) -> None:
        super().__init__(
            "A valid API key is needed, as the header 'Authorization: Bearer KEY'.",
            headers={"www-authenticate": "Bearer"},
        )


class ModelNotFoundError(ApiError):
    status = 404
    type = "invalid_request_error"
    default_code = "model_not_found"
    reason = "model_not_found"

    def __init__(self, name: str, served: Sequence[str]) -> None:
        message = f"The model `{shown_name(name)}` does not exist; this server has: {', '.join(served)}."
        super().__init__(message, param="model")


class RouteNotFoundError(ApiError):
    status = 404
    type = "invalid_request_error"
    default_code = "not_found"
    reason = "not_found"


class MethodNotAllowedError(ApiError):
    status = 405
    type = "invalid_request_error"
    default_code = "method_not_allowed"
    reason = "not_found"


class BodyTimeoutError(ApiError):
    status = 408
    type = "invalid_request_error"
    default_code = "request_timeout"
    reason = "body_timeout"

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"Nothing more of the request body came for {seconds:g} seconds (body_timeout_seconds).",
            headers={"connection": "close"},
        )


class BodyTooLargeError(ApiError):
    status = 413
    type = "invalid_request_error"
    default_code = "request_too_large"
    reason = "body_too_large"

    def __init__(self, max_body_bytes: int) -> None:
        super().__init__(
            f"The request body is larger than {max_body_bytes} bytes (max_body_bytes).", headers={"connection": "close"}
        )


class HeadersTooLargeError(ApiError):
    status = 431
    type = "invalid_request_error"
    default_code = "headers_too_large"
    reason = "headers_too_large"

    def __init__(self, max_header_bytes: int) -> None:
        super().__init__(f"The request's headers are larger than {max_header_bytes} bytes (max_header_bytes).")


class QueueFullError(ApiError):
    status = 429
    type = "rate_limit_error"
    default_code = "queue_full"
    reason = "queue_full"

    def __init__(self, max_queue_len: int) -> None:
        super().__init__(
            f"The server is overloaded: its queue of {max_queue_len} requests (max_queue_len) is full.",
            headers={"retry-after": "1"},
        )


class ServerBusyError(ApiError):
    status = 429
    type = "rate_limit_error"
    default_code = "server_busy"
    reason = "bytes_in_flight"

    def __init__(self, max_bytes: int) -> None:
        super().__init__(
            f"The server is overloaded: more than {max_bytes} bytes of requests (max_in_flight_bytes) are in work.",
            headers={"retry-after": "1", "connection": "close"},
        )


class InternalServerError(ApiError):
    def __init__(self) -> None:
        super().__init__("The server had an error while processing your request. The request id leads to its log.")


class ServiceUnavailableError(ApiError):
    """`reason` says which: not_ready, draining, engine_dead."""

    status = 503
    default_code = "service_unavailable"
    reason = "not_ready"

    def __init__(self, message: str, *, reason: str, is_closing: bool = False) -> None:
        headers = {"retry-after": "5"}
        if is_closing:
            headers["connection"] = "close"
        super().__init__(message, headers=headers)
        self.reason = reason


class RequestTimeoutError(ApiError):
    status = 504
    default_code = "timeout"
    reason = "timeout"

    def __init__(self, seconds: float) -> None:
        super().__init__(f"The request took longer than {seconds:g} seconds (request_timeout_seconds).")


REJECT_REASONS: tuple[str, ...] = (
    "invalid_request",
    "invalid_image",
    "too_many_images",
    "context_length",
    "unauthorized",
    "model_not_found",
    "not_found",
    "body_timeout",
    "body_too_large",
    "headers_too_large",
    "queue_full",
    "bytes_in_flight",
    "not_ready",
    "draining",
    "engine_dead",
    "timeout",
    "internal",
)

# Most characters of a client's name of a model that an error repeats.
MAX_NAME_CHARS = 100

# Fields of the request whose keys are not ours.
MAPPINGS = frozenset({"logit_bias", "metadata"})


def shown_name(name: str) -> str:
    """A client's name of something, fit for a message: what is not printable escaped, and no more than
    `MAX_NAME_CHARS` characters."""
    # An escape is longer than its character: what lies beyond the limit need not be looked at.
    shown = "".join(
        char if char.isprintable() else ascii(char)[1:-1] for char in name[: MAX_NAME_CHARS + 1].replace("`", "'")
    )
    return shown if len(shown) <= MAX_NAME_CHARS else shown[: MAX_NAME_CHARS - 3] + "..."


def still_loading() -> ServiceUnavailableError:
    return ServiceUnavailableError(
        "The model is still loading; GET /health/ready answers 200 when it is done.", reason="not_ready"
    )


def engine_dead() -> ServiceUnavailableError:
    return ServiceUnavailableError("The engine has stopped; the server is going down.", reason="engine_dead")


def draining() -> ServiceUnavailableError:
    return ServiceUnavailableError("The server is shutting down.", reason="draining", is_closing=True)


def context_length(
    max_model_len: int, num_prompt_tokens: int | None, max_tokens: int | None, *, param: str = "messages"
) -> ContextLengthError:
    """The wording is what clients match on; `max_tokens` None means that the prompt alone is too long, and
    `num_prompt_tokens` None that its tokens were not even counted."""
    start = f"This model's maximum context length is {max_model_len} tokens. However, "
    if num_prompt_tokens is None:
        return ContextLengthError(
            f"{start}your messages are far longer. Please reduce the length of the messages.", param=param
        )
    if max_tokens is None:
        return ContextLengthError(
            f"{start}your messages resulted in {num_prompt_tokens} tokens. Please reduce the length of the messages.",
            param=param,
        )
    return ContextLengthError(
        f"{start}you requested {num_prompt_tokens + max_tokens} tokens ({num_prompt_tokens} in the messages, "
        f"{max_tokens} in the completion). Please reduce the length of the messages or completion.",
        param=param,
    )


def param_path(location: Sequence[int | str]) -> str | None:
    """`("messages", 0, "content", "<parts>", 1, "type")` -> `messages[0].content[1].type`.

    Entries in angle brackets are the tags of unions and no part of the document. The keys of mappings are the client's
    text: the path ends before them.
    """
    path = ""
    for entry in location:
        if isinstance(entry, int):
            path += f"[{entry}]"
        elif not entry.startswith("<"):
            path += f".{entry}" if path else entry
            if entry in MAPPINGS:
                break
    return path or None


def from_validation(errors: Sequence[ErrorDetails]) -> InvalidRequestError:
    """The first of pydantic's errors, without the input that it carries."""
    first = errors[0]
    param = param_path(first["loc"])
    context = first.get("ctx") or {}
    message = first["msg"]
    if first["type"] == "rejected":
        at = context.get("at")
        return InvalidRequestError(message, param=".".join(path for path in (param, at) if path) or None)
    if first["type"] == "missing":
        return InvalidRequestError(f"Missing required parameter: '{param}'.", param=param)
    if param is None:
        return InvalidRequestError("The request body must be a JSON object.")
    return InvalidRequestError(f"Invalid value for '{param}': {message[:1].lower()}{message[1:]}.", param=param)
