"""Clients that others wrote, against the real server and engine: text, picture, stream, a call of a function and what
follows its result, an error before the answer and one in the middle of it; in the words of chat completions and, where
a client has them, of responses. `make test-clients` installs them, each in its own environment, and runs this.

A client is a program (in `python/` or `node/`) that does the task and prints what it got.
"""

import json
import os
import subprocess
from collections.abc import Callable, Generator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.http_server import MODEL, chat, data_url, image_part, picture
from tests.integration.faulty_engine import RAISE_LATER
from tests.served_process import FAULTY_SERVE, Fovea, serving

pytestmark = pytest.mark.clients

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[1] / ".venv-clients"
FLAGS = (
    *("--memory-bytes", "1GiB", "--max-num-seqs", "4", "--served-model-name", MODEL, "--encoder-graph-budgets", "64"),
)
QUESTION = "What is in the picture?"
MAX_TOKENS = 16
NOT_A_PICTURE = data_url(b"hello")
# The only call that the grammar allows has one of two colours; the model has random weights.
FUNCTION = {
    "name": "paint",
    "description": "Paints it.",
    "parameters": {
        "type": "object",
        "properties": {"colour": {"type": "string", "enum": ["red", "green"]}},
        "required": ["colour"],
        "additionalProperties": False,
    },
}

# Program, and the names under which it reports.
PROGRAMS = {
    "openai_python.py": ("openai", ("openai", "openai .stream()", "openai async", "openai responses")),
    "langchain_openai_client.py": ("openai", ("langchain", "langchain responses")),
    "litellm_client.py": ("openai", ("litellm openai", "litellm hosted_vllm", "litellm responses")),
    "llama_index_client.py": ("llama-index", ("llama-index", "llama-index responses")),
    "openai_node.mjs": ("node", ("openai-node", "openai-node .stream()", "openai-node responses")),
    "ai_sdk.mjs": ("node", ("ai-sdk openai", "ai-sdk openai-compatible", "ai-sdk openai responses")),
}
CLIENTS = [(program, client) for program, (_, clients) in PROGRAMS.items() for client in clients]

Reports = dict[str, dict[str, Any]]


def command_of(program: str) -> list[str]:
    """How a program is run, in the environment that it was installed into."""
    environment = PROGRAMS[program][0]
    if environment == "node":
        return ["node", str(HERE / "node" / program)]
    return [str(ENVIRONMENTS / environment / "bin" / "python"), str(HERE / "python" / program)]


@pytest.fixture(scope="module")
def fovea(tiny_checkpoint: Path) -> Generator[Fovea, None, None]:
    with serving(tiny_checkpoint, *FLAGS, command=FAULTY_SERVE) as server:
        yield server


@pytest.fixture(scope="module")
def reports_of(fovea: Fovea) -> Callable[[str], Reports]:
    """What a program reported, by client; each program runs once."""
    task = {
        "base_url": f"{fovea.url}/v1",
        "model": MODEL,
        "picture": data_url(picture(84, 56, "red")),
        "question": QUESTION,
        "max_tokens": MAX_TOKENS,
        "bad_messages": chat([{"type": "image_url", "image_url": {"url": NOT_A_PICTURE}}])["messages"],
        "broken_seed": RAISE_LATER,
        "function": FUNCTION,
        "max_call_tokens": 200,
    }
    # Some of them look for updates or prices at their start, and none may need to.
    environment = {
        **os.environ,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "NO_PROXY": "*",
        "AI_SDK_LOG_WARNINGS": "false",
    }

    @cache
    def run(program: str) -> Reports:
        ended = subprocess.run(
            [*command_of(program), json.dumps(task)], capture_output=True, text=True, timeout=120, env=environment
        )
        assert ended.returncode == 0, ended.stderr[-4000:]
        reports: Reports = {}
        for line in ended.stdout.splitlines():
            if line.startswith('{"client"'):
                values = json.loads(line)
                reports.setdefault(values.pop("client"), {}).update(values)
        return reports

    return run


@pytest.fixture(scope="module")
def expected(fovea: Fovea) -> dict[str, str]:
    part = image_part(picture(84, 56, "red"))
    text = fovea.text(QUESTION, max_tokens=MAX_TOKENS)
    image = fovea.text([part, {"type": "text", "text": QUESTION}], max_tokens=MAX_TOKENS)
    assert text
    assert image
    assert text != image
    return {"text": text, "image": image, "stream": image}


def report(reports_of: Callable[[str], Reports], program: str, client: str) -> dict[str, Any]:
    found = reports_of(program)
    assert client in found, f"{program} reported {found.keys()}"
    return found[client]


@pytest.mark.parametrize(("program", "client"), CLIENTS)
def test_client_gets_text_picture_and_stream(
    reports_of: Callable[[str], Reports], expected: dict[str, str], program: str, client: str
) -> None:
    got = report(reports_of, program, client)
    kinds = ("stream",) if ".stream()" in client else ("text", "image", "stream")
    assert {kind: got.get(kind) for kind in kinds} == {kind: expected[kind] for kind in kinds}
    assert got.get("role", "assistant") == "assistant"
    assert got.get("finish_reason", "length") in ("length", "stop")
    assert got.get("models", [MODEL]) == [MODEL]
    assert got.get("choices", [expected["text"]] * 3) == [expected["text"]] * 3
    assert got.get("responses", expected["text"]) == expected["text"]


@pytest.mark.parametrize(("program", "client"), CLIENTS)
def test_client_calls_a_function(reports_of: Callable[[str], Reports], program: str, client: str) -> None:
    got = report(reports_of, program, client)
    calls = [got[kind] for kind in (("tool_stream",) if ".stream()" in client else ("tool", "tool_stream"))]
    for name, arguments in calls:
        assert name == FUNCTION["name"]
        assert arguments.keys() == {"colour"}
        assert arguments["colour"] in ("red", "green")
    assert calls[0] == calls[-1]
    assert got.get("after_tool", "said") not in (None, "")


@pytest.mark.parametrize(("program", "client"), CLIENTS)
def test_client_counts_as_the_server_does(
    reports_of: Callable[[str], Reports], fovea: Fovea, program: str, client: str
) -> None:
    got = report(reports_of, program, client)
    content = [image_part(picture(84, 56, "red")), {"type": "text", "text": QUESTION}]
    usage = fovea.post(chat(content, max_tokens=1)).json()["usage"]
    assert got.get("prompt_tokens", usage["prompt_tokens"]) == usage["prompt_tokens"]


@pytest.mark.parametrize(("program", "client"), CLIENTS)
def test_client_tells_what_was_wrong(reports_of: Callable[[str], Reports], program: str, client: str) -> None:
    if ".stream()" in client:
        client = client.removesuffix(" .stream()")
    got = report(reports_of, program, client)
    assert "The data is not an image" in got["error"]
    assert got.get("code", "invalid_image") == "invalid_image"
    assert got.get("param", "messages[0].content[0].image_url.url") == "messages[0].content[0].image_url.url"
    assert got.get("status", 400) == 400
    assert "maximum context length" in got.get("context_error", "maximum context length")


@pytest.mark.parametrize(("program", "client"), CLIENTS)
def test_client_notices_an_answer_that_breaks_off(
    reports_of: Callable[[str], Reports], program: str, client: str
) -> None:
    assert "error while processing your request" in report(reports_of, program, client)["broken"]


def test_clients_left_nothing_behind(reports_of: Callable[[str], Reports], fovea: Fovea) -> None:
    for program in PROGRAMS:
        reports_of(program)
    fovea.wait_idle()
    assert fovea.metrics()["fovea_kv_cache_used_blocks", ()] == 0
