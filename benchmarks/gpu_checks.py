"""Checks of the CUDA memory code on a real GPU: each raises AssertionError, or gives the figures that it saw.

No model is needed. `benchmarks.gpu_smoke` runs them for a table, `tests/gpu` as tests. Each wants a context of its own
process to be made already (`open_device`), and leaves the GPU's memory as it found it.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from runtime.config import GIB, MIB
from runtime.executor.cuda_device import CudaDevice, open_cuda_device
from runtime.executor.cuda_graphs import CudaGraph, CudaGraphBackend, TorchCapture
from runtime.executor.graph_backend import CaptureError
from runtime.executor.vmm import CudaVirtualMemory, MappedSpan

CUDA = torch.device("cuda", 0)
WIDTH = 2048
TENANT_BYTES = GIB

# A process that takes memory of the GPU when it is told to, and gives it back.
TENANT = f"""
import sys, torch
torch.zeros(1, device="cuda")
print("here", flush=True)
sys.stdin.readline()
block = torch.empty({TENANT_BYTES}, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("took", flush=True)
sys.stdin.readline()
del block
torch.cuda.empty_cache()
print("gave", flush=True)
sys.stdin.readline()
"""


def open_device() -> CudaDevice:
    """The GPU, with this process's context made now if it was not."""
    return open_cuda_device(CUDA)


def check_context(device: CudaDevice) -> dict[str, Any]:
    """The context is of a plausible size, and readings at rest are stable."""
    used = [device.settled_bytes() for _ in range(3)]
    context = used[-1] - device.reserved_bytes()
    assert max(used) - min(used) <= 2 * MIB, used
    assert 50 * MIB < context < 2 * GIB, context
    return {
        "context_mib": round(context / MIB, 1),
        "baseline_mib": round(device.baseline_bytes / MIB, 1),
        "total_mib": round(device.total_bytes / MIB, 1),
        "others_are_told": device.tells_others,
    }


def check_peak(device: CudaDevice) -> dict[str, Any]:
    """A call that takes 512 MiB peaks by that."""

    def run() -> None:
        torch.empty(256 * MIB, dtype=torch.uint8, device=CUDA).add_(1)
        torch.empty(512 * MIB, dtype=torch.uint8, device=CUDA).add_(1)

    resident = device.settled_bytes()
    transient = device.peak_bytes(run) - resident
    assert 512 * MIB <= transient <= 800 * MIB, transient
    assert abs(device.settled_bytes() - resident) <= 2 * MIB
    return {"transient_mib": round(transient / MIB, 1)}


@torch.inference_mode()
def check_virtual_memory(device: CudaDevice, *, grow_bytes: int = 8 * GIB) -> dict[str, Any]:
    """A graph that is captured over a few backed blocks reads and writes memory that was mapped later."""
    before = device.settled_bytes()
    driver = CudaVirtualMemory(CUDA)
    span = MappedSpan(driver, 2 * grow_bytes)
    span.resize(64 * MIB)
    device.mapped_bytes = span.resident_bytes
    blocks = span.tensor().view(-1, MIB)
    slot = torch.zeros(1, dtype=torch.int64, device=CUDA)
    value = torch.full((1, MIB), 3, dtype=torch.uint8, device=CUDA)

    def forward() -> Tensor:
        blocks.index_copy_(0, slot, value)
        return blocks.index_select(0, slot) + 1

    backend = CudaGraphBackend(TorchCapture(CUDA, device.resting_bytes))
    graph = backend.capture(forward, [slot, value])
    started = time.perf_counter()
    span.resize(grow_bytes)
    torch.cuda.synchronize()
    grow_seconds = time.perf_counter() - started
    used = device.used_bytes() - before
    last = grow_bytes // MIB - 1
    slot.fill_(last)
    value.fill_(9)
    output = graph.replay()
    torch.cuda.synchronize()
    assert int(output.min()) == int(output.max()) == 10
    assert int(blocks[last].min()) == 9
    assert int(blocks[last - 1].max()) == 0, "new memory is not zeros"
    assert abs(used - grow_bytes) < 256 * MIB, used
    started = time.perf_counter()
    span.resize(64 * MIB)
    shrink_seconds = time.perf_counter() - started
    slot.fill_(2)
    graph.replay()
    assert int(blocks[2].min()) == 9
    graph.release()
    span.release()
    device.mapped_bytes = lambda: 0
    left = device.settled_bytes() - before
    assert left < 64 * MIB, left
    return {
        "granularity_mib": driver.granularity_bytes / MIB,
        "grow_ms": round(grow_seconds * 1000, 1),
        "shrink_ms": round(shrink_seconds * 1000, 1),
        "left_mib": round(left / MIB, 1),
    }


def make_forward(rows: int) -> tuple[Callable[[], Tensor], Tensor]:
    """A small network over a static input [rows, WIDTH]."""
    generator = torch.Generator(device=CUDA).manual_seed(0)
    weights = [
        torch.randn(WIDTH, WIDTH, device=CUDA, dtype=torch.bfloat16, generator=generator) / WIDTH**0.5 for _ in range(4)
    ]
    static = torch.randn(rows, WIDTH, device=CUDA, dtype=torch.bfloat16, generator=generator)

    def forward() -> Tensor:
        hidden = static
        for weight in weights:
            hidden = torch.nn.functional.silu(hidden @ weight)
        return hidden

    return forward, static


@torch.inference_mode()
def check_capture(device: CudaDevice) -> dict[str, Any]:
    """What buckets took is what the device lost; segments and driver account for it; replays equal eager; released
    graphs give everything back."""
    capture = TorchCapture(CUDA, device.resting_bytes)
    backend = CudaGraphBackend(capture)
    pairs = [make_forward(rows) for rows in (4096, 1024, 256)]
    for forward, static in pairs:
        capture.warm_up(forward, 1)
        del static
    before = device.settled_bytes()
    graphs: list[CudaGraph] = []
    started = time.perf_counter()
    for forward, static in pairs:
        graphs.append(backend.capture(forward, [static]))
    seconds = time.perf_counter() - started
    taken = device.settled_bytes() - before
    counted = sum(graph.graph_bytes for graph in graphs)
    segments = backend.segment_bytes
    assert segments == sum(graph.graph_bytes - graph.driver_bytes for graph in graphs)
    assert abs(taken - counted) <= 4 * MIB, (taken, counted)
    for (forward, static), graph in zip(pairs, graphs, strict=True):
        static.mul_(0.5)
        assert torch.equal(graph.replay(), forward())
    for graph in graphs:
        graph.release()
    after = device.settled_bytes()
    assert backend.segment_bytes == 0, backend.segment_bytes
    return {
        "taken_mib": round(taken / MIB, 2),
        "segments_mib": round(segments / MIB, 2),
        "driver_mib": round((counted - segments) / MIB, 2),
        "seconds": round(seconds, 3),
        "left_mib": round((after - before) / MIB, 2),
    }


@torch.inference_mode()
def check_failures(device: CudaDevice) -> dict[str, Any]:
    """A Python error, no memory, and an invalidated capture: no live block is left, and the next capture works."""
    forward, static = make_forward(512)
    figures: dict[str, Any] = {}

    def python_error() -> Tensor:
        hidden = forward()
        if torch.cuda.is_current_stream_capturing():
            raise TypeError("planted")
        return hidden

    def out_of_memory() -> Tensor:
        hidden = forward()
        if torch.cuda.is_current_stream_capturing():
            torch.empty(1 << 50, dtype=torch.uint8, device=CUDA)
        return hidden

    def invalidated() -> Tensor:
        hidden = forward()
        if torch.cuda.is_current_stream_capturing():
            hidden.sum().item()  # a wait is not allowed while a stream is captured
        return hidden

    for name, failing in (("python", python_error), ("oom", out_of_memory), ("invalidated", invalidated)):
        capture = TorchCapture(CUDA, device.resting_bytes)
        backend = CudaGraphBackend(capture)
        good = backend.capture(forward, [static])
        pool = backend._pool
        assert pool is not None
        live = capture.pool_segments(pool)[1]
        try:
            backend.capture(failing, [static])
        except CaptureError as error:
            message, retained = str(error), error.retained_bytes
        else:
            raise AssertionError(f"{name}: the capture did not fail")
        assert torch.cuda.current_stream(CUDA) == torch.cuda.default_stream(CUDA), name
        assert not torch.cuda.is_current_stream_capturing(), name
        assert capture.pool_segments(pool)[1] == live, f"{name}: live blocks are left"
        try:
            again = backend.capture(forward, [static])
        except CaptureError as error:
            raise AssertionError(f"{name}: the capture after it failed: {error}") from error
        assert torch.equal(again.replay(), forward()), name
        assert torch.equal(good.replay(), forward()), name
        good.release()
        again.release()
        device.settled_bytes()
        figures[name] = {
            "message": message[:80],
            "retained_mib": round(retained / MIB, 2),
            "pool_left_mib": round(backend.segment_bytes / MIB, 2),
        }
    return figures


def check_tenants(device: CudaDevice) -> dict[str, Any]:
    """Another process that grows and shrinks changes what others use, and not what we use."""
    before, others = device.settled_bytes(), device.others_bytes
    tenant = subprocess.Popen([sys.executable, "-c", TENANT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    figures = {}
    assert tenant.stdin is not None
    assert tenant.stdout is not None
    try:
        for word in ("here", "took", "gave"):
            assert tenant.stdout.readline().strip() == word
            ours, theirs = device.settled_bytes(), device.others_bytes - others
            figures[word] = {"ours_mib": round((ours - before) / MIB, 1), "others_mib": round(theirs / MIB, 1)}
            assert abs(ours - before) <= 1100 * MIB, figures
            tenant.stdin.write("\n")
            tenant.stdin.flush()
    finally:
        tenant.stdin.close()
        tenant.wait(30)
    if device.tells_others:
        assert abs(figures["took"]["ours_mib"]) <= 64, figures
        assert figures["took"]["others_mib"] - figures["here"]["others_mib"] >= 1000, figures
        assert figures["gave"]["others_mib"] - figures["here"]["others_mib"] <= 64, figures
    return figures


@torch.inference_mode()
def check_limit(device: CudaDevice) -> dict[str, Any]:
    """With a limit torch's allocator gives back what it keeps instead of taking more."""
    device.settled_bytes()
    limit = device.reserved_bytes() + 600 * MIB
    device.limit_reserved(limit, arena_bytes=0)
    try:
        for size in (500, 300, 580, 41, 590):
            torch.empty(size * MIB, dtype=torch.uint8, device=CUDA).zero_()
            assert device.reserved_bytes() <= limit + MIB, (size, device.reserved_bytes(), limit)
        try:
            torch.empty(700 * MIB, dtype=torch.uint8, device=CUDA)
        except torch.OutOfMemoryError:
            pass
        else:
            raise AssertionError("an allocation beyond the limit was given")
    finally:
        device.lift_limit()
        device.settled_bytes()
    return {"limit_mib": round(limit / MIB, 1)}


CHECKS: dict[str, Callable[[CudaDevice], dict[str, Any]]] = {
    "context": check_context,
    "peak": check_peak,
    "capture": check_capture,
    "virtual_memory": check_virtual_memory,
    "failures": check_failures,
    "limit": check_limit,
    "tenants": check_tenants,
}
