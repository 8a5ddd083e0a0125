"""A client of an engine process for tests, what they ask it, and what they wait for."""

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ParamSpec

import numpy as np
from numpy.typing import NDArray

from runtime.client import EngineClient
from runtime.config import EngineConfig
from runtime.process_client import ProcessEngineClient
from runtime.request import ImageInput, Request, RequestOutput, SamplingParams

Arguments = ParamSpec("Arguments")

ENGINES = "tests.integration.process_engines"
WAIT_SECONDS = 30


def in_event_loop(test: Callable[Arguments, Coroutine[Any, Any, None]]) -> Callable[Arguments, None]:
    """An asynchronous test as pytest runs it, within `WAIT_SECONDS`."""

    async def bounded(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            await test(*args, **kwargs)

    @functools.wraps(test)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        asyncio.run(bounded(*args, **kwargs))

    return run


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
