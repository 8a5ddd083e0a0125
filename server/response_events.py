"""A response object of /v1/responses, whole and as events. Knows OpenAI's JSON; the chunks are those of a completion.

Events are in OpenAI's order and numbered from 0: created, in_progress, output_item.added, content_part.added,
output_text.delta ..., output_text.done, content_part.done, output_item.done, completed (or incomplete).
"""

import time
from typing import Any

import msgspec

from server.chat import Generation
from server.completion import Chunk, LogprobEntry, Usage
from server.responses import ResponsesRequest

_encode = msgspec.json.Encoder().encode


def usage_wire(usage: Usage) -> dict[str, Any]:
    """`image_tokens` and `text_tokens` are beyond OpenAI's fields here, named as in chat completions."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": 0,
            "image_tokens": usage.image_tokens,
            "text_tokens": usage.prompt_tokens - usage.image_tokens,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class ResponseObject:
    """One response as it grows: text, log-probabilities and how it ended."""

    def __init__(self, request: ResponsesRequest, generation: Generation) -> None:
        self.message_id = "msg_" + generation.completion_id.removeprefix("resp_")
        self._usage = generation.usage
        self._texts: list[str] = []
        self._logprobs: list[LogprobEntry] = []
        self._finish_reason: str | None = None
        sampling = generation.requests[0].sampling
        self._fixed = {
            "id": generation.completion_id,
            "object": "response",
            "created_at": generation.created,
            "model": generation.model,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_logprobs": request.top_logprobs or 0,
            "metadata": request.metadata or {},
            "background": False,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "text": {"format": request.text_format.wire()},
            "tool_choice": "auto",
            "tools": [],
            "truncation": "disabled",
        }

    @property
    def is_complete(self) -> bool:
        return self._finish_reason != "length"

    @property
    def logprobs(self) -> list[LogprobEntry]:
        return self._logprobs

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def add(self, chunk: Chunk) -> None:
        self._texts.append(chunk.text)
        self._logprobs += chunk.logprobs or []
        self._finish_reason = chunk.finish_reason or self._finish_reason

    def part(self, *, is_empty: bool = False) -> dict[str, Any]:
        """The one part of the message's content."""
        return {
            "type": "output_text",
            "text": "" if is_empty else self.text,
            "annotations": [],
            "logprobs": [] if is_empty else self._logprobs,
        }

    def message(self, *, is_empty: bool = False) -> dict[str, Any]:
        """The one item of the output."""
        ended = "completed" if self.is_complete else "incomplete"
        return {
            "id": self.message_id,
            "type": "message",
            "role": "assistant",
            "status": "in_progress" if is_empty else ended,
            "content": [] if is_empty else [self.part()],
        }

    def wire(self, *, is_empty: bool = False) -> dict[str, Any]:
        """The object: at its end, or as it begins."""
        ended = "completed" if self.is_complete else "incomplete"
        is_cut = not is_empty and not self.is_complete
        return {
            **self._fixed,
            "status": "in_progress" if is_empty else ended,
            "completed_at": None if is_empty or is_cut else int(time.time()),
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [] if is_empty else [self.message()],
            "usage": None if is_empty else usage_wire(self._usage),
        }


class ResponseFold:
    """Folds chunks into the response that is not streamed."""

    def __init__(self, response: ResponseObject) -> None:
        self._response = response

    def add(self, chunk: Chunk) -> None:
        self._response.add(chunk)

    def body(self) -> bytes:
        return _encode(self._response.wire())


class ResponsePrinter:
    """Prints chunks as events. There is no `[DONE]`: the last event says by its type that it is the last."""

    def __init__(self, response: ResponseObject) -> None:
        self._response = response
        self._place = {"item_id": response.message_id, "output_index": 0, "content_index": 0}
        self._sequence_number = 0

    def start(self) -> bytes:
        beginning = self._response.wire(is_empty=True)
        return (
            self._event("response.created", response=beginning)
            + self._event("response.in_progress", response=beginning)
            + self._event("response.output_item.added", output_index=0, item=self._response.message(is_empty=True))
            + self._event("response.content_part.added", **self._place, part=self._response.part(is_empty=True))
        )

    def chunk(self, chunk: Chunk) -> bytes:
        self._response.add(chunk)
        events = b""
        if chunk.text or chunk.logprobs:
            events = self._event(
                "response.output_text.delta", **self._place, delta=chunk.text, logprobs=chunk.logprobs or []
            )
        if chunk.finish_reason is not None:
            response = self._response
            events += self._event(
                "response.output_text.done", **self._place, text=response.text, logprobs=response.logprobs
            )
            events += self._event("response.content_part.done", **self._place, part=response.part())
            events += self._event("response.output_item.done", output_index=0, item=response.message())
        return events

    def end(self) -> bytes:
        kind = "response.completed" if self._response.is_complete else "response.incomplete"
        return self._event(kind, response=self._response.wire())

    def error(self, body: bytes) -> bytes:
        """The last event of a stream that failed: the error's fields, and the same under `error`, where the official
        clients of other APIs, and some of this one, look for them."""
        error = msgspec.json.decode(body)["error"]
        fields = {"code": error["code"], "message": error["message"], "param": error["param"]}
        return self._event("error", **fields, error=error)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number = self._sequence_number
        self._sequence_number += 1
        data = _encode({"type": kind, "sequence_number": number, **fields})
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"
