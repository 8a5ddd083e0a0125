import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime.client import EngineClient, EngineDeadError
from runtime.config import EngineConfig
from runtime.log import LogFormat
from runtime.process_client import ProcessEngineClient
from runtime.request import ImageInput, PlaceholderRange, Request, RequestOutput, SamplingParams
from runtime.request_budget import request_bytes
from tests.integration.process_engines import FATAL, KILL, RAISE, SLOW

ENGINES = "tests.integration.process_engines"
WAIT_SECONDS = 30


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            await test

    asyncio.run(bounded())


@asynccontextmanager
async def ready_client(factory: str = "inventing", **config: Any) -> AsyncIterator[ProcessEngineClient]:
    client = ProcessEngineClient(EngineConfig(**config), factory=f"{ENGINES}:{factory}")
    await client.start()
    try:
        yield client
    finally:
        await client.shutdown()


def request(
    request_id: str, *, first_token: int = 5, max_tokens: int = 3, top_k: int = 0, images: tuple[ImageInput, ...] = ()
) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=[first_token, *range(100, 120)],
        images=images,
        sampling=SamplingParams(max_tokens=max_tokens, top_k=top_k),
        arrival_time=time.time(),
    )


async def collect(
    client: EngineClient, asked: Request, pixels: tuple[NDArray[np.uint8], ...] = ()
) -> tuple[list[int], RequestOutput]:
    outputs = [output async for output in client.generate(asked, pixels)]
    return [token for output in outputs for token in output.new_token_ids], outputs[-1]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 (what is waited for happens in another process)
        await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_request_with_pixels_goes_there_and_back() -> None:
    async def test() -> None:
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

    run(test())


def test_concurrent_requests_get_their_own_outputs() -> None:
    async def test() -> None:
        async with ready_client() as client:
            results = await asyncio.gather(
                *(collect(client, request(f"r{number}", max_tokens=number + 1)) for number in range(40))
            )
            assert [tokens for tokens, _ in results] == [list(range(number + 1)) for number in range(40)]

    run(test())


SQUARE = ImageInput(image_hash=b"a" * 32, height=56, width=56, placeholder=PlaceholderRange(2, 4))
SQUARE_PIXELS = np.ones((56, 56, 3), np.uint8)


def test_no_more_is_in_the_engine_than_its_plan_has_room_for() -> None:
    """Three at a time fit; the others wait here, whatever becomes of those before them, and count as waiting."""
    max_bytes = 3 * request_bytes(request("r", images=(SQUARE,)), [SQUARE_PIXELS])

    def ask(client: ProcessEngineClient, number: int, max_tokens: int = 3) -> Coroutine[Any, Any, Any]:
        first_token = SLOW if number % 2 else 5
        asked = request(f"r{number}", first_token=first_token, max_tokens=max_tokens, images=(SQUARE,))
        return collect(client, asked, (SQUARE_PIXELS,))

    async def test() -> None:
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

    run(test())


def test_a_request_larger_than_the_room_goes_alone() -> None:
    async def test() -> None:
        async with ready_client("bounded", request_memory_bytes=100) as client:
            results = await asyncio.gather(*(collect(client, request(f"r{number}")) for number in range(3)))
            assert {str(last.error)[:5] for _, last in results} == {"2016 "}

    run(test())


def test_requests_that_wait_for_room_learn_of_the_engines_death() -> None:
    max_bytes = request_bytes(request("r", images=(SQUARE,)), [SQUARE_PIXELS])

    async def test() -> None:
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

    run(test())


def test_closing_a_generator_aborts_in_the_engine() -> None:
    async def test() -> None:
        async with ready_client() as client:
            generator = client.generate(request("r", first_token=SLOW, max_tokens=400), [])
            await anext(generator)
            await until(lambda: client.stats.num_running == 1)
            await generator.aclose()
            await until(lambda: client.stats.num_running == 0)
            assert client.stats.num_generation_tokens < 400
            assert (await collect(client, request("r")))[0] == [0, 1, 2]

    run(test())


def test_cancelling_the_task_of_a_generator_aborts_in_the_engine() -> None:
    async def test() -> None:
        async with ready_client() as client:
            task = asyncio.create_task(collect(client, request("r", first_token=SLOW, max_tokens=400)))
            await until(lambda: client.stats.num_running == 1)
            task.cancel()
            await until(lambda: client.stats.num_running == 0)
            assert client.stats.num_generation_tokens < 400

    run(test())


def test_a_request_that_can_never_fit_is_rejected_with_its_reason() -> None:
    async def test() -> None:
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

    run(test())


@pytest.mark.parametrize("bad", [request("bad", first_token=RAISE), request("bad", top_k=13)])
def test_one_request_fails_and_the_engine_lives(bad: Request) -> None:
    async def test() -> None:
        async with ready_client() as client:
            _, last = await collect(client, bad)
            assert (last.finish_reason, last.is_rejected) == ("error", False)
            assert (await collect(client, request("good")))[0] == [0, 1, 2]

    run(test())


def test_pixels_that_do_not_fit_are_an_error_of_that_request() -> None:
    async def test() -> None:
        async with ready_client() as client:
            image = ImageInput(image_hash=b"a" * 32, height=28, width=28, placeholder=PlaceholderRange(2, 1))
            _, last = await collect(client, request("r", images=(image,)), (np.zeros((28, 27, 3), np.uint8),))
            assert "28 x 28" in str(last.error)
            _, last = await collect(client, request("r", images=(image,)))
            assert "0 frames of pixels" in str(last.error)

    run(test())


def test_an_id_in_use_is_refused_before_it_is_sent() -> None:
    async def test() -> None:
        async with ready_client() as client:
            first = client.generate(request("r", first_token=SLOW, max_tokens=400), [])
            await anext(first)
            with pytest.raises(ValueError, match="in use"):
                await collect(client, request("r"))
            await anext(first)
            await first.aclose()

    run(test())


def test_the_engines_death_ends_all_requests() -> None:
    async def test() -> None:
        async with ready_client() as client:
            slow = [
                asyncio.create_task(collect(client, request(f"r{n}", first_token=SLOW, max_tokens=400)))
                for n in range(3)
            ]
            await until(lambda: client.stats.num_running == 3)
            assert client.pid is not None
            os.kill(client.pid, signal.SIGKILL)
            results = await asyncio.gather(*slow, return_exceptions=True)
            assert [type(result) for result in results] == [EngineDeadError] * 3
            assert await client.wait_dead() == "the engine process was killed by SIGKILL"
            assert client.state == "dead"
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await collect(client, request("late"))

    run(test())


@pytest.mark.parametrize(("first_token", "reason"), [(FATAL, "ended with status 2"), (KILL, "killed by SIGKILL")])
def test_an_engine_beyond_use_ends_its_process(first_token: int, reason: str) -> None:
    async def test() -> None:
        async with ready_client() as client:
            with pytest.raises(EngineDeadError, match=reason):
                await collect(client, request("r", first_token=first_token))

    run(test())


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        ("misconfigured", "^block_size is 16; the device wants 7$"),
        ("broken", "RuntimeError: weights are nowhere"),
        ("killed_while_starting", "killed by SIGKILL"),
        ("no_such_function", "no_such_function"),
    ],
)
def test_a_failed_start_says_why(factory: str, reason: str) -> None:
    async def test() -> None:
        client = ProcessEngineClient(EngineConfig(), factory=f"{ENGINES}:{factory}")
        with pytest.raises(EngineDeadError, match=reason):
            await client.start()
        assert client.state == "dead"
        assert client.pid is not None
        assert not is_alive(client.pid)
        await client.shutdown()

    run(test())


@pytest.mark.parametrize(("log_format", "start"), [("text", r"\d\d:"), ("json", r"\{")])
def test_the_engines_lines_have_the_form_that_was_asked_for(
    log_format: LogFormat, start: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async def test() -> None:
        client = ProcessEngineClient(EngineConfig(), factory=f"{ENGINES}:broken", log_format=log_format)
        with pytest.raises(EngineDeadError):
            await client.start()

    run(test())
    (line, *_) = [line for line in capfd.readouterr().err.splitlines() if "the engine cannot start" in line]
    assert re.match(start, line)


def test_a_wrong_setting_is_told_once_and_not_logged_by_the_engine(capfd: pytest.CaptureFixture[str]) -> None:
    async def test() -> None:
        client = ProcessEngineClient(EngineConfig(), factory=f"{ENGINES}:misconfigured")
        with pytest.raises(EngineDeadError, match="the device wants 7"):
            await client.start()

    run(test())
    assert "the device wants 7" not in capfd.readouterr().err


def test_a_cancelled_start_leaves_no_process() -> None:
    async def test() -> None:
        client = ProcessEngineClient(EngineConfig(), factory=f"{ENGINES}:never_ready")
        start = asyncio.create_task(client.start())
        await until(lambda: client.pid is not None)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        assert client.pid is not None
        assert not is_alive(client.pid)

    run(test())


def test_shutdown_while_starting_ends_the_start() -> None:
    async def test() -> None:
        client = ProcessEngineClient(EngineConfig(), factory=f"{ENGINES}:never_ready")
        start = asyncio.create_task(client.start())
        await until(lambda: client.pid is not None)
        await client.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await start
        assert client.pid is not None
        assert not is_alive(client.pid)

    run(test())


def test_shutdown_before_the_start_is_no_error() -> None:
    run(ProcessEngineClient(EngineConfig()).shutdown())


def test_shutdown_ends_requests_and_process_twice_over() -> None:
    async def test() -> None:
        async with ready_client() as client:
            directory = client._directory
            assert directory is not None
            assert directory.stat().st_mode & 0o777 == 0o700
            task = asyncio.create_task(collect(client, request("r", first_token=SLOW, max_tokens=400)))
            await until(lambda: client.stats.num_running == 1)
            await asyncio.gather(client.shutdown(), client.shutdown())
            with pytest.raises(EngineDeadError, match="shut down"):
                await task
            assert client.pid is not None
            assert not is_alive(client.pid)
            assert not directory.exists()

    run(test())


def test_an_engine_that_does_not_end_is_killed() -> None:
    async def test() -> None:
        client = ProcessEngineClient(EngineConfig(), factory=f"{ENGINES}:inventing", shutdown_seconds=0.05)
        await client.start()
        assert client.pid is not None
        os.kill(client.pid, signal.SIGSTOP)
        await client.shutdown()
        assert not is_alive(client.pid)

    run(test())


def test_the_heartbeat_goes_on_in_idleness() -> None:
    async def test() -> None:
        async with ready_client() as client:
            for _ in range(2):
                beat = client._heartbeat_at
                await until(lambda beat=beat: client._heartbeat_at > beat)  # type: ignore[misc]
            assert client.seconds_since_heartbeat < WAIT_SECONDS

    run(test())


def test_the_last_snapshot_counts_everything() -> None:
    async def test() -> None:
        async with ready_client() as client:
            await asyncio.gather(*(collect(client, request(f"r{number}", max_tokens=7)) for number in range(5)))
            await until(lambda: client.stats.num_running == 0 and client.stats.num_generation_tokens == 35)
            assert client.stats.num_steps >= 7

    run(test())


def test_signals_to_the_group_do_not_end_the_engine() -> None:
    async def test() -> None:
        async with ready_client() as client:
            assert client.pid is not None
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(client.pid, number)
            assert (await collect(client, request("r")))[0] == [0, 1, 2]

    run(test())


@pytest.mark.parametrize("factory", ["inventing", "never_ready"])
def test_the_engine_ends_when_the_server_is_killed(factory: str) -> None:
    code = f"""
import asyncio
from runtime.config import EngineConfig
from runtime.process_client import ProcessEngineClient
async def main():
    client = ProcessEngineClient(EngineConfig(), factory="{ENGINES}:{factory}")
    task = asyncio.create_task(client.start())
    while client.pid is None:
        await asyncio.sleep(0.01)
    if "{factory}" == "inventing":
        await task
    print(client.pid, client._directory, flush=True)
    await asyncio.sleep(3600)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        pid, directory = server.stdout.readline().split()
        engine_pid = int(pid)
        assert is_alive(engine_pid)
        server.kill()
    deadline = time.monotonic() + WAIT_SECONDS
    while is_alive(engine_pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(engine_pid)
    assert not Path(directory).exists()


def test_the_real_engine_serves_in_its_process(tiny_checkpoint: Path) -> None:
    async def test() -> None:
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

    run(test())


def test_the_client_imports_no_torch() -> None:
    code = "import sys, runtime.process_client; print({'torch', 'transformers', 'fastapi'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
