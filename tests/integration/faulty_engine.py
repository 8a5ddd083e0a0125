"""The real engine on a real checkpoint, with a runner that breaks when a request's seed says so.

Named to the engine's process by import path. A request with any other seed, or none, is served as ever.
"""

import os
import signal
import time
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.config import EngineConfig
from runtime.engine import Engine, Runner
from runtime.request import Request
from runtime.scheduler.output import SchedulerOutput, StepResult
from runtime.startup import build_engine

# Seeds, and what a request with one does.
RAISE_AT_ONCE = 9_000_001  # its first step raises
RAISE_LATER = 9_000_002  # the step after its third token raises
REFUSED_BY_RUNNER = 9_000_003  # the runner cannot take it
HANG = 9_000_004  # its first step never ends
KILL = 9_000_005  # its first step ends the process
FAILS_ITS_PICTURES = 9_000_006  # the runner says that its pictures could not be encoded
PAUSE = 9_000_007  # its first step takes three seconds
BREAKS_THE_DEVICE = 9_000_008  # its first step leaves the device unusable

TOKENS_BEFORE_LATER = 3


class FaultyRunner:
    """Passes everything on to the engine's own runner, faults excepted."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._seeds: dict[str, int | None] = {}
        self._lengths: dict[str, int] = {}

    def add(self, request: Request, pixels: Sequence[NDArray[np.uint8]]) -> None:
        if request.sampling.seed == REFUSED_BY_RUNNER:
            raise RuntimeError("a fault on purpose: secret detail")
        self._seeds[request.request_id] = request.sampling.seed
        self._lengths[request.request_id] = len(request.prompt_token_ids)
        self._runner.add(request, pixels)

    def remove(self, request_id: str) -> None:
        self._seeds.pop(request_id, None)
        self._lengths.pop(request_id, None)
        self._runner.remove(request_id)

    def run(self, output: SchedulerOutput) -> StepResult:
        failed: dict[str, str] = {}
        for part in output.requests:
            num_new = part.num_computed_tokens + part.num_scheduled_tokens - self._lengths[part.request_id]
            match self._seeds[part.request_id]:
                case 9_000_001:
                    raise RuntimeError("a fault on purpose: secret detail")
                case 9_000_002 if num_new >= TOKENS_BEFORE_LATER:
                    raise RuntimeError("a fault on purpose: secret detail")
                case 9_000_004:
                    time.sleep(3600)
                case 9_000_005:
                    os.kill(os.getpid(), signal.SIGKILL)
                case 9_000_006:
                    failed[part.request_id] = "secret detail"
                case 9_000_008:
                    raise torch.AcceleratorError("CUDA error: device-side assert triggered")
                case 9_000_007 if num_new == 0:
                    time.sleep(3)
        result = self._runner.run(output)
        tokens = {name: token for name, token in result.tokens.items() if name not in failed}
        return StepResult(tokens=tokens, failed={**result.failed, **failed}, refused=result.refused)


def build(config: EngineConfig) -> Engine:
    engine = build_engine(config)
    engine._runner = FaultyRunner(engine._runner)
    return engine
