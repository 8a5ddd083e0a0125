"""Where a decode step's time goes on a CPU: the model, and everything around it, at batch 1 and 8.

    python -m benchmarks.step_overhead

In one process, on one thread, with the comparison's checkpoint. Times are processor time of the thread, in
microseconds; the least of all steps is what the work costs, the median has the machine's other work in it. Writes
`benchmarks/results/step-overhead.json`.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before NumPy is imported, as the engine's process has it.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from benchmarks.compare_cpu import ROOT, commit, machine
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.executor import decoder_runner
from runtime.messages import Outputs, encode
from runtime.request import Request, SamplingParams
from runtime.startup import build_engine
from tests.checkpoint_factory import build_checkpoint

RESULT = ROOT / "benchmarks" / "results" / "step-overhead.json"

# What issue 6 asks for, by batch.
WANTED_OVERHEAD_US = {1: 300, 8: 1000}

PROMPT_TOKENS, OUTPUT_TOKENS = 40, 40
PARTS = ("schedule", "batch", "model", "sample", "update", "emit")


class Stopwatch:
    """Processor time by part of a step; `steps` has one row a step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._spent: dict[str, float] = defaultdict(float)

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose time counts for `part`."""

        def call(*arguments: Any, **keywords: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*arguments, **keywords)
            finally:
                self._spent[part] += time.thread_time() - start

        return call

    def wrap(self, owner: Any, name: str, part: str) -> None:
        setattr(owner, name, self.timed(part, getattr(owner, name)))

    def end_step(self) -> None:
        self.steps.append({part: self._spent[part] * 1e6 for part in ("step", *PARTS)})
        self._spent.clear()


def watched(engine: Engine) -> Stopwatch:
    """The engine's parts, timed from now on. Parts do not nest."""
    watch = Stopwatch()
    runner: Any = engine._runner._decoder
    watch.wrap(engine._scheduler, "schedule", "schedule")
    watch.wrap(engine._scheduler, "update", "update")
    watch.wrap(decoder_runner, "fill_batch", "batch")
    watch.wrap(runner._attention, "plan", "batch")
    for name in ("embed", "forward", "logits"):
        watch.wrap(runner._decoder, name, "model")
    watch.wrap(runner._sampler, "launch", "sample")
    watch.wrap(engine, "step", "step")
    return watch


def run(engine: Engine, watch: Stopwatch, batch: int, seed: int) -> list[dict[str, float]]:
    """Decodes `batch` requests; the rows of the steps in which all of them decode."""
    generator = np.random.default_rng(seed)
    for index in range(batch):
        request = Request(
            request_id=f"{seed}-{index}",
            prompt_token_ids=generator.integers(0, 4000, PROMPT_TOKENS).tolist(),
            sampling=SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True),
            arrival_time=time.time(),
        )
        engine.add(request, [])
    emit = watch.timed("emit", lambda outputs: encode(Outputs(outputs)))
    watch.steps.clear()
    while engine.has_work:
        emit(engine.step())
        watch.end_step()
    # The first step is the prefill, the last ones end requests.
    return watch.steps[2:-2]


def figures(steps: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Least and median of each part; `overhead` is the step and its message without the model."""
    for step in steps:
        step["overhead"] = step["step"] - step["model"] + step["emit"]
    return {
        part: {
            "min_us": round(min(step[part] for step in steps), 1),
            "p50_us": round(statistics.median(step[part] for step in steps), 1),
        }
        for part in steps[0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = build_checkpoint(Path(folder) / "bench", size="bench")
        engine = build_engine(EngineConfig(model=str(checkpoint), device="cpu", num_threads=1))
    watch = watched(engine)
    batches: dict[str, dict[str, dict[str, float]]] = {}
    for batch in WANTED_OVERHEAD_US:
        run(engine, watch, batch, seed=batch)
        steps = [step for seed in range(args.rounds) for step in run(engine, watch, batch, seed=100 * batch + seed)]
        batches[str(batch)] = figures(steps)
    result = {
        "benchmark": "step_overhead",
        "commit": commit(),
        "command": f"python -m benchmarks.step_overhead --rounds {args.rounds}",
        "machine": machine(),
        "time": "processor time of the engine's thread, in microseconds",
        "wanted_overhead_us": WANTED_OVERHEAD_US,
        "batches": batches,
    }
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
