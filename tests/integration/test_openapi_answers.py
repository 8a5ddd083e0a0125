"""What /openapi.json says of answers, held against what a server with a fake engine answers."""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from runtime.processing.tokenizer import Tokenizer
from server.responses import LOGPROBS_INCLUDED
from tests.fake_engine import Replay
from tests.http_server import MODEL, RunningServer, chat, events, image_part, running_server

CALL = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
TIME = {"name": "time"}
ASK = {"input": "Hello", "model": MODEL}

BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", chat([image_part()], logprobs=True, top_logprobs=2, n=2)),
    ("/v1/completions", {"model": MODEL, "prompt": ["One", "Two"], "logprobs": 2}),
    ("/v1/responses", {**ASK, "include": [LOGPROBS_INCLUDED], "metadata": {"a": "b"}, "instructions": "Be short."}),
    ("/tokenize", {"messages": chat([image_part()])["messages"], "return_token_strs": True}),
    ("/tokenize", {"prompt": "One"}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
]


@pytest.fixture(scope="module")
def server(tiny_checkpoint: Path) -> Generator[RunningServer, None, None]:
    with running_server(tiny_checkpoint) as server:
        yield server


@pytest.fixture(scope="module")
def document(server: RunningServer) -> dict[str, Any]:
    document: dict[str, Any] = server.get("/openapi.json").json()
    return document


def check(document: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    Draft202012Validator({**schema, "components": document["components"]}).validate(value)


def check_answer(document: dict[str, Any], path: str, method: str, response: httpx.Response) -> None:
    assert response.status_code == 200, response.text
    content = document["paths"][path][method]["responses"]["200"]["content"]
    check(document, content["application/json"]["schema"], response.json())


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_answers_are_as_described(
    server: RunningServer, document: dict[str, Any], path: str, body: dict[str, Any]
) -> None:
    check_answer(document, path, "post", server.post(body, path))


def test_a_response_that_is_cut_is_as_described(server: RunningServer, document: dict[str, Any]) -> None:
    server.engine.replay = Replay(finish_reason="length")
    response = server.post(ASK, "/v1/responses")
    server.engine.replay = Replay()
    assert response.json()["status"] == "incomplete"
    check_answer(document, "/v1/responses", "post", response)


@pytest.mark.parametrize("fields", [{"tools": [{"type": "function", "function": TIME}]}, {"functions": [TIME]}])
def test_calls_of_tools_are_as_described(
    server: RunningServer, document: dict[str, Any], tiny_checkpoint: Path, fields: dict[str, Any]
) -> None:
    tokens = Tokenizer.from_checkpoint(tiny_checkpoint).encode(CALL, allow_special=False)
    server.engine.replay = Replay(token_ids=tokens)
    response = server.post(chat(**fields))
    streamed = server.post(chat(stream=True, **fields))
    server.engine.replay = Replay()
    check_answer(document, "/v1/chat/completions", "post", response)
    assert response.json()["choices"][0]["finish_reason"] in ("tool_calls", "function_call")
    for chunk in events(streamed.text)[:-1]:
        check(document, document["components"]["schemas"]["ChatCompletionChunk"], chunk)


def test_a_response_with_a_call_is_as_described(
    server: RunningServer, document: dict[str, Any], tiny_checkpoint: Path
) -> None:
    tokens = Tokenizer.from_checkpoint(tiny_checkpoint).encode(f"See:\n{CALL}", allow_special=False)
    server.engine.replay = Replay(token_ids=tokens)
    tool = {"type": "function", **TIME}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [tool]}
    response = server.post({**ASK, "tools": [tool], "tool_choice": choice}, "/v1/responses")
    server.engine.replay = Replay()
    check_answer(document, "/v1/responses", "post", response)
    assert [item["type"] for item in response.json()["output"]] == ["message", "function_call"]


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/health/live", "/health/ready", "/version"])
def test_documents_are_as_described(server: RunningServer, document: dict[str, Any], path: str) -> None:
    check_answer(document, path, "get", server.get(path))
