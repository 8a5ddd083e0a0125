from typing import Any

import pytest
from pydantic import ValidationError

from server.errors import InvalidRequestError, from_validation
from server.schemas import ChatCompletionRequest, ImagePart


def body(content: Any = "Hi", **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": content}], **fields}


def message(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [fields]}


def refusal(document: Any) -> InvalidRequestError:
    with pytest.raises(ValidationError) as caught:
        ChatCompletionRequest.model_validate(document)
    return from_validation(caught.value.errors(include_url=False, include_input=False))


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.mark.parametrize(
    ("document", "param"),
    [
        ({}, "model"),
        ({"model": "m"}, "messages"),
        ({"model": "m", "messages": []}, "messages"),
        ({"model": "m", "messages": "hi"}, "messages"),
        ({"model": 5, "messages": [{"role": "user", "content": "x"}]}, "model"),
        (message(content="x"), "messages[0].role"),
        (message(role="robot", content="x"), "messages[0].role"),
        (message(role="user"), "messages[0].content"),
        (message(role="user", content=None), "messages[0].content"),
        (message(role="user", content=5), "messages[0].content"),
        (message(role="user", content=[]), "messages[0].content"),
        (message(role="user", content=["x"]), "messages[0].content[0]"),
        (message(role="user", content=[{"text": "x"}]), "messages[0].content[0].type"),
        (message(role="user", content=[{"type": "text"}]), "messages[0].content[0].text"),
        (message(role="user", content=[{"type": "text", "text": None}]), "messages[0].content[0].text"),
        (message(role="user", content=[{"type": "image_url"}]), "messages[0].content[0].image_url"),
        (
            message(role="user", content=[{"type": "image_url", "image_url": {}}]),
            "messages[0].content[0].image_url.url",
        ),
        (message(role="user", content=[{"type": "input_image", "file_id": "f"}]), "messages[0].content[0].file_id"),
        (message(role="user", content=[{"type": "input_audio"}]), "messages[0].content[0].type"),
        (message(role="user", content=[{"type": "file"}]), "messages[0].content[0].type"),
        (message(role="user", content=[{"type": "image_embeds"}]), "messages[0].content[0].type"),
        (message(role="system", content=[IMAGE]), "messages[0].content[0]"),
        (message(role="assistant", content=[IMAGE]), "messages[0].content[0]"),
        (message(role="tool", content="x"), "messages[0].tool_call_id"),
        (message(role="tool", tool_call_id="1"), "messages[0].content"),
        (message(role="function", content="x"), "messages[0].name"),
        (message(role="assistant", tool_calls=[]), "messages[0].content"),
        (message(role="assistant", tool_calls=[{}]), "messages[0].tool_calls[0].id"),
        (message(role="assistant", tool_calls=[{"id": "1", "type": "x"}]), "messages[0].tool_calls[0].type"),
        (message(role="user", content="x", tool_calls=[CALL]), "messages[0].tool_calls"),
        (message(role="user", content="x", function_call=CALL["function"]), "messages[0].function_call"),
        (body(temperature=2.1), "temperature"),
        (body(temperature="1"), "temperature"),
        (body(temperature=True), "temperature"),
        (body(top_p=-0.1), "top_p"),
        (body(n=0), "n"),
        (body(n=9), "n"),
        (body(n=1.5), "n"),
        (body(seed=2**63), "seed"),
        (body(stop=[""]), "stop[0]"),
        (body(stop={}), "stop"),
        (body(stop=["a"] * 5), "stop"),
        (body(presence_penalty=3), "presence_penalty"),
        (body(logit_bias={"1": 101}), "logit_bias"),
        (body(logit_bias={"one": 1}), "logit_bias"),
        (body(logit_bias=[1]), "logit_bias"),
        (body(top_logprobs=1), "top_logprobs"),
        (body(top_logprobs=21, logprobs=True), "top_logprobs"),
        (body(max_tokens=0), "max_tokens"),
        (body(max_completion_tokens=-1), "max_completion_tokens"),
        (body(stream="yes"), "stream"),
        (body(stream_options={"include_usage": True}), "stream_options"),
        (body(response_format={"type": "json_schema"}), "response_format.json_schema"),
        (
            body(response_format={"type": "json_schema", "json_schema": {"name": "n"}}),
            "response_format.json_schema.schema",
        ),
        (
            body(response_format={"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}),
            "response_format.json_schema.name",
        ),
        (
            body(response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": []}}),
            "response_format.json_schema.schema",
        ),
        (body(response_format={"type": "xml"}), "response_format.type"),
        (body(tools=[{}]), "tools[0].type"),
        (body(tools=[{"type": "function"}]), "tools[0].function"),
        (body(tools=[{"type": "custom", "custom": {"name": "f"}}]), "tools[0].type"),
        (body(tools=[{"type": "function", "function": {"name": "a b"}}]), "tools[0].function.name"),
        (body(tools=[{"type": "function", "function": {"name": "f" * 65}}]), "tools[0].function.name"),
        (
            body(tools=[{"type": "function", "function": {"name": "f", "parameters": []}}]),
            "tools[0].function.parameters",
        ),
        (
            body(tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": 5}}}]),
            "tools[0].function.parameters.type",
        ),
        (body(tools=[TOOL] * 129), "tools"),
        (body(tools=[TOOL], tool_choice="sometimes"), "tool_choice"),
        (body(tools=[TOOL], tool_choice=5), "tool_choice"),
        (body(tools=[TOOL], tool_choice={"type": "function"}), "tool_choice.function"),
        (body(tools=[TOOL], tool_choice={"type": "allowed_tools"}), "tool_choice.allowed_tools"),
        (body(functions=[{}]), "functions[0].name"),
        (body(functions=[TOOL["function"]], function_call={}), "function_call.name"),
        (body(modalities=["text", "audio"]), "modalities"),
        (body(audio={"voice": "x"}), "audio"),
        (body(top_k=-2), "top_k"),
        (body(min_p=2), "min_p"),
        (body(repetition_penalty=0), "repetition_penalty"),
    ],
)
def test_refused_field_is_named(document: Any, param: str) -> None:
    error = refusal(document)
    assert error.param == param
    assert error.status == 400
    assert error.message.endswith(".")


@pytest.mark.parametrize(
    "document",
    [
        body(temperature=0),
        body(temperature=1, top_p=1, n=8, seed=-(2**63), logit_bias={"5": -100.0}),
        body(stop="x"),
        body(stop=[]),
        body(logprobs=True, top_logprobs=20),
        body(stream=True, stream_options={"include_usage": True, "include_obfuscation": False}),
        body(tools=[TOOL], tool_choice="auto", parallel_tool_calls=False),
        body(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "f"}}),
        body(tools=[TOOL], tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}}),
        body(functions=[TOOL["function"]], function_call={"name": "f"}),
        body(response_format={"type": "json_object"}),
        body(response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "strict": True}}),
        message(role="assistant", content=None, tool_calls=[CALL]),
        message(role="assistant", function_call=CALL["function"]),
        message(role="tool", content="x", tool_call_id="1"),
        message(role="function", content="x", name="f"),
        body(tools=[], tool_choice="none"),
        body(response_format={"type": "text"}),
        body([{"type": "text", "text": "x", "prompt_cache_breakpoint": {}}, IMAGE]),
        body(""),
        message(role="developer", content="x"),
        message(role="assistant", content=None, refusal="No."),
        message(role="assistant", content=[{"type": "refusal", "refusal": "No."}]),
        message(role="system", content=[{"type": "text", "text": "x"}], name="n"),
        {**body(), "surprise": {"deep": [1, 2]}, "prediction": {}, "service_tier": "auto"},
    ],
)
def test_accepted(document: Any) -> None:
    ChatCompletionRequest.model_validate(document)


def test_aliases_become_the_one_form() -> None:
    url = "data:image/png;base64,AAAA"
    for part in (
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
        {"type": "image_url", "image_url": url, "detail": "low"},
        {"type": "input_image", "image_url": url, "detail": "low"},
    ):
        request = ChatCompletionRequest.model_validate(body([part]))
        content = request.messages[0].content
        assert isinstance(content, list)
        assert isinstance(content[0], ImagePart)
        assert (content[0].image_url.url, content[0].image_url.detail) == (url, "low")


def test_newer_name_of_the_token_limit_wins() -> None:
    request = ChatCompletionRequest.model_validate(body(max_tokens=5, max_completion_tokens=7))
    assert request.requested_max_tokens == 7
    assert ChatCompletionRequest.model_validate(body(max_tokens=5)).requested_max_tokens == 5
    assert ChatCompletionRequest.model_validate(body()).requested_max_tokens is None


def test_refusal_repeats_nothing() -> None:
    secret = "sesame"
    for document in (
        body(logit_bias={secret: 1000}),
        body([{"type": secret}]),
        body(tool_choice=secret),
        {"model": {secret: 1}},
    ):
        error = refusal(document)
        assert secret not in f"{error.message} {error.param}"
