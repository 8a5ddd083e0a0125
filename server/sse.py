"""Prints chunks as server-sent events. Knows bytes; the JSON around a text is built once for each request.

No comments and no keep-alives: some clients lose the usage over them.
"""

from typing import Any

import msgspec

from server.completion import Chunk, Usage, logprobs_wire

HEADERS: tuple[tuple[str, str], ...] = (
    ("content-type", "text/event-stream; charset=utf-8"),
    ("cache-control", "no-cache"),
    ("x-accel-buffering", "no"),
)
DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


class ChunkPrinter:
    """Events of one completion, in OpenAI's order: a role for each choice, texts, ends, the usage if asked, `DONE`.

    `usage`: when given, every chunk has the key: null, or what it is so far with `continuous_usage`.
    """

    def __init__(
        self, *, completion_id: str, created: int, model: str, usage: Usage | None, continuous_usage: bool = False
    ) -> None:
        head = _encode({"id": completion_id, "object": "chat.completion.chunk", "created": created, "model": model})
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._usage = usage
        self._continuous_usage = continuous_usage and usage is not None
        self._tail = b"]}\n\n" if usage is None else b'],"usage":null}\n\n'

    def role(self, index: int) -> bytes:
        return self._event(b'{"index":%d,"delta":{"role":"assistant","content":""},%s' % (index, _OPEN))

    def chunk(self, chunk: Chunk) -> bytes:
        """An event for the text, one for each piece of a call, and one for the end if this is the choice's last."""
        events = b""
        if chunk.text or chunk.logprobs:
            logprobs = b"null" if chunk.logprobs is None else _encode(logprobs_wire(chunk.logprobs))
            events = self._event(
                b'{"index":%d,"delta":{"content":%s},"logprobs":%s,"finish_reason":null}'
                % (chunk.index, _encode(chunk.text), logprobs)
            )
        for call in chunk.calls:
            delta = {"function_call": call.wire()} if call.is_legacy else {"tool_calls": [call.wire()]}
            events += self._event(
                b'{"index":%d,"delta":%s,"logprobs":null,"finish_reason":null}' % (chunk.index, _encode(delta))
            )
        if chunk.finish_reason is not None:
            events += self._event(
                b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%s}'
                % (chunk.index, _encode(chunk.finish_reason))
            )
        return events

    def end(self) -> bytes:
        """The usage, which has no choices, and the end mark."""
        if self._usage is None:
            return DONE
        return self._head + b'],"usage":' + _encode(self._usage.wire()) + b"}\n\n" + DONE

    def _event(self, choice: bytes) -> bytes:
        if not self._continuous_usage:
            return self._head + choice + self._tail
        assert self._usage is not None
        return self._head + choice + b'],"usage":' + _encode(self._usage.wire()) + b"}\n\n"


_OPEN = b'"logprobs":null,"finish_reason":null}'


def error_event(body: bytes) -> bytes:
    """The last event of a stream that failed; no `DONE` follows."""
    return b"data: " + body + b"\n\n"


def parse_event(line: str) -> Any:
    """The JSON of one `data:` line, or None for the end mark and for lines that are no data."""
    if not line.startswith("data:"):
        return None
    data = line[5:].strip()
    return None if data == "[DONE]" else msgspec.json.decode(data)
