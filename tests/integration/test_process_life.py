"""The engine's process from its start to its end, whichever end that is."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runtime.client import EngineDeadError
from runtime.config import EngineConfig
from runtime.log import LogFormat
from runtime.process_client import ProcessEngineClient
from tests.integration.process_clients import (
    ENGINES,
    WAIT_SECONDS,
    collect,
    in_event_loop,
    is_alive,
    ready_client,
    request,
    until,
)
from tests.integration.process_engines import FATAL, KILL, SLOW


@in_event_loop
async def test_the_engines_death_ends_all_requests() -> None:
    async with ready_client() as client:
        slow = [
            asyncio.create_task(collect(client, request(f"r{n}", first_token=SLOW, max_tokens=400))) for n in range(3)
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


@pytest.mark.parametrize(("first_token", "reason"), [(FATAL, "ended with status 2"), (KILL, "killed by SIGKILL")])
@in_event_loop
async def test_an_engine_beyond_use_ends_its_process(first_token: int, reason: str) -> None:
    async with ready_client() as client:
        with pytest.raises(EngineDeadError, match=reason):
            await collect(client, request("r", first_token=first_token))


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        ("misconfigured", "^block_size is 16; the device wants 7$"),
        ("broken", "RuntimeError: weights are nowhere"),
        ("killed_while_starting", "killed by SIGKILL"),
        ("no_such_function", "no_such_function"),
    ],
)
@in_event_loop
async def test_a_failed_start_says_why(factory: str, reason: str) -> None:
    client = ProcessEngineClient(EngineConfig(), factory=f"{ENGINES}:{factory}")
    with pytest.raises(EngineDeadError, match=reason):
        await client.start()
    assert client.state == "dead"
    assert client.pid is not None
    assert not is_alive(client.pid)
    await client.shutdown()


@pytest.mark.parametrize(("log_format", "start"), [("text", r"\d\d:"), ("json", r"\{")])
@in_event_loop
async def test_the_engines_lines_have_the_form_that_was_asked_for(
    log_format: LogFormat, start: str, capfd: pytest.CaptureFixture[str]
) -> None:
    client = ProcessEngineClient(EngineConfig(), factory=f"{ENGINES}:broken", log_format=log_format)
    with pytest.raises(EngineDeadError):
        await client.start()
    (line, *_) = [line for line in capfd.readouterr().err.splitlines() if "the engine cannot start" in line]
    assert re.match(start, line)


@in_event_loop
async def test_a_wrong_setting_is_told_once_and_not_logged_by_the_engine(capfd: pytest.CaptureFixture[str]) -> None:
    client = ProcessEngineClient(EngineConfig(), factory=f"{ENGINES}:misconfigured")
    with pytest.raises(EngineDeadError, match="the device wants 7"):
        await client.start()
    assert "the device wants 7" not in capfd.readouterr().err


@in_event_loop
async def test_a_cancelled_start_leaves_no_process() -> None:
    client = ProcessEngineClient(EngineConfig(), factory=f"{ENGINES}:never_ready")
    start = asyncio.create_task(client.start())
    await until(lambda: client.pid is not None)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert client.pid is not None
    assert not is_alive(client.pid)


@in_event_loop
async def test_shutdown_while_starting_ends_the_start() -> None:
    client = ProcessEngineClient(EngineConfig(), factory=f"{ENGINES}:never_ready")
    start = asyncio.create_task(client.start())
    await until(lambda: client.pid is not None)
    await client.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        await start
    assert client.pid is not None
    assert not is_alive(client.pid)


@in_event_loop
async def test_shutdown_before_the_start_is_no_error() -> None:
    await ProcessEngineClient(EngineConfig()).shutdown()


@in_event_loop
async def test_shutdown_ends_requests_and_process_twice_over() -> None:
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


@in_event_loop
async def test_an_engine_that_does_not_end_is_killed() -> None:
    client = ProcessEngineClient(EngineConfig(), factory=f"{ENGINES}:inventing", shutdown_seconds=0.05)
    await client.start()
    assert client.pid is not None
    os.kill(client.pid, signal.SIGSTOP)
    await client.shutdown()
    assert not is_alive(client.pid)


@in_event_loop
async def test_signals_to_the_group_do_not_end_the_engine() -> None:
    async with ready_client() as client:
        assert client.pid is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(client.pid, number)
        assert (await collect(client, request("r")))[0] == [0, 1, 2]


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
