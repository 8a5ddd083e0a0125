"""Requests and pictures that nobody would write by hand: every answer is a success or names the client's mistake, and
the image workers neither die nor grow."""

import copy
import json
import random
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.http_server import MODEL, RunningServer, data_url, image_part, picture, running_server
from tests.picture_files import PICTURE_FILES, mangled
from tests.served_process import Fovea, process_usage, serving

FLAGS = (
    *("--memory-bytes", "1GiB", "--max-num-seqs", "4", "--served-model-name", MODEL, "--max-model-len", "512"),
    *("--encoder-graph-budgets", "16,64", "--max-num-batched-tokens", "64", "--limit-mm-per-prompt", "image=3"),
)
FUZZ = settings(
    max_examples=150, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(scope="module")
def fovea(tiny_checkpoint: Path) -> Generator[Fovea, None, None]:
    with serving(tiny_checkpoint, *FLAGS) as server:
        yield server


@pytest.fixture(scope="module")
def fake(tiny_checkpoint: Path) -> Generator[RunningServer, None, None]:
    with running_server(tiny_checkpoint) as server:
        yield server


def optional(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


TEXTS = st.text(max_size=30) | st.sampled_from(["", " ", "<|im_end|>", "<|image_pad|>", "\x00", "꧁0꧂", "🙂" * 20])
TEXT_PARTS = st.builds(lambda text: {"type": "text", "text": text}, TEXTS)
PICTURE_PARTS = st.sampled_from([(1, 1), (56, 56), (84, 28), (300, 20), (28, 280)]).map(
    lambda size: image_part(picture(*size))
)
CONTENTS = TEXTS | st.lists(TEXT_PARTS, min_size=1, max_size=3) | st.tuples(PICTURE_PARTS, TEXT_PARTS).map(list)
MESSAGES = st.tuples(
    st.sampled_from([[], [{"role": "system", "content": "Be brief."}], [{"role": "developer", "content": "x"}]]),
    CONTENTS.map(lambda content: [{"role": "user", "content": content}]),
    st.sampled_from([[], [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And?"}]]),
).map(lambda parts: [message for part in parts for message in part])

# All within their ranges: each combination is to be served.
VALID_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "temperature": optional(st.floats(0, 2)),
    "top_p": optional(st.floats(0, 1)),
    "top_k": optional(st.integers(-1, 2**31 - 1)),
    "min_p": optional(st.floats(0, 1)),
    "n": optional(st.integers(1, 3)),
    "seed": optional(st.integers(-(2**63), 2**63 - 1)),
    "stop": optional(st.text(min_size=1, max_size=5) | st.lists(st.text(min_size=1, max_size=5), max_size=4)),
    "presence_penalty": optional(st.floats(-2, 2)),
    "frequency_penalty": optional(st.floats(-2, 2)),
    "repetition_penalty": optional(st.floats(1e-6, 100)),
    "logit_bias": optional(st.dictionaries(st.integers(0, 511).map(str), st.floats(-100, 100), max_size=20)),
    "ignore_eos": optional(st.booleans()),
    "stop_token_ids": optional(st.lists(st.integers(0, 511), max_size=5)),
    "user": optional(TEXTS),
    "stream": optional(st.booleans()),
}
VALID = st.tuples(
    MESSAGES, st.fixed_dictionaries({}, optional=VALID_FIELDS), st.integers(1, 6), st.none() | st.integers(0, 20)
)

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@FUZZ
@given(VALID)
def test_valid_requests_are_served(fovea: Fovea, parts: tuple[Any, ...]) -> None:
    messages, fields, max_tokens, top_logprobs = parts
    body = {"model": MODEL, "messages": messages, "max_tokens": max_tokens, **fields}
    if top_logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": top_logprobs}
    response = fovea.post(body)
    assert response.status_code == 200, (response.text, body)
    if fields.get("stream"):
        assert response.text.endswith("data: [DONE]\n\n"), (response.text, body)
    else:
        usage = response.json()["usage"]
        assert usage["completion_tokens"] <= max_tokens * (fields.get("n") or 1)


@FUZZ
@given(VALID, st.data())
def test_mangled_requests_are_the_clients_mistakes(fake: RunningServer, parts: tuple[Any, ...], data: Any) -> None:
    # A copy: what is sampled is one object for all examples.
    body: dict[str, Any] = copy.deepcopy({"model": MODEL, "messages": parts[0], **parts[1]})
    for _ in range(data.draw(st.integers(1, 3))):
        mangle(body, data)
    response = fake.post(body)
    assert response.status_code in (200, 400, 404), (response.text, body)
    if response.status_code != 200:
        assert response.json()["error"].keys() == {"message", "type", "param", "code"}


PAINT = {"type": "function", "name": "paint", "parameters": {"type": "object", "properties": {"colour": {}}}}
RESPONSE: dict[str, Any] = {
    "model": MODEL,
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": [{"type": "input_image", "image_url": data_url(picture())}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Well."}]},
        {"type": "function_call", "call_id": "a", "name": "paint", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "Done."}]},
    ],
    "tools": [PAINT, {**PAINT, "name": "erase", "description": "Erases.", "strict": True}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "paint"}]},
    "parallel_tool_calls": False,
    "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}, "strict": True}},
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 2,
    "max_output_tokens": 5,
    "metadata": {"a": "b"},
    "stream": True,
}  # fmt: skip


@FUZZ
@given(st.data())
def test_mangled_responses_requests_are_the_clients_mistakes(fake: RunningServer, data: Any) -> None:
    body = copy.deepcopy(RESPONSE)
    for _ in range(data.draw(st.integers(0, 3))):
        mangle(body, data)
    response = fake.post(body, "/v1/responses")
    assert response.status_code in (200, 400, 404), (response.text, body)
    if response.status_code != 200:
        assert response.json()["error"].keys() == {"message", "type", "param", "code"}


def mangle(document: Any, data: Any) -> None:
    """Changes one place somewhere within a document."""
    while True:
        keys = list(document) if isinstance(document, dict) else list(range(len(document)))
        if not keys:
            return
        key = data.draw(st.sampled_from(keys))
        if isinstance(document[key], dict | list) and document[key] and data.draw(st.booleans()):
            document = document[key]
            continue
        if data.draw(st.booleans()):
            document[key] = data.draw(ANYTHING)
        else:
            del document[key]
        return


@settings(FUZZ, max_examples=100)
@given(st.binary(max_size=200))
def test_bytes_that_are_no_json_are_refused(fake: RunningServer, body: bytes) -> None:
    for content in (body, json.dumps({"model": MODEL}).encode()[:-1] + body):
        response = fake.http.post("/v1/chat/completions", content=content, headers={"content-type": "application/json"})
        assert response.status_code == 400, content


def test_mangled_pictures_are_the_clients_mistakes_and_workers_stay_as_they_are(fovea: Fovea) -> None:
    generator = random.Random(0)

    def send(count: int) -> set[int]:
        statuses = set()
        for _ in range(count):
            name = generator.choice(sorted(PICTURE_FILES))
            url = data_url(mangled(PICTURE_FILES[name](), generator))
            part = {"type": "image_url", "image_url": {"url": url}}
            response = fovea.post({"model": MODEL, "messages": [{"role": "user", "content": [part]}], "max_tokens": 1})
            statuses.add(response.status_code)
            assert response.status_code in (200, 400), (name, response.text)
            assert " at 0x" not in response.text
        return statuses

    assert send(150) == {200, 400}
    workers = fovea.children("image_worker")
    before = [process_usage(pid) for pid in workers]
    send(300)
    assert fovea.children("image_worker") == workers, "a worker died"
    for pid, usage in zip(workers, before, strict=True):
        after = process_usage(pid)
        assert after.pss_bytes - usage.pss_bytes < 8 << 20
        assert after.num_descriptors == usage.num_descriptors


@pytest.mark.parametrize("name", sorted(PICTURE_FILES))
def test_every_kind_of_file_is_served_whole(fovea: Fovea, name: str) -> None:
    data = PICTURE_FILES[name]()
    body = {"model": MODEL, "messages": [{"role": "user", "content": [image_part(data)]}], "max_tokens": 1}
    assert fovea.post(body).status_code == 200
