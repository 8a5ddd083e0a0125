"""`fovea bench serve` against a server, and what the server says of its own interface."""

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from server.cli import main
from tests.fake_engine import FakeEngineClient, Replay
from tests.http_server import RunningServer, running_server


@pytest.fixture(scope="module")
def server(tiny_checkpoint: Path) -> Generator[RunningServer, None, None]:
    with running_server(tiny_checkpoint, FakeEngineClient(replay=Replay(token_ids=[50, 51, 52]))) as server:
        yield server


def bench(server: RunningServer, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, Any]]:
    code = main(["bench", "serve", "--url", server.url, "--requests", "6", "--concurrency", "2", *flags])
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_bench_counts_what_it_got(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.engine.requests.clear()
    code, result = bench(server, capsys, "--image", "56x56,84x56", "--warmup", "1", "--max-tokens", "8")
    assert code == 0
    assert (result["requests"], result["errors"], result["output_tokens"]) == (6, 0, 18)
    assert result["model"] == "tiny"
    assert result["prompt_tokens"] > 0
    for times in ("ttft_ms", "itl_ms", "e2e_ms"):
        assert result[times]["p50"] <= result[times]["p99"]
    requests = server.engine.requests
    assert len(requests) == 7
    assert len({request.images[0].image_hash for request in requests}) == 7
    assert {request.images[0].width for request in requests} == {56, 84}
    assert {request.sampling.max_tokens for request in requests} == {8}


def test_bench_of_text_only(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.engine.requests.clear()
    assert bench(server, capsys, "--no-image", "--warmup", "0")[0] == 0
    assert not any(request.images for request in server.engine.requests)


def test_bench_tells_errors(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    code, result = bench(server, capsys, "--no-image", "--model", "nobody")
    assert (code, result["errors_by_kind"]) == (1, {"404": 6})
    server.engine.replay = Replay(token_ids=[50, 51, 52], fail_after=1)
    code, result = bench(server, capsys, "--no-image", "--warmup", "0")
    server.engine.replay = Replay(token_ids=[50, 51, 52])
    assert (code, result["errors_by_kind"]) == (1, {"error event": 6})


def test_openapi_document_is_whole(server: RunningServer) -> None:
    document = server.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/ChatCompletionRequest"}
    assert {"messages", "temperature", "stream"} <= schemas["ChatCompletionRequest"]["properties"].keys()
    references = {part.split('"')[0] for part in json.dumps(document).split('"$ref": "')[1:]}
    assert all(reference.rsplit("/", 1)[1] in schemas for reference in references)
