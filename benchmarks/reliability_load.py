"""The load of `benchmarks.reliability`: streams with pictures, requests that break the engine, inputs that are no
requests, clients that leave. Knows the wire; counts what became of each. Every loop ends at a given time.
"""

import asyncio
import contextlib
import io
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import httpx
import numpy as np
from PIL import Image

from server.sse import parse_event
from tests.http_server import chat, data_url, raw_request
from tests.integration import faulty_engine
from tests.picture_files import PICTURE_FILES, mangled

FAULTS = {
    "step raises": faulty_engine.RAISE_AT_ONCE,
    "step raises after three tokens": faulty_engine.RAISE_LATER,
    "request refused by the executor": faulty_engine.REFUSED_BY_RUNNER,
    "pictures fail in the encoder": faulty_engine.FAILS_ITS_PICTURES,
}
SIZES = ((112, 112), (224, 224), (224, 112), (336, 224))
QUESTION = {"type": "text", "text": "What is in the picture?"}
MAX_NEW_TOKENS = 32
NUM_TROUBLEMAKERS = 8


@dataclass(kw_only=True)
class Tally:
    """What became of one kind of request. `wrong`: by what happened instead of what should have."""

    sent: int = 0
    right: int = 0
    wrong: Counter[str] = field(default_factory=Counter)

    def count(self, outcome: str | None) -> None:
        """`outcome` is None if all was as it should be."""
        self.sent += 1
        if outcome is None:
            self.right += 1
        else:
            self.wrong[outcome] += 1

    def document(self) -> dict[str, Any]:
        return {"sent": self.sent, "right": self.right, "wrong": dict(self.wrong)}


class Load:
    """Requests to one server until a deadline (`time.monotonic()`)."""

    def __init__(self, client: httpx.AsyncClient, *, deadline: float, seed: int = 0) -> None:
        self.streams = Tally()
        self.faults = {name: Tally() for name in FAULTS}
        self.bad_inputs = Tally()
        self.leavers = Tally()
        self.num_tokens = 0
        self.first_token_seconds: list[float] = []
        self._client = client
        self._deadline = deadline
        self._random = random.Random(seed)
        self._fault_names = cycle(FAULTS)
        self._noise = np.random.default_rng(seed)

    async def run(self, num_streams: int, *, has_trouble: bool = True) -> None:
        """`num_streams` streams at a time and, with `has_trouble`, everything else beside them."""
        tasks = [self._repeat(self._stream) for _ in range(num_streams)]
        if has_trouble:
            # Several of each: most of them wait in the queue as long as the streams do.
            for _ in range(NUM_TROUBLEMAKERS):
                tasks += [self._repeat(action, 0.1) for action in (self._fault, self._bad_input, self._leave)]
        await asyncio.gather(*tasks)

    async def _repeat(self, action: Callable[[], Awaitable[None]], pause_seconds: float = 0.0) -> None:
        while time.monotonic() < self._deadline:
            await action()
            await asyncio.sleep(pause_seconds)

    def picture_part(self) -> dict[str, Any]:
        """A picture that never was before."""
        width, height = self._random.choice(SIZES)
        buffer = io.BytesIO()
        pixels = self._noise.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(buffer, "PNG", compress_level=0)
        return {"type": "image_url", "image_url": {"url": data_url(buffer.getvalue())}}

    def _body(self, **fields: Any) -> dict[str, Any]:
        options = {
            "stream": True,
            "max_tokens": MAX_NEW_TOKENS,
            "temperature": 1,
            "seed": self._random.randrange(10**6),
        }
        return chat([self.picture_part(), QUESTION], **{**options, "ignore_eos": True, **fields})

    async def _stream(self) -> None:
        started = time.monotonic()
        outcome = await stream_outcome(self._client, self._body())
        if outcome.first_at is not None:
            self.first_token_seconds.append(outcome.first_at - started)
        self.num_tokens += outcome.num_tokens
        if outcome.error is None and outcome.num_tokens != MAX_NEW_TOKENS:
            outcome.error = f"{outcome.num_tokens} tokens"
        self.streams.count(outcome.error)

    async def _fault(self) -> None:
        name = next(self._fault_names)
        is_stream = self._random.random() < 0.5
        body = self._body(seed=FAULTS[name], stream=is_stream)
        if is_stream:
            outcome = await stream_outcome(self._client, body)
            told = outcome.error in ("500", "error event") and not outcome.is_done
            self.faults[name].count(None if told else f"stream: {outcome.error}")
            return
        try:
            status = (await self._client.post("/v1/chat/completions", json=body)).status_code
        except httpx.HTTPError as error:
            self.faults[name].count(type(error).__name__)
        else:
            self.faults[name].count(None if status == 500 else str(status))

    async def _bad_input(self) -> None:
        """A damaged picture (which may still be one), or a body that is no request."""
        try:
            if self._random.random() < 0.7:
                data = mangled(PICTURE_FILES[self._random.choice(sorted(PICTURE_FILES))](), self._random)
                part = {"type": "image_url", "image_url": {"url": data_url(data)}}
                response = await self._client.post("/v1/chat/completions", json=chat([part], max_tokens=1))
            else:
                body = json.dumps(chat("x" * 100)).encode()
                body = body[: self._random.randrange(len(body))]
                response = await self._client.post(
                    "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
                )
        except httpx.HTTPError as error:
            self.bad_inputs.count(type(error).__name__)
            return
        self.bad_inputs.count(None if response.status_code in (200, 400) else str(response.status_code))

    async def _leave(self) -> None:
        """Sends a request, or half of one, and leaves before the answer is complete."""
        request = raw_request(self._body(max_tokens=500))
        url = self._client.base_url
        try:
            reader, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(request if self._random.random() < 0.7 else request[: len(request) // 2])
            await writer.drain()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader.read(200), self._random.random() * 2)
            writer.transport.abort()
        except OSError as error:
            self.leavers.count(type(error).__name__)
        else:
            self.leavers.count(None)


@dataclass(kw_only=True)
class StreamOutcome:
    """How one stream went. `error` None: a status of 200, all chunks, a finish reason, the end mark."""

    num_tokens: int = 0
    first_at: float | None = None
    is_done: bool = False
    error: str | None = None


async def stream_outcome(client: httpx.AsyncClient, body: dict[str, Any]) -> StreamOutcome:
    """Reads a stream to its end, whatever that is."""
    outcome = StreamOutcome()
    body = {**body, "stream_options": {"include_usage": True}}
    finish_reason: str | None = None
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                outcome.error = str(response.status_code)
                await response.aread()
                return outcome
            async for line in response.aiter_lines():
                outcome.first_at = outcome.first_at or time.monotonic()
                outcome.is_done = outcome.is_done or line == "data: [DONE]"
                event = parse_event(line)
                if event is None:
                    continue
                if "error" in event:
                    outcome.error = "error event"
                    continue
                if usage := event.get("usage"):
                    outcome.num_tokens = usage["completion_tokens"]
                for choice in event["choices"]:
                    finish_reason = choice["finish_reason"] or finish_reason
    except httpx.HTTPError as error:
        outcome.error = type(error).__name__
        return outcome
    if outcome.error is None and not (outcome.is_done and finish_reason):
        outcome.error = "cut off"
    return outcome
