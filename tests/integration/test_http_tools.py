"""Tools over HTTP on a fake engine: what the wire shows of an output that calls, and what of the request binds it."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from runtime.processing.tokenizer import Tokenizer
from tests.fake_engine import FakeEngineClient, Replay
from tests.http_server import MODEL, ReplayText, RunningServer, chat, events, running_server

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather at a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}},
            "required": ["place"],
            "additionalProperties": False,
        },
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "time"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Ulm"}}\n</tool_call>'
OTHER_CALL = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'


def message_of(server: RunningServer, **fields: Any) -> dict[str, Any]:
    response = server.post(chat(**fields))
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return {**choice["message"], "finish_reason": choice["finish_reason"]}


def test_call_is_told(server: RunningServer, replay_text: ReplayText) -> None:
    replay_text(CALL)
    message = message_of(server, tools=[WEATHER])
    ((call),) = message["tool_calls"]
    assert message["content"] is None
    assert message["finish_reason"] == "tool_calls"
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    assert call["function"] == {"name": "weather", "arguments": '{"place": "Ulm"}'}


def test_text_and_several_calls(server: RunningServer, replay_text: ReplayText) -> None:
    replay_text(f"Let me see.\n{CALL}\n{OTHER_CALL}")
    message = message_of(server, tools=[WEATHER, TIME])
    assert message["content"] == "Let me see."
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather", "time"]
    assert len({call["id"] for call in message["tool_calls"]}) == 2


def test_answer_without_a_call_has_none(server: RunningServer, replay_text: ReplayText) -> None:
    replay_text("No need.")
    message = message_of(server, tools=[WEATHER])
    assert "tool_calls" not in message
    assert (message["content"], message["finish_reason"]) == ("No need.", "stop")


@pytest.mark.parametrize("fields", [{}, {"tools": [WEATHER], "tool_choice": "none"}, {"tools": []}])
def test_without_tools_calls_are_text(server: RunningServer, replay_text: ReplayText, fields: dict[str, Any]) -> None:
    replay_text(CALL)
    message = message_of(server, **fields)
    assert (message["content"], message["finish_reason"]) == (CALL, "stop")


def test_cut_call_ends_with_length(server: RunningServer, replay_text: ReplayText) -> None:
    replay_text(CALL[:-25], finish_reason="length")
    message = message_of(server, tools=[WEATHER])
    assert message["finish_reason"] == "length"
    assert '{"place": "Ulm"}'.startswith(message["tool_calls"][0]["function"]["arguments"])


REQUIRED: list[dict[str, Any]] = [
    {"tool_choice": "required"},
    {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", REQUIRED)
@pytest.mark.parametrize("cut", range(0, CALL.index(', "arguments"') + 3, 7))
def test_beginning_of_a_call_that_must_come_is_no_text(
    server: RunningServer, replay_text: ReplayText, cut: int, fields: dict[str, Any], stream: bool
) -> None:
    replay_text(CALL[:cut] if cut else "<", finish_reason="length")
    response = server.post(chat(tools=[WEATHER], stream=stream, **fields))
    if stream:
        choices = [chunk["choices"][0] for chunk in events(response.text)[:-1]]
        assert "".join(choice["delta"].get("content", "") for choice in choices) == ""
        assert choices[-1]["finish_reason"] == "length"
    else:
        (choice,) = response.json()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    # Where text may come too, it is what was written.
    assert message_of(server, tools=[WEATHER])["content"] == (CALL[:cut] if cut else "<")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("cut", range(1, len(OTHER_CALL) - 30))
def test_cut_second_call_leaves_nothing_in_the_text(
    server: RunningServer, replay_text: ReplayText, cut: int, stream: bool
) -> None:
    replay_text(f"{CALL}\n{OTHER_CALL[:cut]}", finish_reason="length")
    response = server.post(chat(tools=[WEATHER, TIME], stream=stream))
    if stream:
        deltas = [chunk["choices"][0]["delta"] for chunk in events(response.text)[:-1]]
        assert "".join(delta.get("content", "") for delta in deltas) == ""
    else:
        message = response.json()["choices"][0]["message"]
        assert (message["content"], len(message["tool_calls"])) == (None, 1)


def test_streamed_deltas(server: RunningServer, replay_text: ReplayText) -> None:
    replay_text(f"See:\n{CALL}\n{OTHER_CALL}")
    *chunks, end = events(server.post(chat(tools=[WEATHER, TIME], stream=True)).text)
    assert end == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]
    deltas = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
    first = [delta for delta in deltas if delta["index"] == 0]
    assert set(first[0]) == {"index", "id", "type", "function"}
    assert first[0]["function"] == {"name": "weather", "arguments": ""}
    assert all(set(delta) == {"index", "function"} and set(delta["function"]) == {"arguments"} for delta in first[1:])
    assert len(first) > 3
    assert "".join(delta["function"]["arguments"] for delta in first) == '{"place": "Ulm"}'
    assert [delta["function"]["name"] for delta in deltas if delta["index"] == 1 and "id" in delta] == ["time"]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "See:"
    assert choices[-1] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "tool_calls"}


def test_stream_helper_of_the_official_client_collects_calls(client: openai.OpenAI, replay_text: ReplayText) -> None:
    replay_text(f"{CALL}\n{OTHER_CALL}")
    tools: Any = [{**WEATHER, "function": {**WEATHER["function"], "strict": True}}, TIME]
    with client.chat.completions.stream(**chat(), tools=tools) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.delta" in kinds
    assert kinds.count("tool_calls.function.arguments.done") == 2
    assert message.role == "assistant"
    assert message.tool_calls is not None
    assert message.tool_calls[0].function.parsed_arguments == {"place": "Ulm"}
    assert message.tool_calls[1].function.name == "time"


def test_choices_have_calls_of_their_own(server: RunningServer, tokenizer: Tokenizer) -> None:
    texts = {"0": CALL, "1": "None.", "2": OTHER_CALL}
    server.engine.script = lambda request: Replay(
        token_ids=tokenizer.encode(texts[request.request_id[-1]], allow_special=False)
    )
    choices = server.post(chat(tools=[WEATHER, TIME], n=3)).json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["tool_calls", "stop", "tool_calls"]


def test_whole_conversation_with_tools(
    server: RunningServer, client: openai.OpenAI, tokenizer: Tokenizer, replay_text: ReplayText
) -> None:
    replay_text(CALL)
    tools: Any = [WEATHER]
    messages: list[Any] = [{"role": "user", "content": "How is the weather in Ulm?"}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=tools).choices[0].message
    assert answer.tool_calls
    messages += [answer, {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "Fine."}]
    replay_text("It is fine.")
    assert client.chat.completions.create(model=MODEL, messages=messages, tools=tools).choices[0].message.content
    prompt = tokenizer.decode(server.engine.requests[-1].prompt_token_ids)
    assert CALL in prompt
    assert "<tool_response>\nFine.\n</tool_response>" in prompt
    assert prompt.index("<tools>") < prompt.index("How is the weather")


def test_older_words_for_tools(server: RunningServer, tokenizer: Tokenizer, replay_text: ReplayText) -> None:
    replay_text(CALL)
    functions = [WEATHER["function"]]
    message = message_of(server, functions=functions, function_call={"name": "weather"})
    assert message["function_call"] == {"name": "weather", "arguments": '{"place": "Ulm"}'}
    assert "tool_calls" not in message
    assert message["finish_reason"] == "function_call"
    chunks = events(server.post(chat(functions=functions, stream=True)).text)[:-1]
    deltas = [chunk["choices"][0]["delta"].get("function_call") for chunk in chunks]
    told = [delta for delta in deltas if delta is not None]
    assert told[0] == {"name": "weather", "arguments": ""}
    assert "".join(delta["arguments"] for delta in told) == '{"place": "Ulm"}'
    body = {"model": MODEL, "functions": functions, "messages": [
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "content": None, "function_call": message["function_call"]},
        {"role": "function", "name": "weather", "content": "Fine."},
    ]}  # fmt: skip
    assert server.post(body).status_code == 200
    assert "Fine." in tokenizer.decode(server.engine.requests[-1].prompt_token_ids)


@pytest.mark.parametrize(
    ("fields", "bound", "free"),
    [
        ({"tool_choice": "auto"}, ["TEXT", "weather", "time"], []),
        ({}, ["TEXT", "weather", "time", "{0,15}"], []),
        ({"parallel_tool_calls": False}, ["TEXT"], ["{0,15}"]),
        ({"tool_choice": "required"}, ["weather", "time", "{0,15}"], ["TEXT"]),
        ({"tool_choice": {"type": "function", "function": {"name": "time"}}}, ["time"], ["TEXT", "weather", "{0,15}"]),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TIME]}}},
            ["time", "{0,15}"],
            ["TEXT", "weather"],
        ),
        ({"response_format": {"type": "json_object"}}, ["answer: %json", "weather"], ["TEXT"]),
    ],
)
def test_choice_of_tools_binds_the_output(
    server: RunningServer, fields: dict[str, Any], bound: list[str], free: list[str]
) -> None:
    assert server.post(chat(tools=[WEATHER, TIME], **fields)).status_code == 200
    grammar = server.engine.requests[-1].sampling.grammar
    assert grammar is not None
    assert all(part in grammar for part in bound)
    assert not any(part in grammar for part in free)


def test_plain_requests_have_no_grammar(server: RunningServer) -> None:
    for fields in ({}, {"response_format": {"type": "text"}}, {"tools": [WEATHER], "tool_choice": "none"}):
        assert server.post(chat(**fields)).status_code == 200
        assert server.engine.requests[-1].sampling.grammar is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "tim"}}},
            "tool_choice.function.name",
        ),
        ({"functions": [WEATHER["function"]], "function_call": {"name": "tim"}}, "function_call.name"),
    ],
)
def test_choices_that_cannot_be_are_refused(server: RunningServer, fields: dict[str, Any], param: str) -> None:
    response = server.post(chat(**fields))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert not server.engine.requests


def recursion(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


UNSERVABLE: dict[str, tuple[dict[str, Any], str]] = {
    "a pattern of look-ahead": ({"type": "string", "pattern": "^(?=secret).*$"}, "look-around"),
    "a pattern that is none": ({"type": "string", "pattern": "(secret"}, "regular expression"),
    "a type that is none": ({"type": "secret"}, "type is none"),
    "a reference to itself": ({"$ref": "#"}, "satisfy"),
    "references in a circle": (
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "satisfy"
    ),
    "a reference to a host": ({"$ref": "http://127.0.0.1:9/secret"}, "out of the schema"),
    "a reference to a file": ({"$ref": "file:///etc/passwd"}, "out of the schema"),
    "nothing satisfies it": ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "satisfy"),
    "too many alternatives": (
        {"allOf": [{"anyOf": [{"properties": {f"a{i}{j}": {}}} for j in range(10)]} for i in range(8)]},
        "too large",
    ),
    "too many bytes": ({"enum": ["x" * 1000 + str(i) for i in range(300)]}, "too large"),
    "too many properties": ({"properties": {f"p{i}": {} for i in range(1500)}, "type": "object"}, "too"),
    "a keyword that is not enforced": ({"type": "array", "uniqueItems": True}, "cannot be enforced"),
    "nested too deep": (recursion(70), "deeper than"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSERVABLE)
def test_schema_that_cannot_be_kept_is_refused(server: RunningServer, name: str) -> None:
    schema, reason = UNSERVABLE[name]
    strict = {"name": "n", "strict": True, "schema": schema}
    response = server.post(chat(response_format={"type": "json_schema", "json_schema": strict}, stream=True))
    assert response.status_code == 400
    error = response.json()["error"]
    assert reason in error["message"]
    assert error["param"] in ("response_format", None)
    assert "secret" not in response.text
    assert not server.engine.requests
    function = {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {"x": schema}}}
    response = server.post(chat(tools=[{"type": "function", "function": function}]))
    # What refers to the root of the schema, or may be left away, is something else here.
    assert response.status_code in (200, 400)
    assert "secret" not in response.text


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "(a+)+$"},
        {"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$"},
        {"type": "string", "pattern": "^((((a{1,100}){1,100}){1,100}){1,100})$"},
        {"type": "string", "pattern": "^(.*a.{200}b.*|.*c.{300}d)$"},
        {"type": "string", "minLength": 10**7},
        {"type": "array", "items": {"type": "integer"}, "maxItems": 10**9},
        {"type": "integer", "multipleOf": 7919},
        {"$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(28)}
            | {"d28": {"type": "object"}}, "$ref": "#/$defs/d0"},
    ],
)  # fmt: skip
def test_hostile_schema_is_answered_one_way_or_the_other(server: RunningServer, schema: dict[str, Any]) -> None:
    wanted = {"name": "n", "schema": schema}
    response = server.post(chat(response_format={"type": "json_schema", "json_schema": wanted}))
    assert response.status_code in (200, 400)


def test_lenient_schema_leaves_to_the_model_what_cannot_be_enforced(server: RunningServer) -> None:
    schema = {"type": "array", "uniqueItems": True, "items": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}
    for strict, status in ((None, 200), (False, 200), (True, 400)):
        wanted = {"name": "n", "schema": schema, "strict": strict}
        assert server.post(chat(response_format={"type": "json_schema", "json_schema": wanted})).status_code == status


def test_options_of_the_grammar_library_are_not_the_clients(server: RunningServer) -> None:
    schema = {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True, "whitespace_pattern": "(secret)*"}}
    wanted = {"name": "n", "schema": schema, "strict": True}
    assert server.post(chat(response_format={"type": "json_schema", "json_schema": wanted})).status_code == 400
    wanted["strict"] = False
    assert server.post(chat(response_format={"type": "json_schema", "json_schema": wanted})).status_code == 200
    assert "secret" not in (server.engine.requests[-1].sampling.grammar or "")


def test_worker_that_dies_is_replaced(server: RunningServer) -> None:
    checker = server.service._grammars

    def post(number: int) -> int:
        wanted = {"name": "n", "schema": {"const": number}}
        return server.post(chat(response_format={"type": "json_schema", "json_schema": wanted})).status_code

    assert post(1) == 200
    first = checker.pid
    assert first is not None
    checker._worker.kill()
    assert post(2) == 200
    assert checker.pid not in (first, None)


def test_grammar_that_takes_too_long_is_refused_and_the_next_is_not(tiny_checkpoint: Path) -> None:
    with running_server(tiny_checkpoint, FakeEngineClient()) as server:
        checker = server.service._grammars

        def post(number: int) -> int:
            wanted = {"name": "n", "schema": {"const": number}}
            return server.post(chat(response_format={"type": "json_schema", "json_schema": wanted})).status_code

        checker._timeout_seconds = 0.0
        assert post(1) == 400
        checker._timeout_seconds = 30.0
        assert post(1) == 200


def test_openapi_names_the_fields(server: RunningServer) -> None:
    document = server.get("/openapi.json").json()
    fields = document["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert {"tools", "tool_choice", "response_format", "functions"} <= set(fields)
    assert "FunctionTool" in json.dumps(fields["tools"]) or "Tool" in json.dumps(fields["tools"])
