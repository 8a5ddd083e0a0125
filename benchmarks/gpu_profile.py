"""Where the device's time goes: encoder replays and decode steps of one engine, as a table and one line of JSON.

    python -m benchmarks.gpu_profile MODEL [--load-format random] [--kernels]

Replays are timed between two events on the device, steps by the clock around `step`; their difference is host work
that nothing hides. With --kernels, torch's profiler says which kernels one replay of each kind consists of. Runs on a
CPU too, where a replay is an emulated one, so that the script itself can be tested.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from runtime.config import EngineConfig
from runtime.executor.graphs import Bucket, GraphSet
from runtime.offline import OfflineEngine
from runtime.request import Request, SamplingParams
from server.plan import table

NUM_REPLAYS = 20
NUM_STEPS = 40
NUM_WARM_UP_STEPS = 4
TOP_KERNELS = 12


class ReplayClock:
    """Times every replay of a graph set between two events; on a CPU, by the clock."""

    def __init__(self, graphs: GraphSet[Any], *, is_cuda: bool) -> None:
        self._is_cuda = is_cuda
        self._replay = graphs.replay
        self._marks: list[tuple[Any, Any]] = []
        graphs.replay = self._timed  # type: ignore[method-assign]

    def take_ms(self) -> list[float]:
        """Milliseconds of the replays since the last call."""
        if self._is_cuda:
            torch.cuda.synchronize()
            times = [start.elapsed_time(end) for start, end in self._marks]
        else:
            times = [(end - start) * 1000 for start, end in self._marks]
        self._marks = []
        return times

    def _timed(self, bucket: Bucket, *, tokens: int, items: int) -> torch.Tensor:
        start = self._mark()
        output = self._replay(bucket, tokens=tokens, items=items)
        self._marks.append((start, self._mark()))
        return output

    def _mark(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def encoder_rows(engine: Any, clock: ReplayClock, budgets: Sequence[int]) -> list[dict[str, Any]]:
    """One image that fills the budget: a replay, and with it the copy of pixels and layout before it."""
    encoder = engine._encoder
    rows = []
    for bucket in encoder.graphs.buckets:
        if bucket.tokens not in budgets or encoder.graphs.choose(tokens=bucket.tokens, items=1) != bucket:
            continue
        pixels = encoder.program.noise(bucket.tokens)
        inputs = encoder.graphs.inputs(bucket)
        walls = []
        with torch.inference_mode():
            for _ in range(NUM_REPLAYS):
                started = time.perf_counter()
                encoder.program.fill(bucket, inputs, [pixels])
                encoder.graphs.replay(bucket, tokens=bucket.tokens, items=1)
                synchronise()
                walls.append((time.perf_counter() - started) * 1000)
        rows.append(row(f"encoder {bucket.tokens} tokens", clock.take_ms()[2:], walls[2:]))
    return rows


def decode_rows(engine: Any, clock: ReplayClock, batches: Sequence[int], context: int) -> list[dict[str, Any]]:
    """Steps of sequences with about `context` tokens each."""
    rows = []
    for batch in batches:
        sampling = SamplingParams(max_tokens=NUM_STEPS + NUM_WARM_UP_STEPS + 8, ignore_eos=True)
        for index in range(batch):
            tokens = np.random.default_rng([batch, index]).integers(0, 400, context).tolist()
            request_id = f"profile-{batch}-{index}"
            engine.add(Request(request_id=request_id, prompt_token_ids=tokens, sampling=sampling, arrival_time=0.0), [])
        while len([output for output in engine.step() if output.new_token_ids]) < batch:
            pass
        for _ in range(NUM_WARM_UP_STEPS):
            engine.step()
        clock.take_ms()
        walls = []
        for _ in range(NUM_STEPS):
            started = time.perf_counter()
            engine.step()
            walls.append((time.perf_counter() - started) * 1000)
        rows.append(row(f"decode, {batch} sequences", clock.take_ms(), walls))
        for index in range(batch):
            engine.abort(f"profile-{batch}-{index}")
    return rows


def row(what: str, replays: Sequence[float], walls: Sequence[float]) -> dict[str, Any]:
    """Medians in milliseconds. No replays: the bucket ran eager."""
    replay = statistics.median(replays) if replays else None
    wall = statistics.median(walls)
    return {
        "what": what,
        "replay_ms": None if replay is None else round(replay, 4),
        "wall_ms": round(wall, 4),
        "worst_wall_ms": round(max(walls), 4),
        "host_ms": None if replay is None else round(wall - replay, 4),
    }


def kernel_rows(run: Callable[[], object]) -> list[dict[str, Any]]:
    """The kernels of one call that take longest, microseconds on the device."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        run()
        synchronise()
    kernels = [event for event in found.key_averages() if event.self_device_time_total > 0]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    return [
        {"kernel": event.key[:100], "calls": event.count, "us": round(event.self_device_time_total, 1)}
        for event in kernels[:TOP_KERNELS]
    ]


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main(argv: Sequence[str] | None = None) -> int:
    """Starts the engine, measures, prints; the exit code is 0."""
    parser = argparse.ArgumentParser(prog="gpu_profile", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--load-format", choices=("auto", "random"), default="auto")
    parser.add_argument("--budgets", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--context", type=int, default=400, help="tokens of each sequence [%(default)s]")
    parser.add_argument("--kernels", action="store_true", help="which kernels a replay consists of")
    parser.add_argument("--settings", default="{}", help="further settings of the engine, as JSON")
    arguments = parser.parse_args(argv)
    settings: dict[str, Any] = {
        "model": arguments.model,
        "load_format": arguments.load_format,
        "max_model_len": max(1024, arguments.context + 128),
        "max_num_seqs": max(arguments.batches),
        "max_num_batched_tokens": 2048,
        "max_pixels": max(arguments.budgets) * 28 * 28,
        "gpu_memory_utilization": 0.5,
        "enable_prefix_caching": False,
        "encoder_graph_budgets": tuple(sorted(arguments.budgets)),
        "encoder_graph_max_items": 4,
        "decoder_graphs": "decode",
        "decoder_graph_sizes": tuple(sorted(arguments.batches)),
        **json.loads(arguments.settings),
    }
    started = time.perf_counter()
    offline = OfflineEngine(msgspec.convert(settings, EngineConfig))
    ready_seconds = time.perf_counter() - started
    engine: Any = offline._engine
    is_cuda = offline.info.device == "cuda"
    decoder = ReplayClock(engine._runner._decoder._graphs, is_cuda=is_cuda)
    encoder = ReplayClock(engine._encoder.graphs, is_cuda=is_cuda)
    rows = encoder_rows(engine, encoder, arguments.budgets)
    rows += decode_rows(engine, decoder, arguments.batches, arguments.context)
    names = ("what", "replay_ms", "wall_ms", "worst_wall_ms", "host_ms")
    print(table(names, [[str(entry[name]) for name in names] for entry in rows]))
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if is_cuda else "cpu",
        "torch": torch.__version__,
        "model": arguments.model,
        "context": arguments.context,
        "attention": [offline.info.attention_backend, offline.info.encoder_attention_backend],
        "ready_seconds": round(ready_seconds, 2),
        "phases": {name: round(value, 3) for name, value in offline.info.startup_phase_seconds.items()},
        "rows": rows,
    }
    if arguments.kernels:
        graphs = engine._encoder.graphs
        with torch.inference_mode():
            bucket = graphs.buckets[0]
            result["encoder_kernels"] = kernel_rows(lambda: graphs.replay(bucket, tokens=bucket.tokens, items=1))
        sampling = SamplingParams(max_tokens=8, ignore_eos=True)
        request = Request(request_id="kernels", prompt_token_ids=[5] * 16, sampling=sampling, arrival_time=0.0)
        engine.add(request, [])
        engine.step()
        engine.step()
        result["decode_kernels"] = kernel_rows(engine.step)
        for kind in ("encoder_kernels", "decode_kernels"):
            print(f"\n{kind}")
            print(
                table(("kernel", "calls", "us"), [[str(value) for value in entry.values()] for entry in result[kind]])
            )
    print()
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
