"""What the page polls: sums, names, and that nothing of anybody leaks."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runtime.stats import MEMORY_COMPONENTS
from server.service import Service
from server.settings import Settings
from server.status import status_of
from tests.fake_engine import FakeEngineClient
from tests.http_server import chat, running_server, wait_until


def document(engine: FakeEngineClient, **settings: Any) -> Any:
    return msgspec.to_builtins(status_of(Service(engine, Settings(**settings))))


@pytest.fixture
def engine() -> FakeEngineClient:
    engine = FakeEngineClient()
    asyncio.run(engine.start())
    return engine


def test_ledgers_rows_sum_to_what_was_requested(engine: FakeEngineClient) -> None:
    memory = document(engine)["memory"]
    assert [row["component"] for row in memory["rows"]] == list(MEMORY_COMPONENTS)
    assert sum(row["num_bytes"] for row in memory["rows"]) == memory["requested_bytes"] == 512 << 20


def test_graphs_have_counts_and_buckets(engine: FakeEngineClient) -> None:
    encoder, decoder = document(engine)["graphs"]
    assert (encoder["family"], encoder["hits"], encoder["misses"]) == ("encoder", 3, {"too_large": 1})
    assert [(bucket["name"], bucket["replays"]) for bucket in encoder["buckets"]] == [("64", 2)]
    assert encoder["reserved_bytes"] == 2 << 20
    assert (decoder["backend"], decoder["buckets"], decoder["hits"]) == ("none", [], 0)


def test_load_and_limits_are_the_engines_and_the_settings(engine: FakeEngineClient) -> None:
    found = document(engine, limit_mm_per_prompt={"image": 3}, max_image_bytes=1000)
    assert (found["load"]["num_blocks"], found["load"]["num_blocks_used"], found["load"]["block_size"]) == (100, 25, 16)
    assert (found["limits"]["max_images"], found["limits"]["max_image_bytes"]) == (3, 1000)
    assert [phase["name"] for phase in found["startup"]] == ["load_weights", "capture"]


def test_before_the_engine_is_ready_there_is_a_phase_and_no_plan() -> None:
    found = document(FakeEngineClient())
    assert (found["phase"], found["engine"], found["memory"]) == ("starting", None, None)
    assert found["graphs"] == found["startup"] == []


def test_status_holds_no_path_and_no_text(tiny_checkpoint: Path) -> None:
    with running_server(tiny_checkpoint) as server:
        server.post(chat("open sesame", user="sesame"))
        response = server.get("/web/status")
        assert response.headers["cache-control"] == "no-store"
        assert response.json()["phase"] == "ready"
        assert "sesame" not in response.text
        assert "/" not in response.text
        server.in_loop(server.engine.die)
        wait_until(lambda: server.get("/web/status").json()["phase"] == "dead")
