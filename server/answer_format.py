"""From `response_format`, `tools` and `tool_choice` to the grammar that binds an answer, and to how it is read.

Pure: writes a grammar, compiles none. Which tokens the vocabulary has for calls is all that it knows of a model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from runtime.processing.grammar import MAX_GRAMMAR_BYTES
from runtime.processing.json_grammar import json_answer, json_rule
from runtime.processing.tool_grammar import CallableTool, calls_only, json_or_calls, text_or_calls
from runtime.processing.tool_prompt import CALL_CLOSE, CALL_OPEN
from server.errors import InvalidRequestError
from server.schemas import ChatCompletionRequest
from server.tool_schemas import AllowedToolsChoice, Function, FunctionName, NamedTool, ResponseFormat


@dataclass(frozen=True, kw_only=True)
class AnswerFormat:
    """How an answer is bound and read.

    `tools` are told to the model; `may_call`: the output may hold calls, `only_calls`: and nothing else; `is_legacy`: a
    call is told as `function_call`. `param` is the field of the request from which the grammar comes.
    """

    grammar: str | None = None
    param: str = "response_format"
    tools: tuple[Mapping[str, Any], ...] = ()
    may_call: bool = False
    only_calls: bool = False
    is_legacy: bool = False


def call_tokens(added_ids: Mapping[str, int]) -> tuple[str, ...]:
    """The tokens in which calls are written, of a vocabulary that has both; else none, and they are written in
    letters."""
    return (CALL_OPEN, CALL_CLOSE) if CALL_OPEN in added_ids and CALL_CLOSE in added_ids else ()


def answer_format(request: ChatCompletionRequest, *, has_call_tokens: bool) -> AnswerFormat:
    """
    Raises:
        InvalidRequestError: a choice names a tool that is not there, two tools share a name, all of them are too large,
            or a call is required where there are no tools.
    """
    is_legacy = not request.tools and bool(request.functions)
    functions = [tool.function for tool in request.tools or ()] or list(request.functions or ())
    _check_names(functions, "functions" if is_legacy else "tools")
    _check_size(functions, "functions" if is_legacy else "tools")
    mode, names = _choice(request, is_legacy)
    if not functions:
        if mode == "required":
            raise InvalidRequestError("'tool_choice' asks for a call, but there are no 'tools'.", param="tool_choice")
        mode = "none"
    rule = _json_rule(request.response_format)
    if mode == "none":
        return AnswerFormat(grammar=None if rule is None else json_answer(rule))
    callable_tools = _callable_tools(functions, names)
    is_parallel = request.parallel_tool_calls is not False and not is_legacy and not (names and mode == "required")
    if isinstance(request.tool_choice, AllowedToolsChoice):
        is_parallel = request.parallel_tool_calls is not False
    if mode == "required":
        grammar = calls_only(callable_tools, is_parallel=is_parallel, has_tokens=has_call_tokens)
    elif rule is not None:
        grammar = json_or_calls(rule, callable_tools, is_parallel=is_parallel, has_tokens=has_call_tokens)
    else:
        grammar = text_or_calls(callable_tools, is_parallel=is_parallel, has_tokens=has_call_tokens)
    return AnswerFormat(
        grammar=grammar,
        param="functions" if is_legacy else "tools",
        tools=tuple(_told(function) for function in functions),
        may_call=True,
        only_calls=mode == "required",
        is_legacy=is_legacy,
    )


def _choice(request: ChatCompletionRequest, is_legacy: bool) -> tuple[str, tuple[str, ...]]:
    """`none`, `auto` or `required`, and the names among which to choose (none: all)."""
    choice = request.function_call if is_legacy else request.tool_choice
    if choice is None:
        return "auto", ()
    if isinstance(choice, str):
        return choice, ()
    if isinstance(choice, FunctionName):
        return "required", _known((choice.name,), request.functions or (), "function_call.name")
    functions = [tool.function for tool in request.tools or ()]
    if isinstance(choice, NamedTool):
        return "required", _known((choice.function.name,), functions, "tool_choice.function.name")
    names = tuple(tool.function.name for tool in choice.allowed_tools.tools)
    return choice.allowed_tools.mode, _known(names, functions, "tool_choice.allowed_tools.tools")


def _known(names: tuple[str, ...], functions: Sequence[Function], param: str) -> tuple[str, ...]:
    known = {function.name for function in functions}
    if not known.issuperset(names):
        raise InvalidRequestError(f"'{param}' names a function that is not there.", param=param)
    return names


def _check_names(functions: Sequence[Function], param: str) -> None:
    seen: set[str] = set()
    for index, function in enumerate(functions):
        if function.name in seen:
            path = f"{param}[{index}].name" if param == "functions" else f"{param}[{index}].function.name"
            raise InvalidRequestError("Two functions have the same name.", param=path)
        seen.add(function.name)


def _check_size(functions: Sequence[Function], param: str) -> None:
    """As large as a grammar may be, also for tools that are not to be called: the responses API tells them again."""
    num_bytes = sum(len(msgspec.json.encode(function.parameters)) for function in functions if function.parameters)
    if num_bytes > MAX_GRAMMAR_BYTES:
        message = (
            f"The parameters of '{param}' have {num_bytes} bytes together; at most {MAX_GRAMMAR_BYTES} are accepted."
        )
        raise InvalidRequestError(message, param=param)


def _callable_tools(functions: Sequence[Function], names: tuple[str, ...]) -> list[CallableTool]:
    return [
        CallableTool(
            name=function.name,
            parameters=_parameters(function),
            is_strict=bool(function.strict),
        )
        for function in functions
        if not names or function.name in names
    ]


def _parameters(function: Function) -> Mapping[str, Any]:
    if function.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **function.parameters}


def _told(function: Function) -> Mapping[str, Any]:
    """A tool as the model is told of it."""
    told: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        told["description"] = function.description
    told["parameters"] = (
        function.parameters if function.parameters is not None else {"type": "object", "properties": {}}
    )
    return {"type": "function", "function": told}


def _json_rule(response_format: ResponseFormat | None) -> str | None:
    if response_format is None or response_format.type == "text":
        return None
    if response_format.json_schema is None or response_format.json_schema.schema_ is None:
        return json_rule({"type": "object"}, is_strict=True)
    return json_rule(response_format.json_schema.schema_, is_strict=bool(response_format.json_schema.strict))
