"""Engines for tests of the process pair: the real engine and scheduler, with an executor that invents tokens at once.

Named to the child by import path. What a request gets is in its prompt: see `InventingRunner`.
"""

import os
import signal
import time
from collections.abc import Sequence
from typing import NoReturn

import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime.config import ConfigError, EngineConfig
from runtime.device_errors import EngineFatalError
from runtime.engine import Engine
from runtime.request import Request
from runtime.request_budget import request_bytes
from runtime.scheduler.admission import SchedulerLimits
from runtime.scheduler.output import SampledToken, SchedulerOutput, StepResult
from runtime.scheduler.scheduler import Scheduler
from runtime.stats import EngineInfo, MemoryLedger

# First token of a prompt: what its steps do.
SLOW, RAISE, FATAL, KILL = 9001, 9002, 9003, 9004


def engine_info() -> EngineInfo:
    ledger = MemoryLedger(
        requested_bytes=0, components={}, num_blocks=256, block_size=4, block_bytes=0, unplanned_bytes=0
    )
    return EngineInfo(
        model="inventing",
        device="cpu",
        dtype="float32",
        attention_backend="none",
        encoder_attention_backend="none",
        max_model_len=512,
        encoder_cache_tokens=64,
        memory=ledger,
        graphs=(),
        startup_phase_seconds={},
    )


class InventingRunner:
    """Token number n of a request is the sum of its pixels, modulo 1000, plus n."""

    def __init__(self) -> None:
        self.requests: dict[str, tuple[Request, int]] = {}
        self.num_tokens: dict[str, int] = {}

    def add(self, request: Request, pixels: Sequence[NDArray[np.uint8]]) -> None:
        if request.sampling.top_k < 0:
            raise ValueError("top_k is negative")
        if request.sampling.top_k == 13:
            raise RuntimeError("no luck")
        self.requests[request.request_id] = (request, sum(int(array.sum()) for array in pixels) % 1000)
        self.num_tokens[request.request_id] = 0

    def remove(self, request_id: str) -> None:
        self.requests.pop(request_id, None)
        self.num_tokens.pop(request_id, None)

    def run(self, output: SchedulerOutput) -> StepResult:
        for part in output.requests:
            match self.requests[part.request_id][0].prompt_token_ids[0]:
                case 9001:
                    time.sleep(0.01)
                case 9002:
                    raise RuntimeError("a step went wrong")
                case 9003:
                    raise EngineFatalError("the device is gone")
                case 9004:
                    os.kill(os.getpid(), signal.SIGKILL)
        tokens: dict[str, SampledToken] = {}
        for part in output.requests:
            if part.is_sampling:
                base = self.requests[part.request_id][1]
                tokens[part.request_id] = SampledToken(token_id=base + self.num_tokens[part.request_id])
                self.num_tokens[part.request_id] += 1
        return StepResult(tokens=tokens, failed={})


def inventing(config: EngineConfig) -> Engine:
    limits = SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=512,
        max_encoder_tokens_per_step=64,
    )
    scheduler = Scheduler(limits, eos_token_ids=[], num_blocks=4096, block_size=4, encoder_cache_tokens=64)
    return Engine(scheduler, InventingRunner(), engine_info())


class RefusingRunner(InventingRunner):
    """Refuses a request with which those that are here would hold more than was agreed."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self._max_bytes = max_bytes
        self._held: dict[str, int] = {}

    def add(self, request: Request, pixels: Sequence[NDArray[np.uint8]]) -> None:
        num_bytes = sum(self._held.values()) + request_bytes(request, pixels)
        if num_bytes > self._max_bytes:
            raise ValueError(f"{num_bytes} bytes of requests, agreed were {self._max_bytes}")
        super().add(request, pixels)
        self._held[request.request_id] = request_bytes(request, pixels)

    def remove(self, request_id: str) -> None:
        super().remove(request_id)
        self._held.pop(request_id, None)


def bounded(config: EngineConfig) -> Engine:
    """Keeps its clients to `config.request_memory_bytes`."""
    engine = inventing(config)
    assert config.request_memory_bytes is not None
    info = msgspec.structs.replace(engine.info, max_request_bytes=config.request_memory_bytes)
    return Engine(engine._scheduler, RefusingRunner(config.request_memory_bytes), info)


def misconfigured(config: EngineConfig) -> NoReturn:
    raise ConfigError(f"block_size is {config.block_size}; the device wants 7")


def broken(config: EngineConfig) -> NoReturn:
    raise RuntimeError("weights are nowhere")


def killed_while_starting(config: EngineConfig) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def never_ready(config: EngineConfig) -> NoReturn:
    while True:
        time.sleep(3600)
