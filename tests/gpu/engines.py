"""Whole engines on a GPU, small enough to start in a second or two, and a process that takes memory beside them."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from runtime.config import GIB, EngineConfig
from runtime.offline import Answer, OfflineEngine
from runtime.workload import mixed_requests

SETTINGS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "load_format": "random",
    "max_model_len": 1024,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 512,
    "min_pixels": 3136,
    "max_pixels": 200704,
    "kv_cache_memory_bytes": GIB // 2,
    "encoder_graph_budgets": (64, 256),
    "compile": "off",
}

TENANT = """
import sys, torch
block = torch.zeros(1, device="cuda")
print("here", flush=True)
for line in sys.stdin:
    block = None
    torch.cuda.empty_cache()
    if int(line):
        block = torch.empty(int(line), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    print("done", flush=True)
"""


def start(directory: Path, **knobs: Any) -> OfflineEngine:
    return OfflineEngine(EngineConfig(model=str(directory), **{**SETTINGS, **knobs}))


def serve(engine: OfflineEngine, count: int, *, seed: int = 0) -> list[Answer]:
    """Answers to a mix of requests, none of which may fail."""
    requests = mixed_requests(count, model=engine.model_config, config=engine.config, seed=seed)
    answers = engine.generate(requests)
    errors = [answer.error for answer in answers if answer.error]
    assert errors == []
    assert engine.stats().num_failed_steps == 0
    return answers


def private_bytes() -> tuple[int, int]:
    """Bytes of all segments in private pools of torch's allocator, and how many of them belong to live blocks."""
    cuda: Any = torch.cuda
    segments = [segment for segment in cuda.memory_snapshot() if tuple(segment["segment_pool_id"]) != (0, 0)]
    return sum(one["total_size"] for one in segments), sum(one["allocated_size"] for one in segments)


class Tenant:
    """Another process on the GPU, with a context of its own."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self._await("here")

    def hold(self, num_bytes: int) -> None:
        """Returns once it holds so many bytes, and no others."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{num_bytes}\n")
        self._process.stdin.flush()
        self._await("done")

    def _await(self, word: str) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline().strip() == word


@contextmanager
def tenant() -> Iterator[Tenant]:
    """A tenant that is there before an engine's start, and gone at the end."""
    command = [sys.executable, "-c", TENANT]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Tenant(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(30)
