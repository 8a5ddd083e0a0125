"""The embedded model over HTTP: the pictures in `examples/` answered right, what `/metrics` then says, and the README's
commands."""

import json
import re
import subprocess
from collections.abc import Generator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.http_server import image_part, picture
from tests.integration.test_http_engine import Fovea, serving
from training.sample import is_right

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
ROOM = ("--memory-bytes", "1GiB")
CONVERSATIONS: list[dict[str, Any]] = json.loads((EXAMPLES / "questions.json").read_text())


@pytest.fixture(scope="module")
def demo() -> Generator[Fovea, None, None]:
    with serving(Path("demo"), "--served-model-name", "demo", "--encoder-graph-budgets", "64,96,128", *ROOM) as fovea:
        yield fovea


@pytest.fixture(scope="module")
def openai_client(demo: Fovea) -> Generator[openai.OpenAI, None, None]:
    with openai.OpenAI(base_url=f"{demo.client.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_examples_are_a_dozen_and_cover_what_the_model_knows() -> None:
    assert len(CONVERSATIONS) == 12
    assert {conversation["category"] for conversation in CONVERSATIONS} == {
        "colour",
        "shape",
        "place",
        "count",
        "read",
        "compare",
        "chart",
        "second_turn",
        "nothing",
    }


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=lambda conversation: conversation["images"][0])
def test_an_example_is_answered_right(openai_client: openai.OpenAI, conversation: dict[str, Any]) -> None:
    messages: list[Any] = []
    for turn in conversation["turns"]:
        content: list[Any] = [{"type": "text", "text": turn["question"]}]
        if not messages:
            content[:0] = [image_part((EXAMPLES / name).read_bytes()) for name in conversation["images"]]
        messages.append({"role": "user", "content": content})
        completion = openai_client.chat.completions.create(model="demo", messages=messages)
        answer = completion.choices[0].message.content
        assert answer is not None
        assert completion.choices[0].finish_reason == "stop"
        assert is_right(answer, tuple(turn["expected"])), f"{turn['question']} -> {answer}"
        messages.append({"role": "assistant", "content": answer})


def test_metrics_then_show_hits_and_a_ledger_that_sums_to_the_request(
    demo: Fovea, openai_client: openai.OpenAI
) -> None:
    content: list[Any] = [
        image_part((EXAMPLES / "01-colour.png").read_bytes()),
        {"type": "text", "text": "What colour is it?"},
    ]
    openai_client.chat.completions.create(model="demo", messages=[{"role": "user", "content": content}])
    metrics = demo.metrics()
    assert metrics["fovea_graph_hits_total", ("encoder",)] > 0
    assert metrics["fovea_graph_hits_total", ("decoder",)] > 0
    for family in ("encoder", "decoder"):
        assert metrics["fovea_graph_reserved_mib", (family,)] > 0
    rows = [value for (name, _), value in metrics.items() if name == "fovea_memory_bytes"]
    assert sum(rows) == metrics["fovea_memory_requested_bytes", ()]
    assert metrics["fovea_memory_unplanned_bytes", ()] <= 0


def test_a_picture_beyond_the_largest_budget_is_a_counted_miss(demo: Fovea, openai_client: openai.OpenAI) -> None:
    before = demo.metrics()["fovea_graph_misses_total", ("encoder", "too_large")]
    content: list[Any] = [image_part(picture(448, 448)), {"type": "text", "text": "What is it?"}]
    completion = openai_client.chat.completions.create(model="demo", messages=[{"role": "user", "content": content}])
    assert completion.usage is not None
    assert completion.usage.prompt_tokens_details.image_tokens == 256  # the largest budget here is 128
    assert demo.metrics()["fovea_graph_misses_total", ("encoder", "too_large")] == before + 1


def readme_commands() -> list[str]:
    """Every curl of the README's shell blocks, to the server's default address."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    commands = re.split(r"^(?=\S)", "\n".join(blocks), flags=re.MULTILINE)
    return [command for command in commands if command.startswith("curl") and "127.0.0.1:8000" in command]


def run_shell(command: str, demo: Fovea) -> str:
    command = command.replace("http://127.0.0.1:8000", str(demo.client.base_url).rstrip("/"))
    ended = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_readmes_commands_print_what_it_says(demo: Fovea) -> None:
    ask, metrics = readme_commands()[:2]
    answer = json.loads(run_shell(ask, demo))
    assert "purple" in answer["choices"][0]["message"]["content"]
    shown = run_shell(metrics, demo)
    assert "fovea_graph_hits_total" in shown
    assert "fovea_memory_bytes" in shown
