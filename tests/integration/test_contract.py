"""What clients are promised of the wire, a row for each promise. What a row needs more than a request for is tested
with the part that keeps it: `test_http_*`.

Every row is run whole and, where it is refused, streamed too: a refusal comes before the 200 of a stream.
"""

import json
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from tests.fake_engine import FakeEngineClient, Replay
from tests.http_server import MODEL, RunningServer, chat, data_url, events, image_part, picture, running_server

POSTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize")
URL = data_url(picture())
TEXT = {"type": "text", "text": "What is it?"}
IMAGE = image_part()


@pytest.fixture(scope="module")
def server(tiny_checkpoint: Path) -> Generator[RunningServer, None, None]:
    # The longest name: an organisation's, as on a hub.
    with running_server(
        tiny_checkpoint, FakeEngineClient(replay=Replay(token_ids=(40, 41, 42))), served_model_name=(MODEL, "org/name")
    ) as server:
        yield server


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def turns(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [*messages, {"role": "user", "content": "And now?"}]}


def with_image(**fields: Any) -> dict[str, Any]:
    return user([{"type": "image_url", "image_url": {"url": URL, **fields}}, TEXT])


# Requests that are served.
SERVED: dict[str, dict[str, Any]] = {
    "temperature 0": {"temperature": 0},
    "temperature 2": {"temperature": 2},
    "top_p 0": {"top_p": 0},
    "top_p 1": {"top_p": 1.0},
    "n of the limit": {"n": 8},
    "seed of 64 bits": {"seed": 2**63 - 1},
    "negative seed": {"seed": -(2**63)},
    "stop as a string": {"stop": "\n"},
    "stop as four strings": {"stop": ["a", "b", "c", "d"]},
    "stop as an empty list": {"stop": []},
    "presence penalty": {"presence_penalty": -2},
    "frequency penalty": {"frequency_penalty": 2},
    "logit bias": {"logit_bias": {"5": -100, "6": 100}},
    "logprobs alone": {"logprobs": True},
    "twenty top logprobs": {"logprobs": True, "top_logprobs": 20},
    "no top logprobs": {"logprobs": True, "top_logprobs": 0},
    "max_completion_tokens": {"max_completion_tokens": 5},
    "max_tokens": {"max_tokens": 5},
    "both, the newer one wins": {"max_completion_tokens": 5, "max_tokens": 10**6},
    "response format text": {"response_format": {"type": "text"}},
    "no tools": {"tools": [], "tool_choice": "none"},
    "modalities text": {"modalities": ["text"]},
    "what benchmarks send": {
        "ignore_eos": True, "repetition_penalty": 1.1, "top_k": 5, "min_p": 0.1, "chat_template_kwargs": {"a": 1},
    },
    "top_k of -1": {"top_k": -1},
    "unknown fields": {"no_such_field": {"deep": [1, 2, 3]}, "another": None},
    "template in the request is ignored": {"chat_template": "{{ ''.__class__ }}"},
    "system": turns({"role": "system", "content": "Be brief."}),
    "developer": turns({"role": "developer", "content": "Be brief."}),
    "assistant": turns({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}),
    "assistant's refusal": turns({"role": "user", "content": "Hi"}, {"role": "assistant", "refusal": "No."}),
    "assistant's parts": turns(
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]},
    ),
    "system's parts": turns({"role": "system", "content": [TEXT]}),
    "name": turns({"role": "user", "name": "me", "content": "Hi"}),
    "content as one text part": user([TEXT]),
    "picture only": user([IMAGE]),
    "picture, then text in the next turn": turns({"role": "user", "content": [IMAGE]}),
    "picture in each of two turns": turns({"role": "user", "content": [IMAGE]}, {"role": "user", "content": [IMAGE]}),
    "detail low": with_image(detail="low"),
    "detail high": with_image(detail="high"),
    "detail auto": with_image(detail="auto"),
    "detail original": with_image(detail="original"),
    "detail null": with_image(detail=None),
    "cache breakpoint in a part": user([{**TEXT, "prompt_cache_breakpoint": {"mode": "explicit"}}, IMAGE]),
    "picture as a plain string": user([{"type": "image_url", "image_url": URL}]),
    "parts of the responses API": user(
        [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": "What is it?"}]
    ),
    "scheme in capitals": user([{"type": "image_url", "image_url": {"url": URL.replace("data:", "DATA:")}}]),
    "data URL without a type": user(
        [{"type": "image_url", "image_url": {"url": URL.replace("image/png;base64", ";base64")}}]
    ),
    "data URL with a wrong type": user(
        [{"type": "image_url", "image_url": {"url": URL.replace("image/png", "image/jpg;name=x")}}]
    ),
    "JPEG": user([image_part(picture(kind="JPEG"))]),
    "WEBP": user([image_part(picture(kind="WEBP"))]),
    "GIF": user([image_part(picture(kind="GIF"))]),
    "one pixel": user([image_part(picture(1, 1))]),
    "image markers in text": user("<|vision_start|><|image_pad|><|vision_end|>"),
    **{
        f"{name} is ignored": {name: value}
        for name, value in {
            "user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "safety_identifier": "x",
            "prompt_cache_key": "x", "prompt_cache_options": {"mode": "implicit"}, "prompt_cache_retention": "24h",
            "reasoning_effort": "low", "verbosity": "low", "prediction": {"type": "content", "content": "x"},
            "web_search_options": {}, "moderation": {"model": "x"}, "parallel_tool_calls": False,
        }.items()
    },
    **{
        f"{name} may be null": {name: None}
        for name in (
            "temperature", "top_p", "n", "seed", "stop", "presence_penalty", "frequency_penalty", "logit_bias",
            "logprobs", "top_logprobs", "max_completion_tokens", "max_tokens", "response_format", "tools",
            "tool_choice", "parallel_tool_calls", "functions", "function_call", "stream", "stream_options", "user",
            "metadata", "store", "service_tier", "reasoning_effort", "verbosity", "modalities", "audio", "prediction",
            "web_search_options", "top_k", "min_p", "repetition_penalty", "ignore_eos",
        )
    },
}  # fmt: skip

PART = "messages[0].content[0]"


def bad_part(kind: str, **fields: Any) -> dict[str, Any]:
    return user([{"type": kind, **fields}])


# Requests that are refused: status, code, param.
REFUSED: dict[str, tuple[dict[str, Any], int, str | None, str | None]] = {
    "no messages": ({"messages": None}, 400, None, "messages"),
    "empty messages": ({"messages": []}, 400, None, "messages"),
    "unknown role": (turns({"role": "robot", "content": "x"}), 400, None, "messages[0].role"),
    "user without content": (turns({"role": "user"}), 400, None, "messages[0].content"),
    "assistant without content or calls": (turns({"role": "assistant"}), 400, None, "messages[0].content"),
    "picture in a system message": (turns({"role": "system", "content": [IMAGE]}), 400, None, PART),
    "refusal of a user": (user([{"type": "refusal", "refusal": "x"}]), 400, None, PART),
    "temperature": ({"temperature": 2.1}, 400, None, "temperature"),
    "temperature of text": ({"temperature": "hot"}, 400, None, "temperature"),
    "top_p": ({"top_p": -0.1}, 400, None, "top_p"),
    "n": ({"n": 9}, 400, None, "n"),
    "n of 0": ({"n": 0}, 400, None, "n"),
    "seed": ({"seed": 2**63}, 400, None, "seed"),
    "stop": ({"stop": ["x"] * 5}, 400, None, "stop"),
    "presence penalty": ({"presence_penalty": 3}, 400, None, "presence_penalty"),
    "frequency penalty": ({"frequency_penalty": -3}, 400, None, "frequency_penalty"),
    "logit bias": ({"logit_bias": {"5": 101}}, 400, None, "logit_bias"),
    "logit bias by word": ({"logit_bias": {"word": 1}}, 400, None, "logit_bias"),
    "top logprobs": ({"logprobs": True, "top_logprobs": 21}, 400, None, "top_logprobs"),
    "top logprobs without logprobs": ({"top_logprobs": 2}, 400, None, "top_logprobs"),
    "max_completion_tokens": ({"max_completion_tokens": 0}, 400, None, "max_completion_tokens"),
    "answers in sound": ({"modalities": ["text", "audio"]}, 400, None, "modalities"),
    "response format": ({"response_format": {"type": "xml"}}, 400, None, "response_format.type"),
    "detail": (with_image(detail="best"), 400, None, f"{PART}.image_url.detail"),
    "sound": (bad_part("input_audio", input_audio={}), 400, None, f"{PART}.type"),
    "file": (bad_part("file", file={}), 400, None, f"{PART}.type"),
    "film": (bad_part("video_url", video_url={}), 400, None, f"{PART}.type"),
    "embeddings": (bad_part("image_embeds", image_embeds="x"), 400, None, f"{PART}.type"),
    "film in a data URL": (
        user([{"type": "image_url", "image_url": {"url": "data:video/jpeg;base64,AAAA"}}]),
        400, "invalid_image_url", f"{PART}.image_url.url",
    ),
    "no picture": (user([image_part(b"text")]), 400, "invalid_image", f"{PART}.image_url.url"),
    "fetching is off": (
        user([{"type": "image_url", "image_url": {"url": "https://img.example/x.png"}}]),
        400, "invalid_image_url", f"{PART}.image_url.url",
    ),
    "too many pictures": (user([IMAGE] * 9), 400, "too_many_images", "messages"),
    "prompt too long": (user("word " * 9000), 400, "context_length_exceeded", "messages"),
    "answer too long": ({"max_tokens": 10**6}, 400, "context_length_exceeded", "messages"),
    "unknown model": ({"model": "other"}, 404, "model_not_found", "model"),
    "no model": ({"model": None}, 400, None, "model"),
}  # fmt: skip

Answer = dict[str, Any]


def choice(answer: Answer) -> Any:
    return answer["choices"][0]


# What an answer that is not streamed looks like.
ANSWERS: dict[str, tuple[dict[str, Any], Callable[[Answer], bool]]] = {
    "object": ({}, lambda a: a["object"] == "chat.completion" and a["id"].startswith("chatcmpl-")),
    "created is a whole number": ({}, lambda a: isinstance(a["created"], int)),
    "model is the served name": ({"model": "org/name"}, lambda a: a["model"] == MODEL),
    "logprobs are there, null": ({}, lambda a: choice(a)["logprobs"] is None),
    "message has its three keys": ({}, lambda a: choice(a)["message"].keys() == {"role", "content", "refusal"}),
    "refusal is null": ({}, lambda a: choice(a)["message"]["refusal"] is None),
    "finish reason": ({}, lambda a: choice(a)["finish_reason"] == "stop"),
    "finish reason of a short answer": ({"max_tokens": 1}, lambda a: choice(a)["finish_reason"] == "length"),
    "logprobs have both keys": (
        {"logprobs": True}, lambda a: choice(a)["logprobs"].keys() == {"content", "refusal"},
    ),
    "a token's entry": (
        {"logprobs": True, "top_logprobs": 1},
        lambda a: choice(a)["logprobs"]["content"][0].keys() == {"token", "logprob", "bytes", "top_logprobs"},
    ),
    "choices are numbered": ({"n": 3}, lambda a: [c["index"] for c in a["choices"]] == [0, 1, 2]),
    "usage adds up": (
        {}, lambda a: a["usage"]["total_tokens"] == a["usage"]["prompt_tokens"] + a["usage"]["completion_tokens"],
    ),
    "usage of pictures": (
        user([IMAGE, TEXT]),
        lambda a: a["usage"]["prompt_tokens_details"]["image_tokens"] == 4
        and a["usage"]["prompt_tokens_details"]["text_tokens"] == a["usage"]["prompt_tokens"] - 4,
    ),
    "usage's details": (
        {},
        lambda a: a["usage"]["prompt_tokens_details"].keys()
        == {"cached_tokens", "cache_write_tokens", "audio_tokens", "image_tokens", "text_tokens"}
        and a["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0,
    ),
}  # fmt: skip

USAGE = {"stream_options": {"include_usage": True}}


def deltas(chunks: list[Any]) -> list[Any]:
    return [c["delta"] for chunk in chunks for c in chunk["choices"]]


# What the events of a stream look like; the end mark is checked for all of them.
STREAMS: dict[str, tuple[dict[str, Any], Callable[[list[Any]], bool]]] = {
    "one id, time and model": ({}, lambda c: len({(x["id"], x["created"], x["model"]) for x in c}) == 1),
    "object": ({}, lambda c: {x["object"] for x in c} == {"chat.completion.chunk"}),
    "role comes first": ({}, lambda c: deltas(c)[0] == {"role": "assistant", "content": ""}),
    "role comes once": ({}, lambda c: sum("role" in delta for delta in deltas(c)) == 1),
    "roles of choices in order": ({"n": 3}, lambda c: [x["choices"][0]["index"] for x in c[:3]] == [0, 1, 2]),
    "texts are not empty": ({}, lambda c: all(delta["content"] for delta in deltas(c)[1:-1])),
    "the end has an empty delta": ({}, lambda c: deltas(c)[-1] == {}),
    "one end a choice": ({"n": 2}, lambda c: sum(x["choices"][0]["finish_reason"] is not None for x in c) == 2),
    "no usage unasked": ({}, lambda c: all("usage" not in x for x in c)),
    "usage null before the end": (USAGE, lambda c: all(x["usage"] is None for x in c[:-1])),
    "usage last, without choices": (USAGE, lambda c: c[-1]["choices"] == [] and c[-1]["usage"]["total_tokens"] > 0),
    "every choice has its keys": (
        {}, lambda c: all({"index", "delta", "finish_reason", "logprobs"} == x["choices"][0].keys() for x in c),
    ),
    "options without usage": ({"stream_options": {"include_usage": False}}, lambda c: all("usage" not in x for x in c)),
    "obfuscation is ignored": ({"stream_options": {"include_obfuscation": True}}, lambda c: len(c) > 2),
    "growing usage when asked": (
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        lambda c: [x["usage"]["completion_tokens"] for x in c][-1] == 3 and all(x["usage"] for x in c),
    ),
}  # fmt: skip

# Bytes that are no request, and what is asked in a wrong way: method, path, body, content type, status.
WRONG: dict[str, tuple[str, str, bytes | None, str, int]] = {
    "no JSON": ("POST", "/v1/chat/completions", b"{", "application/json", 400),
    "no object": ("POST", "/v1/chat/completions", b"[]", "application/json", 400),
    "empty body": ("POST", "/v1/chat/completions", b"", "application/json", 400),
    "not a number": ("POST", "/v1/chat/completions", b'{"temperature": NaN}', "application/json", 400),
    "form": ("POST", "/v1/chat/completions", b"a=b", "application/x-www-form-urlencoded", 400),
    "plain text": ("POST", "/v1/responses", b"{}", "text/plain", 400),
    "route": ("GET", "/v1/nothing", None, "", 404),
    "route of no version": ("POST", "/chat/completions", b"{}", "application/json", 404),
    "embeddings": ("POST", "/v1/embeddings", b"{}", "application/json", 404),
    "method": ("GET", "/v1/chat/completions", None, "", 405),
    "method of completions": ("GET", "/v1/completions", None, "", 405),
    "method of responses": ("DELETE", "/v1/responses", None, "", 405),
    "method of models": ("DELETE", "/v1/models/tiny", None, "", 405),
    "unknown model": ("GET", "/v1/models/org/other", None, "", 404),
}


def post(server: RunningServer, fields: dict[str, Any], **more: Any) -> Any:
    return server.post({**chat(), **fields, **more})


def assert_is_error(response: Any, status: int) -> Any:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert body.keys() == {"error"}
    error = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert isinstance(error["type"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    return error


@pytest.mark.parametrize("promise", SERVED)
def test_served(server: RunningServer, promise: str) -> None:
    response = post(server, SERVED[promise])
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    assert response.headers["openai-processing-ms"].isdigit()
    assert choice(response.json())["message"]["content"]


@pytest.mark.parametrize("promise", REFUSED)
@pytest.mark.parametrize("stream", [False, True])
def test_refused(server: RunningServer, promise: str, stream: bool) -> None:
    fields, status, code, param = REFUSED[promise]
    error = assert_is_error(post(server, fields, stream=stream), status)
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", code, param)


@pytest.mark.parametrize("promise", ANSWERS)
def test_answer(server: RunningServer, promise: str) -> None:
    fields, holds = ANSWERS[promise]
    assert holds(post(server, fields).json())


@pytest.mark.parametrize("promise", STREAMS)
def test_stream(server: RunningServer, promise: str) -> None:
    fields, holds = STREAMS[promise]
    response = post(server, fields, stream=True)
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    assert holds(chunks), chunks


@pytest.mark.parametrize("promise", WRONG)
def test_wrong(server: RunningServer, promise: str) -> None:
    method, path, body, content_type, status = WRONG[promise]
    headers = {"content-type": content_type} if content_type else {}
    error = assert_is_error(server.http.request(method, path, content=body, headers=headers), status)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("accept", ["application/json", "*/*", "text/event-stream", "text/html"])
@pytest.mark.parametrize("stream", [False, True])
def test_accept_header_decides_nothing(server: RunningServer, accept: str, stream: bool) -> None:
    response = server.post(chat(stream=stream), headers={"accept": accept, "accept-encoding": "gzip, deflate"})
    kind = "text/event-stream; charset=utf-8" if stream else "application/json"
    assert response.headers["content-type"] == kind
    assert "content-encoding" not in response.headers
    if stream:
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        assert not any(line.startswith(":") for line in response.text.split("\n"))


def test_stop_text_is_never_part_of_the_answer(server: RunningServer) -> None:
    whole = choice(post(server, {}).json())["message"]["content"]
    cut = choice(post(server, {"stop": [whole[1]]}).json())
    assert (cut["message"]["content"], cut["finish_reason"]) == (whole[0], "stop")


def test_context_error_has_the_words_that_clients_look_for(server: RunningServer) -> None:
    error = post(server, user("word " * 9000)).json()["error"]
    start = "This model's maximum context length is 4096 tokens. However, your messages resulted in "
    assert error["message"].startswith(start)


def test_models_are_listed_with_their_fields(server: RunningServer) -> None:
    listed = server.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == [MODEL, "org/name"]
    for card in listed["data"]:
        assert card["object"] == "model"
        assert isinstance(card["created"], int)
        assert card["owned_by"] == "fovea"
        assert server.get(f"/v1/models/{card['id']}").json() == card


def test_schema_of_every_route_is_published(server: RunningServer) -> None:
    document = server.get("/openapi.json").json()
    for path in POSTS:
        reference = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        assert reference.removeprefix("#/components/schemas/") in document["components"]["schemas"]
    assert "#/$defs/" not in json.dumps(document)


STATES: dict[str, tuple[str, int, str]] = {
    "starting": ("not_ready", 503, "service_unavailable"),
    "draining": ("draining", 503, "service_unavailable"),
    "dead": ("engine_dead", 503, "service_unavailable"),
}


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize"]
)
@pytest.mark.parametrize("phase", STATES)
def test_requests_that_come_at_a_wrong_time(tiny_checkpoint: Path, phase: str, path: str) -> None:
    reason, status, code = STATES[phase]
    with running_server(tiny_checkpoint, FakeEngineClient(is_start_held=phase == "starting"), phase=None) as server:
        if phase != "starting":
            server.service.lifecycle.phase = phase  # type: ignore[assignment]
        response = server.post(chat(), path)
        error = assert_is_error(response, status)
        assert (error["type"], error["code"]) == ("server_error", code)
        # Above 120 seconds the official clients do not try again.
        assert 0 < int(response.headers["retry-after"]) <= 120
        assert server.metric("fovea_requests_rejected_total", reason=reason) == 1
        server.in_loop(server.engine.release_start)
