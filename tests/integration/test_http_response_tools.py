"""Functions in the responses API over HTTP on a fake engine: items, events, and that it is chat in other words."""

import json
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage
from pydantic import BaseModel

from tests.http_server import MODEL, ReplayText, RunningServer, chat
from tests.integration.test_http_responses import respond, stream_events
from tests.integration.test_http_tools import CALL, OTHER_CALL

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "The weather at a place.",
    "parameters": {
        "type": "object",
        "properties": {"place": {"type": "string"}},
        "required": ["place"],
        "additionalProperties": False,
    },
    "strict": True,
}
TIME: dict[str, Any] = {"type": "function", "name": "time"}
ARGUMENTS = '{"place": "Ulm"}'


def nested(tool: dict[str, Any]) -> dict[str, Any]:
    """The same tool as chat says it."""
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def answer_of(server: RunningServer, *, stream: bool = False, **fields: Any) -> dict[str, Any]:
    response = respond(server, stream=stream, **fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = stream_events(response.text)[-1]["response"] if stream else response.json()
    return answer


def test_official_client_gets_a_call(client: openai.OpenAI, replay_text: ReplayText) -> None:
    replay_text(CALL)
    tools: Any = [WEATHER, TIME]
    response = client.responses.create(model=MODEL, input="How is it in Ulm?", tools=tools)
    (call,) = response.output
    assert isinstance(call, ResponseFunctionToolCall)
    assert (call.name, call.arguments, call.status) == ("weather", ARGUMENTS, "completed")
    assert call.call_id.startswith("call_")
    assert call.id is not None
    assert call.id.startswith("fc_")
    assert (response.status, response.output_text) == ("completed", "")
    assert [tool.type for tool in response.tools] == ["function", "function"]
    assert response.tool_choice == "auto"
    assert response.parallel_tool_calls is True


@pytest.mark.parametrize("stream", [False, True])
def test_text_comes_before_calls(server: RunningServer, replay_text: ReplayText, stream: bool) -> None:
    replay_text(f"Let me see.\n{CALL}\n{OTHER_CALL}")
    answer = answer_of(server, tools=[WEATHER, TIME], stream=stream)
    message, first, second = answer["output"]
    assert message["content"][0]["text"] == "Let me see."
    assert [(item["type"], item["name"], item["arguments"]) for item in (first, second)] == [
        ("function_call", "weather", ARGUMENTS),
        ("function_call", "time", "{}"),
    ]
    assert len({item["id"] for item in answer["output"]}) == 3
    assert len({first["call_id"], second["call_id"]}) == 2
    assert {item["status"] for item in answer["output"]} == {answer["status"]} == {"completed"}


def test_sequence_of_events_is_exact(server: RunningServer, replay_text: ReplayText) -> None:
    replay_text(f"See:\n{CALL}\n{OTHER_CALL}")
    events = stream_events(respond(server, tools=[WEATHER, TIME], stream=True).text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    once = [kind for number, kind in enumerate(kinds) if kind != (kinds[number - 1] if number else None)]
    call = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert once == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        *call,
        *call,
        "completed",
    ]
    output = events[-1]["response"]["output"]
    added = [event for event in events if event["type"] == "response.output_item.added"]
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["output_index"] for event in added] == [event["output_index"] for event in done] == [0, 1, 2]
    assert [event["item"]["status"] for event in added] == ["in_progress"] * 3
    assert added[1]["item"] == {**output[1], "arguments": "", "status": "in_progress"}
    assert [event["item"] for event in done] == output
    deltas = [event for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(delta["delta"] for delta in deltas if delta["output_index"] == 1) == ARGUMENTS
    assert len([delta for delta in deltas if delta["output_index"] == 1]) > 3
    for event in events:
        if "item_id" in event:
            assert event["item_id"] == output[event["output_index"]]["id"]
    assert [event["arguments"] for event in events if event["type"].endswith("arguments.done")] == [ARGUMENTS, "{}"]


def test_stream_helper_of_the_official_client_parses_calls(client: openai.OpenAI, replay_text: ReplayText) -> None:
    replay_text(f"See:\n{CALL}\n{OTHER_CALL}")
    tools: Any = [WEATHER, TIME]
    with client.responses.stream(model=MODEL, input="How is it in Ulm?", tools=tools) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds
    message, weather, time = final.output
    assert isinstance(message, ResponseOutputMessage)
    assert final.output_text == "See:"
    assert weather.type == "function_call"
    assert weather.parsed_arguments == {"place": "Ulm"}
    assert time.type == "function_call"
    assert time.name == "time"


class Place(BaseModel):
    place: str


def test_official_client_parses_a_format(client: openai.OpenAI, replay_text: ReplayText) -> None:
    replay_text(ARGUMENTS)
    response = client.responses.parse(model=MODEL, input="Where?", text_format=Place)
    assert response.output_parsed == Place(place="Ulm")


def test_conversation_with_calls_equals_that_of_chat(server: RunningServer) -> None:
    """Text and calls of one turn are one message there; tools, their results and the grammar are the same."""
    items = [
        {"role": "user", "content": "Ulm and the time?"},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {
            "type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
            "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "a", "name": "weather", "arguments": ARGUMENTS},
        {"type": "function_call", "call_id": "b", "name": "time", "arguments": "{}", "status": "completed"},
        {"type": "function_call_output", "call_id": "a", "output": "Rain."},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "Noon."}]},
        {"type": "function_call", "call_id": "c", "name": "time", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "One."},
    ]  # fmt: skip
    assert respond(server, items, tools=[WEATHER, TIME], parallel_tool_calls=False).status_code == 200
    calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, name, arguments in (("a", "weather", ARGUMENTS), ("b", "time", "{}"), ("c", "time", "{}"))
    ]
    messages = [
        {"role": "user", "content": "Ulm and the time?"},
        {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}], "tool_calls": calls[:2]},
        {"role": "tool", "tool_call_id": "a", "content": "Rain."},
        {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "Noon."}]},
        {"role": "assistant", "tool_calls": calls[2:]},
        {"role": "tool", "tool_call_id": "c", "content": "One."},
    ]
    body = chat(tools=[nested(WEATHER), nested(TIME)], parallel_tool_calls=False)
    assert server.post({**body, "messages": messages}).status_code == 200
    first, second = server.engine.requests
    assert first.prompt_token_ids == second.prompt_token_ids
    assert first.sampling.grammar is not None
    assert first.sampling == second.sampling


NAMED = {"type": "function", "name": "time"}
CHOICES: dict[str, tuple[Any, Any]] = {
    "none": ("none", "none"),
    "auto": ("auto", "auto"),
    "null": (None, None),
    "required": ("required", "required"),
    "named": (NAMED, {"type": "function", "function": {"name": "time"}}),
    "allowed": (
        {"type": "allowed_tools", "mode": "required", "tools": [NAMED]},
        {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "time"}}]},
        },
    ),
}


@pytest.mark.parametrize("name", CHOICES)
def test_choice_binds_as_in_chat_and_is_told_as_it_was_made(server: RunningServer, name: str) -> None:
    own, chats = CHOICES[name]
    answer = answer_of(server, tools=[WEATHER, TIME], tool_choice=own)
    assert answer["tool_choice"] == (own or "auto")
    assert server.post(chat("Hello", tools=[nested(WEATHER), nested(TIME)], tool_choice=chats)).status_code == 200
    first, second = server.engine.requests
    assert first.sampling.grammar == second.sampling.grammar
    assert (first.sampling.grammar is None) == (name == "none")
    assert first.prompt_token_ids == second.prompt_token_ids


def test_tools_are_told_again(server: RunningServer) -> None:
    answer = answer_of(server, tools=[WEATHER, TIME], parallel_tool_calls=False)
    assert answer["tools"] == [WEATHER, {**TIME, "parameters": None, "strict": False}]
    assert answer["parallel_tool_calls"] is False


@pytest.mark.parametrize("stream", [False, True])
def test_cut_call_is_incomplete(server: RunningServer, replay_text: ReplayText, stream: bool) -> None:
    replay_text(f"See:\n{CALL[:-25]}", finish_reason="length")
    answer = answer_of(server, tools=[WEATHER], stream=stream)
    message, call = answer["output"]
    assert (answer["status"], message["status"], call["status"]) == ("incomplete", "completed", "incomplete")
    assert ARGUMENTS.startswith(call["arguments"])


def test_without_a_call_the_answer_is_a_message(server: RunningServer, replay_text: ReplayText) -> None:
    replay_text("No need.")
    (message,) = answer_of(server, tools=[WEATHER])["output"]
    assert message["content"][0]["text"] == "No need."
    replay_text(CALL)
    (message,) = answer_of(server, tools=[WEATHER], tool_choice="none")["output"]
    assert message["content"][0]["text"] == CALL


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_those_of_the_text(server: RunningServer, replay_text: ReplayText, stream: bool) -> None:
    replay_text(f"See:\n{CALL}")
    answer = answer_of(server, tools=[WEATHER], top_logprobs=1, stream=stream)
    message, _ = answer["output"]
    text = "".join(entry["token"] for entry in message["content"][0]["logprobs"])
    assert text.startswith("See:")


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    "no name": ({"tools": [WEATHER, {"type": "function"}]}, "tools[1].name"),
    "bad name": ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    "same name": ({"tools": [WEATHER, TIME, WEATHER]}, "tools[2].name"),
    "parameters": ({"tools": [{**TIME, "parameters": {"type": "string"}}]}, "tools[0].parameters.type"),
    "schema": ({"tools": [{**TIME, "parameters": {"$ref": "#/no/such"}}]}, "tools"),
    "too many": ({"tools": [{**TIME, "name": f"f{number}"} for number in range(129)]}, "tools"),
    "unknown choice": ({"tools": [TIME], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
    "unknown allowed": (
        {"tools": [TIME], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{**NAMED, "name": "f"}]}},
        "tool_choice.tools",
    ),
    "built-in choice": ({"tools": [TIME], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    "word": ({"tools": [TIME], "tool_choice": "some"}, "tool_choice"),
    "required without": ({"tool_choice": "required"}, "tool_choice"),
    "call without id": ({"input": [{"type": "function_call", "name": "f", "arguments": ""}]}, "input[0].call_id"),
    "output without": ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output"),
    "output null": (
        {"input": [{"type": "function_call_output", "call_id": "a", "output": None}]},
        "input[0].output",
    ),
    "picture in output": (
        {
            "input": [
                {
                    "type": "function_call_output",
                    "call_id": "a",
                    "output": [
                        {"type": "input_text", "text": "x"},
                        {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
                    ],
                }
            ]
        },
        "input[0].output[1].type",
    ),
    "too many calls": (
        {"input": [{"type": "function_call", "call_id": str(n), "name": "f", "arguments": "{}"} for n in range(129)]},
        "input[128]",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_is_named(server: RunningServer, name: str) -> None:
    fields, param = BAD[name]
    response = server.post({"model": MODEL, "input": "x", **fields}, "/v1/responses")
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param), json.dumps(error)
