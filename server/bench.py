"""Load on any server with OpenAI's chat API: streamed requests, a table, and one line of JSON at the end.

Knows the wire only. Pictures are seeded noise, each one different, so that no cache helps.
"""

import argparse
import asyncio
import base64
import io
import json
import random
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

import httptools
import httpx

from runtime.percentiles import percentiles
from server.bench_client import Answer, LoadConnection
from server.plan import table
from server.sse import parse_event


@dataclass(kw_only=True)
class Sample:
    """What one request gave; times in seconds. `error` is a status or the kind of an exception."""

    start: float
    first: float | None = None
    end: float = 0.0
    gaps: list[float] = field(default_factory=list)
    num_chunks: int = 0
    num_output_tokens: int | None = None
    num_prompt_tokens: int = 0
    error: str | None = None


async def measure_load(arguments: argparse.Namespace) -> int:
    """Runs the load and prints the result; the exit code is 1 if any request failed."""
    async with httpx.AsyncClient(
        base_url=base_url(arguments), headers=headers_of(arguments), timeout=arguments.timeout, trust_env=False
    ) as client:
        model = arguments.model or (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
    bodies = request_bodies(arguments, model)
    with ExitStack() as stack:
        connections = [
            stack.enter_context(
                closing(
                    LoadConnection(
                        base_url(arguments), headers=headers_of(arguments), timeout_seconds=arguments.timeout
                    )
                )
            )
            for _ in range(arguments.concurrency)
        ]
        await run_all(connections, bodies[: arguments.warmup])
        start = time.perf_counter()
        samples = await run_all(connections, bodies[arguments.warmup :])
    seconds = max(sample.end for sample in samples) - start
    result = summary(samples, seconds)
    result.update(
        {
            "concurrency": arguments.concurrency,
            "image": [f"{width}x{height}" for width, height in arguments.image],
            "images_per_request": arguments.images_per_request if arguments.image else 0,
            "max_tokens": arguments.max_tokens,
            "model": model,
            "seed": arguments.seed,
        }
    )
    print_result(result)
    return 1 if result["errors"] else 0


def base_url(arguments: argparse.Namespace) -> str:
    """The server's, without the version of its interface."""
    return str(arguments.url).rstrip("/").removesuffix("/v1")


def headers_of(arguments: argparse.Namespace) -> dict[str, str]:
    """Of every request."""
    return {"authorization": f"Bearer {arguments.api_key}"} if arguments.api_key else {}


def request_bodies(arguments: argparse.Namespace, model: str) -> list[bytes]:
    """All bodies, made before the clock runs."""
    generator = random.Random(arguments.seed)
    bodies = []
    for index in range(arguments.warmup + arguments.requests):
        content: Any = arguments.text
        if arguments.image:
            width, height = arguments.image[index % len(arguments.image)]
            content = [
                {"type": "image_url", "image_url": {"url": noise_url(generator, width, height)}}
                for _ in range(arguments.images_per_request)
            ]
            content.append({"type": "text", "text": arguments.text})
        body = {
            "model": model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": arguments.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if arguments.ignore_eos:
            body["ignore_eos"] = True
        bodies.append(json.dumps(body).encode())
    return bodies


def noise_url(generator: random.Random, width: int, height: int) -> str:
    """A data URL of a PNG whose pixels are noise."""
    from PIL import Image

    image = Image.frombytes("RGB", (width, height), generator.randbytes(3 * width * height))
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


async def run_all(connections: Sequence[LoadConnection], bodies: list[bytes]) -> list[Sample]:
    """Keeps a request in flight on each connection until all are done."""
    waiting = iter(bodies)

    async def worker(connection: LoadConnection) -> list[tuple[Sample, Answer | None]]:
        return [await run_one(connection, body) for body in waiting]

    answers = [pair for pairs in await asyncio.gather(*map(worker, connections)) for pair in pairs]
    for sample, answer in answers:
        if answer is not None:
            take_in(answer, sample)
    return [sample for sample, _ in answers]


async def run_one(connection: LoadConnection, body: bytes) -> tuple[Sample, Answer | None]:
    """A sample that knows its times, and what came, which is read once the clock stands still."""
    sample = Sample(start=time.perf_counter())
    answer: Answer | None = None
    try:
        answer = await connection.post("/v1/chat/completions", body)
    except (OSError, httptools.HttpParserError) as error:
        sample.error = type(error).__name__
    sample.end = time.perf_counter()
    return sample, answer


def take_in(answer: Answer, sample: Sample) -> None:
    """Reads the events of an answer; the time of a chunk is when its bytes came."""
    if answer.status != 200:
        sample.error = str(answer.status)
        return
    rest = b""
    last: float | None = None
    for now, block in answer.blocks:
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            event = parse_event(line.decode(errors="replace").rstrip("\r"))
            if event is None:
                continue
            if "error" in event:
                sample.error = "error event"
                continue
            if usage := event.get("usage"):
                sample.num_output_tokens = usage["completion_tokens"]
                sample.num_prompt_tokens = usage["prompt_tokens"]
            if any(choice.get("delta", {}).get("content") for choice in event.get("choices", ())):
                sample.num_chunks += 1
                if last is None:
                    sample.first = now
                else:
                    sample.gaps.append(now - last)
                last = now
    if sample.error is None and sample.first is None:
        sample.error = "no output"


def summary(samples: list[Sample], seconds: float) -> dict[str, Any]:
    """Figures of one run; times in milliseconds."""
    good = [sample for sample in samples if sample.error is None]
    num_output_tokens = sum(
        sample.num_chunks if sample.num_output_tokens is None else sample.num_output_tokens for sample in good
    )
    errors: dict[str, int] = {}
    for sample in samples:
        if sample.error is not None:
            errors[sample.error] = errors.get(sample.error, 0) + 1
    return {
        "requests": len(samples),
        "errors": sum(errors.values()),
        "errors_by_kind": errors,
        "seconds": round(seconds, 3),
        "requests_per_second": round(len(good) / seconds, 3),
        "output_tokens_per_second": round(num_output_tokens / seconds, 1),
        "output_tokens": num_output_tokens,
        "prompt_tokens": sum(sample.num_prompt_tokens for sample in good),
        "ttft_ms": percentiles([sample.first - sample.start for sample in good if sample.first is not None]),
        "itl_ms": percentiles([gap for sample in good for gap in sample.gaps]),
        "e2e_ms": percentiles([sample.end - sample.start for sample in good]),
    }


def print_result(result: dict[str, Any]) -> None:
    names = ("requests", "errors", "seconds", "requests_per_second", "output_tokens_per_second", "prompt_tokens")
    print(table(("figure", "value"), [(name, str(result[name])) for name in names]))
    rows = [
        (name, *(str(result[key].get(column, "-")) for column in ("mean", "p50", "p90", "p99")))
        for name, key in (("TTFT", "ttft_ms"), ("ITL", "itl_ms"), ("E2E", "e2e_ms"))
    ]
    print()
    print(table(("ms", "mean", "p50", "p90", "p99"), rows))
    print()
    print(json.dumps(result))
