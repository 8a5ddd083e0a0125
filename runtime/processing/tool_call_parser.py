"""Reads an output that may call tools, as it grows: what is text, which tool is called, with which arguments.

Knows the family's (Hermes') format, `<tool_call>` newline `{"name": ..., "arguments": {...}}` newline `</tool_call>`;
no tokens, no HTTP. The time is linear in the text. Arguments are given as they come, so that a stream shows them at
once; a call that is written in another order is given when it is complete, and what is no call at all is text.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from runtime.processing.tool_prompt import CALL_CLOSE, CALL_OPEN

# The usual beginning of a call, up to its arguments.
_HEADER = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')
_MAX_HEADER_CHARS = 512
_BRACES = re.compile(r'[\\"{}\[\]]')
# White space before a call belongs to neither; more than this is a text's.
_MAX_HELD_SPACE = 64


@dataclass(frozen=True, kw_only=True)
class CallPiece:
    """What was added to call `index`: its name, which comes first and once, or characters of its arguments' JSON."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a piece of output adds."""

    text: str = ""
    calls: list[CallPiece] = field(default_factory=list)


class ToolCallParser:
    """One output. All readings' texts, joined, are the text beside the calls."""

    def __init__(self, *, only_calls: bool = False) -> None:
        """
        Args:
            only_calls: the output was bound to calls, so that the beginning of one is no text.
        """
        self.num_calls = 0
        self._only_calls = only_calls
        self._pending = ""
        self._state: Callable[[], bool] = self._read_text
        self._has_text = False
        # Of what is read now.
        self._text: list[str] = []
        self._calls: list[CallPiece] = []
        # Of the arguments that are read now.
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False
        # Of a call without a usual beginning: what is behind its opening and before `_pending`.
        self._body: list[str] = []

    @property
    def is_in_call(self) -> bool:
        """Whether a call is open: if the output ends here, it is incomplete."""
        return self._state not in (self._read_text, self._read_tail)

    def push(self, text: str) -> Reading:
        """Takes a piece of the output."""
        self._pending += text
        while self._state():
            pass
        return self._take()

    def finish(self) -> Reading:
        """Takes the end: gives what was held back. The beginning of a call that never came to its arguments is text,
        unless only a call could come, as behind another one: then it was cut off."""
        if self._only_calls:
            self._pending = ""
        elif self.num_calls and not self._has_text:
            rest = self._pending if self._state == self._read_text else ""
            self._add_text(rest[: len(rest) - _overlap(rest, CALL_OPEN)].rstrip())
        elif self._state == self._read_header:
            self._add_text(CALL_OPEN + self._pending)
        elif self._state == self._read_other:
            self._add_text("".join((CALL_OPEN, *self._body, self._pending)))
        elif self._state == self._read_text:
            self._add_text(self._pending if self.num_calls == 0 else self._pending.rstrip())
        self._pending = ""
        return self._take()

    def _take(self) -> Reading:
        reading = Reading(text="".join(self._text), calls=self._calls)
        self._text, self._calls = [], []
        return reading

    def _add_text(self, text: str) -> None:
        if self.num_calls and not self._has_text:
            text = text.lstrip()
        if text:
            self._text.append(text)
            self._has_text = True

    # Each of these reads on in `_pending`, and says whether there may be more to do at once.

    def _read_text(self) -> bool:
        start = self._pending.find(CALL_OPEN)
        if start >= 0:
            self._add_text(self._pending[:start].rstrip())
            self._pending = self._pending[start + len(CALL_OPEN) :]
            self._state = self._read_header
            return True
        safe = self._pending[: len(self._pending) - _overlap(self._pending, CALL_OPEN)]
        core = len(safe.rstrip())
        cut = core if len(safe) - core <= _MAX_HELD_SPACE else len(safe)
        self._add_text(self._pending[:cut])
        self._pending = self._pending[cut:]
        return False

    def _read_header(self) -> bool:
        header = _HEADER.match(self._pending[:_MAX_HEADER_CHARS])
        if header is None:
            if CALL_CLOSE not in self._pending and len(self._pending) <= _MAX_HEADER_CHARS:
                return False
            self._body = []
            self._state = self._read_other
            return True
        try:
            name: str = msgspec.json.decode(header[1], type=str)
        except msgspec.DecodeError:
            self._body = []
            self._state = self._read_other
            return True
        self._begin_call(name)
        self._pending = self._pending[header.end() :]
        self._depth, self._is_in_string, self._is_escaped = 0, False, False
        self._state = self._read_arguments
        return True

    def _read_arguments(self) -> bool:
        end = self._end_of_arguments()
        piece = self._pending[:end]
        self._pending = self._pending[len(piece) :]
        if piece:
            self._calls.append(CallPiece(index=self.num_calls - 1, arguments=piece))
        if end is None:
            return False
        self._state = self._read_tail
        return True

    def _end_of_arguments(self) -> int | None:
        """Index behind the brace that closes the arguments, `None` if it is not there yet."""
        if self._is_escaped:
            position, self._is_escaped = 1, not self._pending
        else:
            position = 0
        while (found := _BRACES.search(self._pending, position)) is not None:
            position = found.end()
            sign = found[0]
            if sign == "\\":
                if self._is_in_string:
                    self._is_escaped = position == len(self._pending)
                    position += 1
            elif sign == '"':
                self._is_in_string = not self._is_in_string
            elif not self._is_in_string:
                self._depth += 1 if sign in "{[" else -1
                if self._depth == 0:
                    return position
        return None

    def _read_tail(self) -> bool:
        """What is between the arguments and the end of the call says nothing."""
        end = self._pending.find(CALL_CLOSE)
        if end < 0:
            self._pending = self._pending[len(self._pending) - _overlap(self._pending, CALL_CLOSE) :]
            return False
        self._pending = self._pending[end + len(CALL_CLOSE) :]
        self._has_text = False
        self._state = self._read_text
        return True

    def _read_other(self) -> bool:
        end = self._pending.find(CALL_CLOSE)
        cut = end if end >= 0 else len(self._pending) - _overlap(self._pending, CALL_CLOSE)
        self._body.append(self._pending[:cut])
        self._pending = self._pending[cut:]
        if end < 0:
            return False
        body, self._pending = "".join(self._body), self._pending[len(CALL_CLOSE) :]
        call = _decoded_call(body)
        if call is None:
            self._add_text(CALL_OPEN + body + CALL_CLOSE)
        else:
            self._begin_call(call[0])
            self._calls.append(CallPiece(index=self.num_calls - 1, arguments=call[1]))
            self._has_text = False
        self._state = self._read_text
        return True

    def _begin_call(self, name: str) -> None:
        self._calls.append(CallPiece(index=self.num_calls, name=name))
        self.num_calls += 1


def _decoded_call(body: str) -> tuple[str, str] | None:
    """Name and arguments of a call in any order of its fields; `None` if it is none."""
    try:
        call = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    return call["name"], arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()


def _overlap(text: str, mark: str) -> int:
    """Length of the longest proper beginning of `mark` with which `text` ends."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
