"""Calls of tools as data: what a stream adds to one, their fold, and OpenAI's JSON for both. Parses nothing."""

import uuid
from collections.abc import Iterable
from typing import Any

import msgspec

from runtime.processing.tool_call_parser import CallPiece


class CallDelta(msgspec.Struct, frozen=True):
    """What is added to call `index` of a choice. The first one has its `id` and `name`, and no arguments yet.

    `is_legacy`: it is told as the one `function_call`, which has no id.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    is_legacy: bool = False

    def wire(self) -> dict[str, Any]:
        """An entry of `tool_calls`, or the value of `function_call`, of a streamed delta."""
        function: dict[str, Any] = {"arguments": self.arguments}
        if self.name is None:
            return function if self.is_legacy else {"index": self.index, "function": function}
        function = {"name": self.name, **function}
        return (
            function
            if self.is_legacy
            else {"index": self.index, "id": self.id, "type": "function", "function": function}
        )


def call_deltas(pieces: Iterable[CallPiece], *, is_legacy: bool) -> tuple[CallDelta, ...]:
    """Pieces of an output as deltas; a call gets its id here."""
    return tuple(
        CallDelta(
            piece.index,
            f"call_{uuid.uuid4().hex[:24]}" if piece.name is not None else None,
            piece.name,
            piece.arguments,
            is_legacy,
        )
        for piece in pieces
    )


class CallFold:
    """Folds the deltas of one choice into its calls."""

    def __init__(self) -> None:
        self._heads: list[CallDelta] = []
        self._arguments: list[list[str]] = []

    def add(self, delta: CallDelta) -> None:
        if delta.name is not None:
            assert delta.index == len(self._heads), "a call comes out of order"
            self._heads.append(delta)
            self._arguments.append([])
        self._arguments[delta.index].append(delta.arguments)

    def wire(self) -> dict[str, Any]:
        """The fields that the calls add to a message: none, `tool_calls` or `function_call`."""
        calls = [
            (head, {"name": head.name, "arguments": "".join(arguments)})
            for head, arguments in zip(self._heads, self._arguments, strict=True)
        ]
        if not calls:
            return {}
        if calls[0][0].is_legacy:
            return {"function_call": calls[0][1]}
        return {"tool_calls": [{"id": head.id, "type": "function", "function": function} for head, function in calls]}
