"""Grammars of outputs that call tools: with text before the calls, or calls only. Writes text; compiles nothing."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.processing.json_grammar import json_rule
from runtime.processing.tool_prompt import CALL_CLOSE, CALL_OPEN

# Calls in one answer: a model that has begun to call must not go on for ever.
MAX_CALLS = 16

_TEXT = "TEXT: /(.|\\n)*/\n"


@dataclass(frozen=True, kw_only=True)
class CallableTool:
    """A tool as the grammar sees it: `parameters` is a JSON schema of an object."""

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool


def calls_only(tools: Sequence[CallableTool], *, is_parallel: bool, has_tokens: bool) -> str:
    """One call at least, and nothing else.

    Args:
        is_parallel: there may be several calls.
        has_tokens: the vocabulary has `<tool_call>` and `</tool_call>` as tokens.
    """
    return f"start: {_calls(is_parallel)}\n{_call_rules(tools, has_tokens)}"


def text_or_calls(tools: Sequence[CallableTool], *, is_parallel: bool, has_tokens: bool) -> str:
    """Any text, with calls behind it or without; see `calls_only`."""
    rules = _call_rules(tools, has_tokens) + _TEXT
    if has_tokens:
        return f"start: TEXT ({_calls(is_parallel)})?\n{rules}"
    more = _more_calls(is_parallel)
    # The text ends where the letters of the opening are complete.
    return f"start: TEXT | first rest{more}\nfirst[lazy]: TEXT {json.dumps(CALL_OPEN)}\n{rules}"


def json_or_calls(rule: str, tools: Sequence[CallableTool], *, is_parallel: bool, has_tokens: bool) -> str:
    """What `rule` (of `json_rule`) describes, or calls; see `calls_only`."""
    return f"start: answer | {_calls(is_parallel)}\nanswer: {rule}\n{_call_rules(tools, has_tokens)}"


def _calls(is_parallel: bool) -> str:
    return f"call{_more_calls(is_parallel)}"


def _more_calls(is_parallel: bool) -> str:
    return f' ("\\n" call){{0,{MAX_CALLS - 1}}}' if is_parallel else ""


def _call_rules(tools: Sequence[CallableTool], has_tokens: bool) -> str:
    opening, closing = (CALL_OPEN, CALL_CLOSE) if has_tokens else (json.dumps(CALL_OPEN), json.dumps(CALL_CLOSE))
    rules = [f'call: {opening} rest\nrest: "\\n" body "\\n" {closing}\n']
    rules.append("body: " + " | ".join(f"body_{index}" for index in range(len(tools))) + "\n")
    for index, tool in enumerate(tools):
        start = json.dumps(f'{{"name": {json.dumps(tool.name)}, "arguments": ')
        arguments = json_rule(tool.parameters, is_strict=tool.is_strict)
        rules.append(f'body_{index}: {start} {arguments} "}}"\n')
    return "".join(rules)
