"""Requests to an engine in a process of its own."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.client import EngineDeadError
from runtime.config import EngineConfig
from runtime.process_client import ProcessEngineClient
from runtime.request import ImageInput, PlaceholderRange, Request, SamplingParams
from runtime.request_budget import request_bytes
from tests.integration.process_clients import (
    WAIT_SECONDS,
    collect,
    in_event_loop,
    ready_client,
    request,
    until,
)
from tests.integration.process_engines import RAISE, SLOW


@in_event_loop
async def test_a_request_with_pixels_goes_there_and_back() -> None:
    async with ready_client() as client:
        assert client.state == "ready"
        assert client.info is not None
        assert client.info.model == "inventing"
        pixels = np.arange(28 * 56 * 3, dtype=np.uint8).reshape(28, 56, 3)
        images = (
            ImageInput(image_hash=b"a" * 32, height=28, width=56, placeholder=PlaceholderRange(2, 2)),
            ImageInput(image_hash=b"b" * 32, height=56, width=28, placeholder=PlaceholderRange(6, 2)),
        )
        # The second is a view with strides of its own: it must arrive as it looks, not as it lies in memory.
        arrays = (pixels, pixels.transpose(1, 0, 2))
        base = sum(int(array.sum()) for array in arrays) % 1000
        tokens, last = await collect(client, request("r", images=images), arrays)
        assert tokens == [base, base + 1, base + 2]
        assert last.finish_reason == "length"


@in_event_loop
async def test_concurrent_requests_get_their_own_outputs() -> None:
    async with ready_client() as client:
        results = await asyncio.gather(
            *(collect(client, request(f"r{number}", max_tokens=number + 1)) for number in range(40))
        )
        assert [tokens for tokens, _ in results] == [list(range(number + 1)) for number in range(40)]


SQUARE = ImageInput(image_hash=b"a" * 32, height=56, width=56, placeholder=PlaceholderRange(2, 4))
SQUARE_PIXELS = np.ones((56, 56, 3), np.uint8)


@in_event_loop
async def test_no_more_is_in_the_engine_than_its_plan_has_room_for() -> None:
    """Three at a time fit; the others wait here, whatever becomes of those before them, and count as waiting."""
    max_bytes = 3 * request_bytes(request("r", images=(SQUARE,)), [SQUARE_PIXELS])

    def ask(client: ProcessEngineClient, number: int, max_tokens: int = 3) -> Coroutine[Any, Any, Any]:
        first_token = SLOW if number % 2 else 5
        asked = request(f"r{number}", first_token=first_token, max_tokens=max_tokens, images=(SQUARE,))
        return collect(client, asked, (SQUARE_PIXELS,))

    async with ready_client("bounded", request_memory_bytes=max_bytes) as client:
        leavers = [asyncio.create_task(ask(client, number, 400)) for number in range(1, 16, 2)]
        await until(lambda: client.stats.num_running == 3)
        assert client.stats.num_waiting == len(leavers) - 3
        stayers = [asyncio.create_task(ask(client, number)) for number in range(20, 60)]
        text = asyncio.create_task(collect(client, request("text")))
        for leaver in leavers:
            await asyncio.sleep(0.01)
            leaver.cancel()
        for stayer in stayers:
            _, last = await stayer
            assert (last.finish_reason, last.error) == ("length", None)
        await text
        await until(lambda: client.stats.num_waiting == 0)


@in_event_loop
async def test_a_request_larger_than_the_room_goes_alone() -> None:
    async with ready_client("bounded", request_memory_bytes=100) as client:
        results = await asyncio.gather(*(collect(client, request(f"r{number}")) for number in range(3)))
        assert {str(last.error)[:5] for _, last in results} == {"2016 "}


@in_event_loop
async def test_requests_that_wait_for_room_learn_of_the_engines_death() -> None:
    max_bytes = request_bytes(request("r", images=(SQUARE,)), [SQUARE_PIXELS])

    async with ready_client("bounded", request_memory_bytes=max_bytes) as client:
        slow = request("r", first_token=SLOW, max_tokens=400, images=(SQUARE,))
        tasks = [asyncio.create_task(collect(client, slow, (SQUARE_PIXELS,)))]
        await until(lambda: client.stats.num_running == 1)
        tasks += [asyncio.create_task(collect(client, request(f"w{number}"))) for number in range(3)]
        await until(lambda: client.stats.num_waiting == 3)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(error) for error in errors] == [EngineDeadError] * 4


@in_event_loop
async def test_closing_a_generator_aborts_in_the_engine() -> None:
    async with ready_client() as client:
        generator = client.generate(request("r", first_token=SLOW, max_tokens=400), [])
        await anext(generator)
        await until(lambda: client.stats.num_running == 1)
        await generator.aclose()
        await until(lambda: client.stats.num_running == 0)
        assert client.stats.num_generation_tokens < 400
        assert (await collect(client, request("r")))[0] == [0, 1, 2]


@in_event_loop
async def test_cancelling_the_task_of_a_generator_aborts_in_the_engine() -> None:
    async with ready_client() as client:
        task = asyncio.create_task(collect(client, request("r", first_token=SLOW, max_tokens=400)))
        await until(lambda: client.stats.num_running == 1)
        task.cancel()
        await until(lambda: client.stats.num_running == 0)
        assert client.stats.num_generation_tokens < 400


@in_event_loop
async def test_a_request_that_can_never_fit_is_rejected_with_its_reason() -> None:
    async with ready_client() as client:
        too_long = Request(
            request_id="r",
            prompt_token_ids=[1] * 600,
            sampling=SamplingParams(max_tokens=1),
            arrival_time=0.0,
        )
        _, last = await collect(client, too_long)
        assert (last.finish_reason, last.is_rejected) == ("error", True)
        assert "max_model_len is 512" in str(last.error)
        _, last = await collect(client, request("s", top_k=-1))
        assert (last.is_rejected, last.error) == (True, "top_k is negative")
        assert (await collect(client, request("t")))[0] == [0, 1, 2]


@pytest.mark.parametrize("bad", [request("bad", first_token=RAISE), request("bad", top_k=13)])
@in_event_loop
async def test_one_request_fails_and_the_engine_lives(bad: Request) -> None:
    async with ready_client() as client:
        _, last = await collect(client, bad)
        assert (last.finish_reason, last.is_rejected) == ("error", False)
        assert (await collect(client, request("good")))[0] == [0, 1, 2]


@in_event_loop
async def test_pixels_that_do_not_fit_are_an_error_of_that_request() -> None:
    async with ready_client() as client:
        image = ImageInput(image_hash=b"a" * 32, height=28, width=28, placeholder=PlaceholderRange(2, 1))
        _, last = await collect(client, request("r", images=(image,)), (np.zeros((28, 27, 3), np.uint8),))
        assert "28 x 28" in str(last.error)
        _, last = await collect(client, request("r", images=(image,)))
        assert "0 frames of pixels" in str(last.error)


@in_event_loop
async def test_an_id_in_use_is_refused_before_it_is_sent() -> None:
    async with ready_client() as client:
        first = client.generate(request("r", first_token=SLOW, max_tokens=400), [])
        await anext(first)
        with pytest.raises(ValueError, match="in use"):
            await collect(client, request("r"))
        await anext(first)
        await first.aclose()


@in_event_loop
async def test_the_heartbeat_goes_on_in_idleness() -> None:
    async with ready_client() as client:
        for _ in range(2):
            beat = client._heartbeat_at
            await until(lambda beat=beat: client._heartbeat_at > beat)  # type: ignore[misc]
        assert client.seconds_since_heartbeat < WAIT_SECONDS


@in_event_loop
async def test_the_last_snapshot_counts_everything() -> None:
    async with ready_client() as client:
        await asyncio.gather(*(collect(client, request(f"r{number}", max_tokens=7)) for number in range(5)))
        await until(lambda: client.stats.num_running == 0 and client.stats.num_generation_tokens == 35)
        assert client.stats.num_steps >= 7


@in_event_loop
async def test_the_real_engine_serves_in_its_process(tiny_checkpoint: Path) -> None:
    client = ProcessEngineClient(EngineConfig(model=str(tiny_checkpoint), max_model_len=128, num_threads=1))
    await client.start()
    try:
        assert client.info is not None
        assert sum(client.info.memory.components.values()) == client.info.memory.requested_bytes
        first, last = await collect(client, request("a", max_tokens=5))
        again, cached = await collect(client, request("b", max_tokens=5))
        assert (len(first), last.finish_reason, last.num_cached_tokens) == (5, "length", 0)
        assert (again, cached.num_cached_tokens) == (first, 16)
    finally:
        await client.shutdown()


def test_the_client_imports_no_torch() -> None:
    code = "import sys, runtime.process_client; print({'torch', 'transformers', 'fastapi'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
