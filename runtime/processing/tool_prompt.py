"""Tells tools, calls and results to a model whose chat template knows none of them, in the family's (Hermes') format.

Knows messages as `ChatTemplate` takes them; no tokens. A template that knows tools renders them itself.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from runtime.processing.chat_template import OwnText

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"

# What the family's templates say when the conversation begins without a system message.
_DEFAULT_SYSTEM = "You are a helpful assistant."
# The words that Qwen2.5 was trained with (the chat template of its text models).
_BEFORE_TOOLS = (
    "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_AFTER_TOOLS = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)


def without_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> list[Mapping[str, Any]]:
    """The same conversation in messages that any template of the family renders.

    Tools go to the end of the system message, calls to the end of the assistant's, and results that follow one another
    become one message of the user.
    """
    told: list[Mapping[str, Any]] = []
    results: list[Mapping[str, Any]] = []
    for message in messages:
        if message.get("role") == "tool":
            if not results:
                told.append({"role": "user", "content": results})
            results += _result(message, is_first=not results)
            continue
        results = []
        told.append(_with_calls(message) if message.get("tool_calls") else message)
    if not tools:
        return told
    if told and told[0].get("role") == "system":
        return [{**told[0], "content": [*_parts(told[0].get("content")), *_tool_list(tools)]}, *told[1:]]
    return [{"role": "system", "content": [_own(_DEFAULT_SYSTEM), *_tool_list(tools)]}, *told]


def _tool_list(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    signatures = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
    return [_own(_BEFORE_TOOLS), {"type": "text", "text": signatures}, _own(_AFTER_TOOLS)]


def _with_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    parts = _parts(message.get("content"))
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = function["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        parts += [
            _own(f"\n{CALL_OPEN}\n" if parts else f"{CALL_OPEN}\n"),
            {"type": "text", "text": f'{{"name": {json.dumps(function["name"])}, "arguments": {text}}}'},
            _own(f"\n{CALL_CLOSE}"),
        ]
    return {"role": message["role"], "content": parts}


def _result(message: Mapping[str, Any], *, is_first: bool) -> list[Mapping[str, Any]]:
    start = "<tool_response>\n" if is_first else "\n<tool_response>\n"
    return [_own(start), *_parts(message.get("content")), _own("\n</tool_response>")]


def _parts(content: Any) -> list[Mapping[str, Any]]:
    if not content:
        return []
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _own(text: str) -> Mapping[str, Any]:
    return {"type": "text", "text": OwnText(text)}
