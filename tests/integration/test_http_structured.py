"""Structured answers and tools through the real engine, asked for by the official client, from a random model."""

import json
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.http_server import chat, image_part
from tests.integration.test_http_engine import Fovea, serving


class Closed(BaseModel):
    """Has no other properties: a random model would add them for ever."""

    model_config = ConfigDict(extra="forbid")


class Shape(Closed):
    kind: Literal["circle", "square"]
    corners: Literal[0, 4]


class Picture(Closed):
    colour: Literal["red", "green", "blue"]
    shapes: list[Shape] = Field(max_length=3)
    is_bright: bool


class Weather(BaseModel):
    """The weather at a place."""

    place: Literal["Ulm", "Ravensburg"]
    days: Literal[1, 2, 3]


TIME: dict[str, Any] = {"type": "function", "function": {"name": "time", "strict": True}}


@pytest.fixture(scope="module")
def fovea(tiny_checkpoint: Path) -> Generator[Fovea, None, None]:
    with serving(tiny_checkpoint) as server:
        yield server


@pytest.fixture
def client(fovea: Fovea) -> Generator[openai.OpenAI, None, None]:
    with openai.OpenAI(base_url=f"{fovea.client.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("temperature", [0, 1])
def test_official_client_parses_the_answer(client: openai.OpenAI, temperature: float) -> None:
    for seed in range(4):
        body = chat([image_part(), {"type": "text", "text": f"What is it, {seed}?"}], seed=seed)
        answer = client.chat.completions.parse(**body, temperature=temperature, response_format=Picture)
        assert isinstance(answer.choices[0].message.parsed, Picture)
        assert answer.choices[0].finish_reason == "stop"


def test_official_client_streams_what_it_parses(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(**chat("What is it?"), response_format=Picture, temperature=1) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Picture)


def test_cut_answer_says_so(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**chat("What is it?", max_tokens=3), response_format=Picture)


def test_required_call_is_made(client: openai.OpenAI) -> None:
    tools: Any = [openai.pydantic_function_tool(Weather, name="weather"), TIME]
    for temperature in (0.0, 1.0):
        answer = client.chat.completions.parse(
            **chat("How is it?", seed=3), tools=tools, tool_choice="required", parallel_tool_calls=False,
            temperature=temperature,
        )  # fmt: skip
        (call,) = answer.choices[0].message.tool_calls or []
        assert answer.choices[0].finish_reason == "tool_calls"
        assert answer.choices[0].message.content is None
        assert isinstance(call.function.parsed_arguments, Weather) or call.function.name == "time"


def test_named_call_is_streamed(client: openai.OpenAI) -> None:
    tools: Any = [TIME, openai.pydantic_function_tool(Weather, name="weather")]
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    with client.chat.completions.stream(**chat("How is it?"), tools=tools, tool_choice=choice) as stream:
        pieces = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather)
    assert "".join(pieces) == call.function.arguments
    assert len(pieces) > 2


def test_free_choice_of_tools_lets_the_model_talk(client: openai.OpenAI) -> None:
    body = chat("How is it?", max_tokens=12, temperature=0)
    with_tools = client.chat.completions.create(**body, tools=[TIME]).choices[0]  # type: ignore[list-item]
    assert with_tools.finish_reason in ("stop", "length")
    assert with_tools.message.content


def test_structured_and_free_answers_side_by_side(fovea: Fovea) -> None:
    schema = Picture.model_json_schema()
    wanted = {"type": "json_schema", "json_schema": {"name": "picture", "schema": schema, "strict": True}}
    bodies = [
        chat(
            f"Number {i}?", temperature=i % 2, seed=i, **({"response_format": wanted} if i % 3 else {"max_tokens": 10})
        )
        for i in range(12)
    ]

    def text(body: dict[str, Any]) -> str:
        return str(fovea.post(body).json()["choices"][0]["message"]["content"])

    alone = [text(body) for body in bodies]
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(text, bodies)) == alone
    for body, answer in zip(bodies, alone, strict=True):
        if "response_format" in body:
            jsonschema.validate(json.loads(answer), schema)


def test_grammar_that_fails_on_the_way_leaves_the_others_alone(fovea: Fovea) -> None:
    pattern = "^((((a{1,100}){1,100}){1,100}){1,100})$"
    bomb = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "string", "pattern": pattern}}}
    with ThreadPoolExecutor(2) as pool:
        bad = pool.submit(fovea.post, chat("Now?", response_format=bomb, max_tokens=200))
        assert pool.submit(fovea.text, "Still there?").result()
        assert bad.result().status_code in (200, 400)
    assert fovea.text("Still there?")
