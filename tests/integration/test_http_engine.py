"""`fovea serve` as an operator runs it, on a small random checkpoint: two processes, real engine, real HTTP."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import openai
import pytest

from tests import served_process
from tests.http_server import chat, data_url, events, image_part, picture, wait_until
from tests.served_process import ENVIRONMENT, ROOT, Fovea

FLAGS = (
    *("--memory-bytes", "1GiB", "--max-num-seqs", "4", "--max-num-batched-tokens", "256", "--block-size", "16"),
    *("--encoder-graph-budgets", "16,64", "--served-model-name", "tiny", "--limit-mm-per-prompt", "image=3"),
)


def serving(checkpoint: Path | str, *flags: str) -> AbstractContextManager[Fovea]:
    """The service with this module's flags; later ones win."""
    return served_process.serving(checkpoint, *FLAGS, *flags)


@pytest.fixture(scope="module")
def fovea(tiny_checkpoint: Path) -> Generator[Fovea, None, None]:
    with serving(tiny_checkpoint) as server:
        yield server


def test_streamed_and_folded_answers_are_one(fovea: Fovea) -> None:
    content = [image_part(), {"type": "text", "text": "What is in the picture?"}]
    whole = fovea.text(content)
    chunks = events(fovea.post(chat(content, temperature=0, max_tokens=12, stream=True)).text)[:-1]
    assert whole
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == whole


def test_official_client_chats_about_a_picture(fovea: Fovea) -> None:
    with openai.OpenAI(base_url=f"{fovea.client.base_url}/v1", api_key="none", max_retries=0) as client:
        body = chat([image_part(picture(112, 84)), {"type": "text", "text": "What is it?"}], max_tokens=4)
        answer = client.chat.completions.create(**body)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.model_dump()["image_tokens"] == 12
        assert answer.choices[0].finish_reason in ("stop", "length")


def test_pictures_matter_and_so_does_their_order(fovea: Fovea) -> None:
    red, blue = image_part(picture(color="red")), image_part(picture(color="blue"))
    question = {"type": "text", "text": "Which one?"}
    texts = {
        name: fovea.text(content)
        for name, content in {
            "red": [red, question],
            "blue": [blue, question],
            "red blue": [red, question, blue, question],
            "blue red": [blue, question, red, question],
        }.items()
    }
    assert len(set(texts.values())) == 4
    # From the caches the same comes again.
    assert fovea.text([red, question]) == texts["red"]


def test_requests_side_by_side_answer_as_alone(fovea: Fovea) -> None:
    contents = [[image_part(picture(56 + 28 * i, 56)), {"type": "text", "text": f"Number {i}?"}] for i in range(8)]
    alone = [fovea.text(content) for content in contents]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(fovea.text, contents)) == alone


def test_seeded_sampling_is_reproducible(fovea: Fovea) -> None:
    bodies = [chat("Tell me.", temperature=1, seed=seed, max_tokens=12) for seed in (5, 5, 6)]
    texts = [fovea.post(body).json()["choices"][0]["message"]["content"] for body in bodies]
    assert texts[0] == texts[1] != texts[2]


def test_dashboards_numbers_after_pictures(fovea: Fovea) -> None:
    fovea.text([image_part(picture(84, 84, "green"))])
    fovea.text([image_part(picture(448, 448, "green"))])  # 256 tokens: larger than the largest budget
    wait_until(lambda: fovea.metrics()["fovea_graph_misses_total", ("encoder", "too_large")] > 0)
    metrics = fovea.metrics()
    assert metrics["fovea_graph_hits_total", ("encoder",)] > 0
    for graph in ("encoder", "decoder"):
        assert metrics["fovea_graph_reserved_mib", (graph,)] > 0
    components = [value for (name, _), value in metrics.items() if name == "fovea_memory_bytes"]
    assert sum(components) == metrics["fovea_memory_requested_bytes", ()] == 1 << 30


def test_bad_pictures_leave_the_engine_as_it_was(fovea: Fovea) -> None:
    before = fovea.text("Still there?")
    for url in ("nope", data_url(b"hello"), data_url(picture()[:40])):
        response = fovea.post(chat([{"type": "image_url", "image_url": {"url": url}}]))
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "messages[0].content[0].image_url.url"
    assert fovea.text([image_part(picture(1, 1))]) is not None
    assert fovea.text("<|vision_start|><|image_pad|><|vision_end|>") is not None
    assert fovea.text("Still there?") == before


def test_client_that_leaves_frees_its_blocks(fovea: Fovea) -> None:
    body = chat("Tell me a long story.", stream=True, max_tokens=2000, ignore_eos=True)
    with fovea.client.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        wait_until(lambda: fovea.metrics()["fovea_kv_cache_used_blocks", ()] > 0)
    wait_until(lambda: fovea.metrics()["fovea_requests_aborted_total", ("disconnect",)] == 1)
    wait_until(lambda: fovea.metrics()["fovea_num_requests_running", ()] == 0)
    assert fovea.text("Next?") is not None


def test_plan_prints_rows_that_sum_up(tiny_checkpoint: Path) -> None:
    command = [sys.executable, "-m", "server", "plan", str(tiny_checkpoint), *FLAGS, "--json"]
    ended = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, timeout=120, check=True)
    plan = json.loads(ended.stdout)
    assert sum(plan["memory"]["components"].values()) == plan["memory"]["requested_bytes"] == 1 << 30
    assert [bucket["tokens"] for bucket in plan["graphs"][0]["buckets"]] == [16, 64]


def test_killed_engine_ends_the_server_with_an_error(tiny_checkpoint: Path) -> None:
    with serving(tiny_checkpoint) as server:
        body = chat("Tell me a long story.", stream=True, max_tokens=3000, ignore_eos=True)
        with server.client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            os.kill(server.engine_pid, signal.SIGKILL)
            *_, last = lines
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "service_unavailable"
        assert server.process.wait(20) == 1
