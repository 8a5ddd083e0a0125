"""A response object of /v1/responses, whole and as events. Knows OpenAI's JSON; the chunks are those of a completion.

Events are in OpenAI's order and numbered from 0: created, in_progress, those of the items one after the other
(`response_items`), completed (or incomplete).
"""

import time
from typing import Any

import msgspec

from server.chat import Generation
from server.completion import Chunk, LogprobEntry, Usage
from server.response_items import CallItem, Event, MessageItem
from server.response_tools import choice_wire
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
    """One response as it grows: its items, and how it ended."""

    def __init__(self, request: ResponsesRequest, generation: Generation) -> None:
        self._hex_id = generation.completion_id.removeprefix("resp_")
        self._usage = generation.usage
        self._items: list[MessageItem | CallItem] = []
        # What the tokens before a text told, while none of it can be shown.
        self._logprobs: list[LogprobEntry] = []
        self._may_call = generation.answer.may_call
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
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "text": {"format": request.text_format.wire()},
            "tool_choice": choice_wire(request.tool_choice),
            "tools": [tool.wire() for tool in request.tools or ()],
            "truncation": "disabled",
        }

    @property
    def is_complete(self) -> bool:
        return self._finish_reason != "length"

    def add(self, chunk: Chunk) -> list[Event]:
        """Takes a chunk; the events that tell what it adds."""
        events: list[Event] = []
        self._logprobs += chunk.logprobs or []
        # A call's tokens tell nothing of a text.
        if chunk.text or (chunk.logprobs and not self._may_call):
            message = self._open_message(events)
            events += message.add(chunk.text, self._logprobs)
            self._logprobs = []
        for call in chunk.calls:
            if call.name is not None:
                self._close(events)
                assert call.id is not None, "a call begins with its id"
                opened = CallItem(f"fc_{self._hex_id}_{len(self._items)}", len(self._items), call.id, call.name)
                self._items.append(opened)
                events += opened.opening()
            last = self._items[-1]
            assert isinstance(last, CallItem), "a call comes in one piece"
            if call.arguments:
                events += last.add(call.arguments)
        if chunk.calls:
            self._logprobs = []
        if chunk.finish_reason is not None:
            self._finish_reason = chunk.finish_reason
            if not self._items:
                self._open_message(events)
            self._close(events)
        return events

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
            "output": [] if is_empty else [item.wire() for item in self._items],
            "usage": None if is_empty else usage_wire(self._usage),
        }

    def _open_message(self, events: list[Event]) -> MessageItem:
        """The message that is written now, or a new one behind the calls."""
        last = self._items[-1] if self._items else None
        if isinstance(last, MessageItem):
            return last
        self._close(events)
        number = len(self._items)
        message = MessageItem(f"msg_{self._hex_id}" + (f"_{number}" if number else ""), number)
        self._items.append(message)
        events += message.opening()
        return message

    def _close(self, events: list[Event]) -> None:
        """Ends the item that is written now; only the last one of an answer can be cut off."""
        if self._items:
            events += self._items[-1].closing("completed" if self.is_complete else "incomplete")


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
        self._sequence_number = 0

    def start(self) -> bytes:
        beginning = self._response.wire(is_empty=True)
        return self._event("response.created", response=beginning) + self._event(
            "response.in_progress", response=beginning
        )

    def chunk(self, chunk: Chunk) -> bytes:
        return b"".join(self._event(kind, **fields) for kind, fields in self._response.add(chunk))

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
