"""The items of a response's output, each as it grows: a message, or a call of a function. Knows OpenAI's JSON.

An item's events, in OpenAI's order. A message: output_item.added, content_part.added, output_text.delta ...,
output_text.done, content_part.done, output_item.done. A call: output_item.added, function_call_arguments.delta ...,
function_call_arguments.done, output_item.done.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from server.completion import LogprobEntry

# Type and fields, without the sequence number.
Event: TypeAlias = tuple[str, dict[str, Any]]
Status = Literal["in_progress", "completed", "incomplete"]


class MessageItem:
    """What the model says: one part of text."""

    def __init__(self, item_id: str, output_index: int) -> None:
        self._place = {"item_id": item_id, "output_index": output_index, "content_index": 0}
        self._texts: list[str] = []
        self._logprobs: list[LogprobEntry] = []
        self._status: Status = "in_progress"

    def wire(self) -> dict[str, Any]:
        return {
            "id": self._place["item_id"],
            "type": "message",
            "role": "assistant",
            "status": self._status,
            "content": [] if self._status == "in_progress" else [self._part()],
        }

    def opening(self) -> list[Event]:
        added = {"output_index": self._place["output_index"], "item": self.wire()}
        return [
            ("response.output_item.added", added),
            ("response.content_part.added", {**self._place, "part": self._part()}),
        ]

    def add(self, text: str, logprobs: Sequence[LogprobEntry]) -> list[Event]:
        self._texts.append(text)
        self._logprobs += logprobs
        return [("response.output_text.delta", {**self._place, "delta": text, "logprobs": logprobs})]

    def closing(self, status: Status) -> list[Event]:
        self._status = status
        part = self._part()
        done = {"text": part["text"], "logprobs": part["logprobs"]}
        return [
            ("response.output_text.done", {**self._place, **done}),
            ("response.content_part.done", {**self._place, "part": part}),
            ("response.output_item.done", {"output_index": self._place["output_index"], "item": self.wire()}),
        ]

    def _part(self) -> dict[str, Any]:
        text = "".join(self._texts)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._logprobs)}


class CallItem:
    """A call of a function. `call_id` is what its output refers to."""

    def __init__(self, item_id: str, output_index: int, call_id: str, name: str) -> None:
        self._item_id = item_id
        self._output_index = output_index
        self._call_id = call_id
        self._name = name
        self._arguments: list[str] = []
        self._status: Status = "in_progress"

    def wire(self) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "function_call",
            "status": self._status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": "".join(self._arguments),
        }

    def opening(self) -> list[Event]:
        return [("response.output_item.added", {"output_index": self._output_index, "item": self.wire()})]

    def add(self, arguments: str) -> list[Event]:
        self._arguments.append(arguments)
        place = {"item_id": self._item_id, "output_index": self._output_index}
        return [("response.function_call_arguments.delta", {**place, "delta": arguments})]

    def closing(self, status: Status) -> list[Event]:
        self._status = status
        place = {"item_id": self._item_id, "output_index": self._output_index}
        done = {**place, "name": self._name, "arguments": "".join(self._arguments)}
        return [
            ("response.function_call_arguments.done", done),
            ("response.output_item.done", {"output_index": self._output_index, "item": self.wire()}),
        ]
