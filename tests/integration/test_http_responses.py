"""The responses API over HTTP on a fake engine: the official client, and the exact sequence of events."""

import json
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseOutputMessage

from tests.fake_engine import Replay
from tests.http_server import MODEL, ReplayText, RunningServer, chat, data_url, image_part, picture


@pytest.fixture
def server(server: RunningServer, replay_text: ReplayText) -> RunningServer:
    replay_text("A red square.")
    return server


def respond(server: RunningServer, given: Any = "Hello", **fields: Any) -> Any:
    return server.post({"model": MODEL, "input": given, **fields}, "/v1/responses")


def image_input(url: str | None = None) -> list[dict[str, Any]]:
    part = {"type": "input_image", "image_url": url or data_url(picture()), "detail": "auto"}
    return [{"role": "user", "content": [part, {"type": "input_text", "text": "What is it?"}]}]


def stream_events(text: str) -> list[dict[str, Any]]:
    """The events; the name of each must be its data's type."""
    found = []
    for block in text.split("\n\n"):
        if block:
            name, data = block.split("\n")
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            found.append(event)
    return found


def test_official_client_creates_a_response(server: RunningServer, client: openai.OpenAI) -> None:
    response = client.responses.create(
        model=MODEL, input="What is it?", instructions="Be brief.", temperature=0.5, metadata={"a": "b"}, store=True
    )
    assert response.output_text == "A red square."
    assert (response.object, response.status, response.error) == ("response", "completed", None)
    assert response.id.startswith("resp_")
    (message,) = response.output
    assert isinstance(message, ResponseOutputMessage)
    assert (message.role, message.status) == ("assistant", "completed")
    assert response.instructions == "Be brief."
    assert response.metadata == {"a": "b"}
    assert response.temperature == 0.5
    usage = response.usage
    assert usage is not None
    (request,) = server.engine.requests
    assert usage.input_tokens == len(request.prompt_token_ids)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens_details.reasoning_tokens == 0


def test_official_client_streams_events(server: RunningServer, client: openai.OpenAI) -> None:
    events = list(client.responses.create(model=MODEL, input=image_input(), stream=True))  # type: ignore[arg-type]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "A red square."
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == "A red square."


def test_stream_helper_of_the_official_client(server: RunningServer, client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="What is it?") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert final.output_text == "A red square."
    assert final.usage is not None


def test_sequence_of_events_is_exact(server: RunningServer) -> None:
    response = respond(server, stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = stream_events(response.text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"] for event in events]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * len(deltas),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    created, done = events[0]["response"], events[-1]["response"]
    assert (created["status"], created["output"], created["usage"]) == ("in_progress", [], None)
    assert (created["id"], created["created_at"]) == (done["id"], done["created_at"])
    item_ids = {event["item_id"] for event in events if "item_id" in event}
    assert item_ids == {events[2]["item"]["id"]} == {done["output"][0]["id"]}
    assert events[-2]["item"] == done["output"][0]
    assert events[-4]["text"] == "A red square."
    whole = respond(server).json()
    assert whole.keys() == done.keys()
    for name in whole.keys() - {"id", "created_at", "completed_at", "output"}:
        assert whole[name] == done[name]


@pytest.mark.parametrize("stream", [False, True])
def test_running_out_of_tokens_is_incomplete(server: RunningServer, stream: bool) -> None:
    response = respond(server, max_output_tokens=2, stream=stream)
    if stream:
        last = stream_events(response.text)[-1]
        assert last["type"] == "response.incomplete"
        answer = last["response"]
    else:
        answer = response.json()
    assert answer["status"] == answer["output"][0]["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["usage"]["output_tokens"] == 2


def test_prompt_equals_that_of_chat(server: RunningServer) -> None:
    """It is the same request in other words, pictures, instructions and earlier turns included."""
    earlier = [
        {"type": "message", "role": "user", "content": "Hi"},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {
            "type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
            "content": [{"type": "output_text", "text": "Hello.", "annotations": [], "logprobs": []}],
        },
    ]  # fmt: skip
    assert respond(server, [*earlier, *image_input()], instructions="Be brief.").status_code == 200
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": [image_part(), {"type": "text", "text": "What is it?"}]},
    ]
    assert server.post({"model": MODEL, "messages": messages}).status_code == 200
    first, second = server.engine.requests
    assert first.prompt_token_ids == second.prompt_token_ids
    assert first.images == second.images
    assert first.sampling == second.sampling
    assert respond(server, "Hi").status_code == 200
    assert server.post(chat("Hi")).status_code == 200
    assert server.engine.requests[2].prompt_token_ids == server.engine.requests[3].prompt_token_ids


def test_usage_tells_picture_tokens(server: RunningServer) -> None:
    details = respond(server, image_input()).json()["usage"]["input_tokens_details"]
    assert details["image_tokens"] == 4
    assert details["cached_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_come_when_they_are_included(server: RunningServer, stream: bool) -> None:
    response = respond(server, include=["message.output_text.logprobs"], top_logprobs=2, stream=stream)
    answer = stream_events(response.text)[-1]["response"] if stream else response.json()
    entries = answer["output"][0]["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in entries) == "A red square."
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    assert respond(server).json()["output"][0]["content"][0]["logprobs"] == []


BAD = {
    "previous response": ({"previous_response_id": "resp_1"}, "previous_response_id"),
    "conversation": ({"conversation": "conv_1"}, "conversation"),
    "background": ({"background": True}, "background"),
    "stored prompt": ({"prompt": {"id": "p"}}, "prompt"),
    "text format": ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    "no schema": ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    "unknown schema": (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"$ref": "#/no/such"}}}},
        "text.format",
    ),
    "reference": ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
    "shell call": ({"input": [{"type": "local_shell_call", "call_id": "1"}]}, "input[0].type"),
    "no item": ({"input": ["x"]}, "input[0]"),
    "reasoning only": ({"input": [{"type": "reasoning", "id": "rs_1", "summary": []}]}, "input"),
    "too many items": ({"input": [{"role": "user", "content": "x"}] * 4096}, "input"),
    "file": ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
    "no input": ({"input": None}, "input"),
    "empty input": ({"input": []}, "input"),
    "temperature": ({"temperature": 3}, "temperature"),
    "bad picture": ({"input": image_input("data:image/png;base64,AAAA")}, "input[0].content[0].image_url"),
    "bad picture behind other items": (
        {
            "input": [
                {"type": "reasoning", "id": "rs_1", "summary": []},
                {"type": "message", "role": "assistant", "content": "x"},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "x"},
                *image_input("data:image/png;base64,AAAA"),
            ],
            "instructions": "Be brief.",
        },
        "input[4].content[0].image_url",
    ),
    "bad picture after instructions": (
        {"input": image_input("data:image/png;base64,AAAA"), "instructions": "Be brief."},
        "input[0].content[0].image_url",
    ),
    "too long": ({"input": "word " * 9000}, "input"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_honoured_is_named(server: RunningServer, name: str, stream: bool) -> None:
    fields, param = BAD[name]
    body = {"model": MODEL, "input": "x", "stream": stream, **fields}
    response = server.post(body, "/v1/responses")
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


def test_fields_that_change_nothing_are_taken(server: RunningServer) -> None:
    fields = {
        "store": True, "previous_response_id": None, "truncation": "auto", "reasoning": {"effort": "low"},
        "service_tier": "auto", "user": "me", "safety_identifier": "x", "prompt_cache_key": "x", "tools": [],
        "tool_choice": "auto", "parallel_tool_calls": False, "text": {"format": {"type": "text"}, "verbosity": "low"},
        "include": ["reasoning.encrypted_content"], "stream_options": {"include_obfuscation": False},
    }  # fmt: skip
    assert respond(server, **fields).status_code == 200


def test_failure_in_the_middle_of_a_stream_is_its_last_event(server: RunningServer, client: openai.OpenAI) -> None:
    server.engine.replay = Replay(token_ids=[50, 51, 52, 53], fail_after=2)
    *_, last = stream_events(respond(server, stream=True).text)
    assert last["type"] == "error"
    assert last.keys() == {"type", "sequence_number", "code", "message", "param", "error"}
    with pytest.raises(openai.APIError):
        list(client.responses.create(model=MODEL, input="x", stream=True))


def test_text_format_is_chats_response_format(server: RunningServer) -> None:
    schema = {"type": "object", "properties": {"colour": {"type": "string"}}, "required": ["colour"]}
    flat = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
    answer = respond(server, text={"format": flat}).json()
    assert answer["text"]["format"] == flat
    nested = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    assert server.post(chat(response_format=nested)).status_code == 200
    assert respond(server, text={"format": {"type": "json_object"}}).status_code == 200
    first, second, third = (request.sampling.grammar for request in server.engine.requests)
    assert first == second
    assert first != third
    assert third is not None


def test_nothing_is_stored(server: RunningServer, client: openai.OpenAI) -> None:
    created = client.responses.create(model=MODEL, input="x")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(created.id)


LARGE = "x" * 300_000
DESCRIBED = {"type": "object", "properties": {"a": {"description": LARGE}}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {"x" * 65: "a"}}, "metadata"),
        ({"metadata": {str(i): "a" for i in range(17)}}, "metadata"),
        ({"tools": [{"type": "function", "name": "f", "parameters": DESCRIBED}], "tool_choice": "none"}, "tools"),
        ({"tools": [{"type": "function", "name": "f", "description": LARGE}]}, "tools[0].description"),
        ({"text": {"format": {"type": "text", "description": LARGE}}}, "text.format.description"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": DESCRIBED}}}, "text.format"),
    ],
)
def test_what_is_told_again_is_bounded(server: RunningServer, fields: dict[str, Any], param: str) -> None:
    """It is kept as long as the answer takes, and comes three times in a stream."""
    response = server.post({"model": MODEL, "input": "x", **fields}, "/v1/responses")
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert len(response.content) < 1000


def test_what_says_nothing_is_not_told_again(server: RunningServer) -> None:
    text = {"format": {"type": "text", "schema": {"a": LARGE}}}
    fields = {"text": text, "metadata": {"k" * 64: "v" * 512}, "user": LARGE}
    for stream in (False, True):
        response = server.post({"model": MODEL, "input": "x", "stream": stream, **fields}, "/v1/responses")
        assert response.status_code == 200
        assert len(response.content) < 20_000
        assert ("v" * 512) in response.text
