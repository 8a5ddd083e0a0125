"""Decode matrices at one row: cuBLAS against each tile of our Triton kernels, as a table and one line of JSON.

    python -m benchmarks.gpu_kernels [--layers 36]

Every number is microseconds of one product within a CUDA graph of as many products as the model has layers, each with
weights of its own, so that nothing is in the level-2 cache by the time it is needed again. Triton's side has norm,
bias, rotation, activation and residual in it, cuBLAS' is the bare product. `error` is the largest difference from
float32, relative to the largest value. Then a chain: the four products of every layer, one after the other, with the
best tiles, started as dependents of each other and not. The last lines are the tiles to write down.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.model.layers import apply_rotary, rotary_tables

DEVICE = "cuda"
EPS = 1e-6
NUM_REPLAYS = 7
NUM_COMPILERS = 12

# The published 3B model's decoder.
HIDDEN, MLP, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 2048, 11008, 16, 2, 128, 151936

# Outputs (or pairs), inputs a turn, warps.
TILES = {
    "qkv": [(2, 2048, 2), (2, 2048, 4), (4, 2048, 4), (4, 2048, 8), (4, 1024, 4), (8, 512, 4)],
    "out": [(2, 2048, 2), (2, 2048, 4), (4, 2048, 4), (8, 2048, 4), (8, 2048, 8), (4, 1024, 2)],
    "gate_up": [(2, 2048, 4), (4, 2048, 4), (4, 2048, 8), (8, 2048, 8), (8, 512, 4), (8, 1024, 8), (16, 512, 8)],
    "down": [(2, 2048, 4), (4, 1024, 4), (4, 2048, 4), (4, 2048, 8), (2, 4096, 8), (4, 512, 4), (8, 512, 4),
             (8, 1024, 8), (2, 1024, 2), (4, 256, 1)],
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A matrix of the model: its inputs, and its outputs."""

    inputs: int
    outputs: int


SHAPES = {
    "qkv": Shape(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM),
    "out": Shape(HEADS * HEAD_DIM, HIDDEN),
    "gate_up": Shape(HIDDEN, 2 * MLP),
    "down": Shape(MLP, HIDDEN),
}


class Case:
    """One matrix, with a row and everything else that its kernel takes."""

    def __init__(self, name: str) -> None:
        shape = SHAPES[name]
        generator = torch.Generator(DEVICE).manual_seed(1)

        def noise(*size: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(size, device=DEVICE, generator=generator) * scale).bfloat16()

        self.name = name
        self.x = noise(1, shape.inputs)
        self.bias, self.norm = noise(shape.outputs), noise(shape.inputs)
        self.residual = noise(1, shape.outputs)
        angles = torch.randn(1, 1, HEAD_DIM // 2, device=DEVICE, generator=generator) * 9
        self.cos, self.sin = rotary_tables(angles)

    def run(self, weight: Tensor, tile: Any, *, waits: bool = True, x: Tensor | None = None) -> Tensor:
        from runtime.model import triton_linear as kernels

        x = self.x if x is None else x
        if self.name == "qkv":
            return kernels.rotary_product(
                x, weight, self.bias, self.norm, self.cos, self.sin,
                eps=EPS, num_query=HEADS, num_rotated=HEADS + KV_HEADS, tile=tile, waits=waits,
            )  # fmt: skip
        if self.name == "gate_up":
            return kernels.swiglu_product(x, weight, self.norm, eps=EPS, tile=tile, waits=waits)
        return kernels.residual_product(x, weight, self.residual, tile=tile, waits=waits)

    def reference(self, weight: Tensor) -> Tensor:
        """The same in float32."""
        x, wide = self.x.float(), weight.float()
        if self.name in ("qkv", "gate_up"):
            x = F.rms_norm(x, (x.shape[-1],), self.norm.float(), EPS)
        product = F.linear(x, wide)
        if self.name == "qkv":
            heads = (product + self.bias.float()).view(1, -1, HEAD_DIM)
            rotated = HEADS + KV_HEADS
            return torch.cat((apply_rotary(heads[:, :rotated], self.cos, self.sin), heads[:, rotated:]), dim=1)
        if self.name == "gate_up":
            gate, up = product.chunk(2, dim=-1)
            return F.silu(gate) * up
        return product + self.residual.float()


def tiles(name: str) -> list[Any]:
    """What is tried for a matrix."""
    from runtime.model.triton_linear import Tile

    return [Tile(block_outputs=outputs, block_inputs=inputs, num_warps=warps) for outputs, inputs, warps in TILES[name]]


def compile_one(job: tuple[str, Any]) -> None:
    """Compiles one kernel into Triton's cache; an error shows again where it is measured."""
    name, tile = job
    shape = SHAPES[name]
    try:
        Case(name).run(torch.zeros(shape.outputs, shape.inputs, device=DEVICE, dtype=torch.bfloat16), tile)
        torch.cuda.synchronize()
    except Exception as error:
        print(f"{name} {tile}: {type(error).__name__}: {error}"[:300], file=sys.stderr)


def graph_ms(run: Callable[[], object]) -> float:
    """Milliseconds of one replay of `run`, the median of several."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(NUM_REPLAYS + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:])


def measure(name: str, weights: Sequence[Tensor]) -> dict[str, Any]:
    """One matrix: cuBLAS, and every tile."""
    case = Case(name)
    count = len(weights)
    torch_us = graph_ms(lambda: [F.linear(case.x, weight) for weight in weights]) * 1000 / count
    reference = case.reference(weights[0])
    scale = reference.abs().max()
    found = []
    for tile in tiles(name):
        try:
            error = float((case.run(weights[0], tile).float() - reference).abs().max() / scale)
            us = graph_ms(lambda tile=tile: [case.run(weight, tile) for weight in weights]) * 1000 / count
        except Exception as problem:
            found.append({**asdict(tile), "us": None, "error": f"{type(problem).__name__}: {problem}"[:120]})
            continue
        found.append({**asdict(tile), "us": round(us, 2), "error": round(error, 5)})
    found.sort(key=lambda entry: entry["us"] or 1e9)
    gigabytes = weights[0].nbytes / 1e9
    return {
        "matrix": name,
        "torch_us": round(torch_us, 2),
        "torch_tb_per_s": round(gigabytes / torch_us * 1e3, 2),
        "best_us": found[0]["us"],
        "best_tb_per_s": round(gigabytes / (found[0]["us"] or 1e9) * 1e3, 2),
        "tiles": found,
    }


def chain(best: dict[str, Any], layers: int) -> dict[str, Any]:
    """The four products of every layer one after the other: milliseconds for all layers."""
    cases = {name: Case(name) for name in SHAPES}
    stacks = {name: weights_of(name, layers) for name in SHAPES}
    attended = cases["out"].x

    def ours(waits: bool) -> None:
        for index in range(layers):
            hidden = attended
            for name in ("out", "gate_up", "down", "qkv"):
                hidden = cases[name].run(stacks[name][index], best[name], waits=waits, x=hidden)

    def bare() -> None:
        for index in range(layers):
            x = attended
            for name in ("out", "gate_up", "down", "qkv"):
                product = F.linear(x, stacks[name][index])
                x = product[:, :MLP].contiguous() if name == "gate_up" else product

    return {
        "torch_ms": round(graph_ms(bare), 4),
        "dependent_ms": round(graph_ms(lambda: ours(True)), 4),
        "independent_ms": round(graph_ms(lambda: ours(False)), 4),
    }


def weights_of(name: str, layers: int) -> list[Tensor]:
    shape = SHAPES[name]
    generator = torch.Generator(DEVICE).manual_seed(2)
    return [
        (torch.randn(shape.outputs, shape.inputs, device=DEVICE, generator=generator) * shape.inputs**-0.5).bfloat16()
        for _ in range(layers)
    ]


def head() -> dict[str, Any]:
    """The head through cuBLAS: it has no neighbours to be fused with."""
    weights = [torch.randn(VOCABULARY, HIDDEN, device=DEVICE, dtype=torch.bfloat16) for _ in range(3)]
    x = torch.randn(1, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
    us = graph_ms(lambda: [F.linear(x, weight) for weight in weights]) * 1000 / len(weights)
    return {"torch_us": round(us, 1), "tb_per_s": round(weights[0].nbytes / us / 1e6, 2)}


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles, measures, prints; the exit code is 1 where a kernel is wrong."""
    from runtime.model.triton_linear import Tile

    parser = argparse.ArgumentParser(prog="gpu_kernels", description=__doc__)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--top", type=int, default=4, help="tiles shown for each matrix")
    arguments = parser.parse_args(argv)
    started = time.perf_counter()
    jobs = [(name, tile) for name in SHAPES for tile in tiles(name)]
    with multiprocessing.get_context("spawn").Pool(NUM_COMPILERS) as pool:
        pool.map(compile_one, jobs, chunksize=1)
    print(f"compiled {len(jobs)} kernels in {time.perf_counter() - started:.1f} s")

    results: list[dict[str, Any]] = []
    best: dict[str, Any] = {}
    for name in SHAPES:
        result = measure(name, weights_of(name, arguments.layers))
        results.append(result)
        best[name] = Tile(**{field.name: result["tiles"][0][field.name] for field in fields(Tile)})
        print(
            f"\n{name}: torch {result['torch_us']} us ({result['torch_tb_per_s']} TB/s), "
            f"best {result['best_us']} us ({result['best_tb_per_s']} TB/s)"
        )
        for entry in result["tiles"][: arguments.top]:
            print("   ", *(f"{key}={value}" for key, value in entry.items()))
        for entry in result["tiles"]:
            if entry["us"] is None:
                print("    FAILED", *(f"{key}={value}" for key, value in entry.items()))
    layers_chain, layers_head = chain(best, arguments.layers), head()
    print("chain", layers_chain)
    print("head", layers_head)
    print("\nbest tiles")
    for name, tile in best.items():
        print(f"    {name}: {tile}")
    wrong = [
        (result["matrix"], entry)
        for result in results
        for entry in result["tiles"]
        if isinstance(entry["error"], float) and entry["error"] > 0.02
    ]
    for entry in wrong:
        print("WRONG", *entry)
    print(f"{time.perf_counter() - started:.1f} s")
    summary = [{**result, "tiles": result["tiles"][: arguments.top]} for result in results]
    print(
        json.dumps(
            {
                "device": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "matrices": summary,
                "chain": layers_chain,
                "head": layers_head,
                "seconds": round(time.perf_counter() - started, 1),
            }
        )
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
