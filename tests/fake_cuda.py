"""A GPU that does not exist: its memory is a sum of numbers, its kernels run on the CPU, and it fails on demand.

Implements what the runtime asks of CUDA: readings, capture, virtual memory. Like the real one it grows a pool's
segments at capture and keeps them after a failure, takes memory in the driver at instantiation, and shares its memory
with other tenants.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from runtime.config import GIB, MIB, EngineConfig
from runtime.cuda_hardware import CudaHardware
from runtime.executor.cuda_device import Baseline, CudaDevice
from runtime.executor.cuda_graphs import PoolId
from runtime.executor.kv_cache import AnonymousMapping
from runtime.executor.vmm import VirtualMemoryError

Failure = Literal["python", "oom", "invalidated", "replay"]
GRANULARITY = 2 * MIB


class FakeGraph:
    """A captured call, replayed by calling it again."""

    def __init__(self, gpu: "FakeGpu", pool: PoolId, forward: Callable[[], Tensor], output: Tensor) -> None:
        self.gpu, self.pool, self.forward, self.output = gpu, pool, forward, output
        self.is_alive = True
        self.fails = False

    def replay(self) -> None:
        assert self.is_alive, "replay of a destroyed graph"
        if self.fails:
            raise RuntimeError("injected: the replay fails")
        self.output.copy_(self.forward())

    def reset(self) -> None:
        if self.is_alive:
            self.is_alive = False
            if self.gpu.driver_keeps:
                self.gpu.driver_kept_bytes += self.gpu.driver_bytes_per_graph
            else:
                self.gpu.driver_bytes -= self.gpu.driver_bytes_per_graph
            self.gpu.graphs[self.pool].remove(self)


@dataclass(eq=False)
class FakeGpu:
    """`fail`: what goes wrong at the n-th capture (0 is the bootstrap's). `transient_bytes`: what any call of the
    profile takes at its peak; `small_transient_bytes`: of segments for small blocks. `driver_keeps`: what the driver
    took for a graph that is destroyed it keeps, for the next one."""

    total_bytes: int = 8 * GIB
    others_bytes: int = 0
    tells_others: bool = True
    context_bytes: int = 100 * MIB
    resident_bytes: int = 64 * MIB
    transient_bytes: int = 100 * MIB
    small_transient_bytes: int = 4 * MIB
    segment_bytes: int = 12 * MIB
    driver_bytes_per_graph: int = 3 * MIB
    driver_keeps: bool = False
    fail: dict[int, Failure] = field(default_factory=dict)
    fail_setup: bool = False
    limit_bytes: int | None = None

    def __post_init__(self) -> None:
        self.cached_bytes = 0
        self.peak_bytes = 0
        self.arena_bytes = 0
        self.driver_bytes = 0
        self.driver_kept_bytes = 0
        self.is_loaded = False
        self.mapped: dict[int, int] = {}
        self.pools: dict[PoolId, int] = {}
        self.graphs: dict[PoolId, list[FakeGraph]] = {}
        self.retained: set[PoolId] = set()
        self.num_captures = 0
        self.on_settle: Callable[[], None] | None = None
        self._spans: dict[int, AnonymousMapping] = {}

    # --- Readings.

    def used_bytes(self) -> int:
        return self.context_bytes + self.driver_bytes + sum(self.mapped.values()) + self.reserved_bytes()

    def free_and_total(self) -> tuple[int, int]:
        return self.total_bytes - self.others_bytes - self.used_bytes(), self.total_bytes

    def told_others_bytes(self) -> int | None:
        return self.others_bytes if self.tells_others else None

    def reserved_bytes(self) -> int:
        return self.resident_bytes + self.cached_bytes + sum(self.pools.values())

    def peak_reserved_bytes(self) -> int:
        return self.peak_bytes

    def small_bytes(self) -> int:
        return 0

    def peak_small_bytes(self) -> int:
        return self.small_transient_bytes

    def reset_peak(self) -> None:
        # The call that follows takes its transient, and the cache keeps it.
        self.peak_bytes = self.reserved_bytes() + self.transient_bytes
        self.cached_bytes += self.transient_bytes

    def settle(self) -> None:
        self.cached_bytes = 0
        for pool, graphs in self.graphs.items():
            if not graphs and pool not in self.retained:
                self.pools[pool] = 0
        if self.on_settle is not None:
            self.on_settle()

    def limit_reserved(self, num_bytes: int, *, arena_bytes: int) -> None:
        self.limit_bytes, self.arena_bytes = num_bytes, arena_bytes
        self.cached_bytes = arena_bytes

    # --- Capture.

    def new_pool(self) -> PoolId:
        pool = (0, len(self.pools) + 1)
        self.pools[pool], self.graphs[pool] = 0, []
        return pool

    def bootstrap(self) -> None:
        if self.fail_setup:
            raise RuntimeError("injected: no capture on this device")
        self.driver_bytes += 0 if self.is_loaded else MIB
        self.is_loaded = True

    def warm_up(self, forward: Callable[[], Tensor], count: int) -> None:
        for _ in range(count):
            forward()

    def capture(self, forward: Callable[[], Tensor], pool: PoolId) -> tuple[FakeGraph, Tensor]:
        assert self.is_reusable(pool), "a capture into a pool that torch still records into"
        self.num_captures += 1
        failure = self.fail.get(self.num_captures)
        self.pools[pool] += self.segment_bytes
        if failure == "python":
            raise TypeError("injected: a Python error")
        if failure == "oom":
            raise torch.OutOfMemoryError("injected: out of memory")
        if failure == "invalidated":
            self.retained.add(pool)
            raise RuntimeError("injected: capture was invalidated")
        output = forward().detach().clone()
        from_kept = min(self.driver_kept_bytes, self.driver_bytes_per_graph)
        self.driver_kept_bytes -= from_kept
        self.driver_bytes += self.driver_bytes_per_graph - from_kept
        graph = FakeGraph(self, pool, forward, output)
        graph.fails = failure == "replay"
        self.graphs[pool].append(graph)
        return graph, output

    def is_reusable(self, pool: PoolId) -> bool:
        return pool not in self.retained

    def pool_segments(self, pool: PoolId) -> tuple[int, int]:
        return self.pools[pool], len(self.graphs[pool]) * MIB

    def resting_bytes(self) -> int:
        self.settle()
        return self.used_bytes()

    # --- Virtual memory.

    granularity_bytes = GRANULARITY

    def reserve(self, num_bytes: int) -> int:
        assert num_bytes % GRANULARITY == 0
        address = (len(self._spans) + 1) << 44
        self._spans[address] = AnonymousMapping(num_bytes)
        return address

    def map(self, address: int, num_bytes: int) -> object:
        assert address % GRANULARITY == num_bytes % GRANULARITY == 0
        if num_bytes > self.free_and_total()[0]:
            raise VirtualMemoryError("cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY")
        assert address not in self.mapped
        self.mapped[address] = num_bytes
        return (address, num_bytes)

    def unmap(self, address: int, num_bytes: int, handle: object) -> None:
        assert handle == (address, num_bytes), "a mapping goes as a whole"
        assert self.mapped.pop(address) == num_bytes

    def free(self, address: int, num_bytes: int) -> None:
        assert not self.mapped
        del self._spans[address]

    def tensor(self, address: int, num_bytes: int) -> Tensor:
        assert address in self.mapped, "the first address has no memory"
        return self._spans[address].tensor()[:num_bytes]

    def synchronize(self) -> None:
        pass


class FakeMemory:
    """The `CudaMemory` of a `FakeGpu`, whose own `others_bytes` is a number."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.free_and_total = gpu.free_and_total
        self.others_bytes = gpu.told_others_bytes
        self.reserved_bytes = gpu.reserved_bytes
        self.peak_reserved_bytes = gpu.peak_reserved_bytes
        self.reset_peak = gpu.reset_peak
        self.settle = gpu.settle
        self.small_bytes = gpu.small_bytes
        self.peak_small_bytes = gpu.peak_small_bytes
        self.limit_reserved = gpu.limit_reserved


def fake_device(gpu: FakeGpu) -> CudaDevice:
    """A device whose context was made just now."""
    free, _ = gpu.free_and_total()
    baseline = Baseline(free_bytes=free + gpu.used_bytes(), others_bytes=gpu.told_others_bytes())
    return CudaDevice(FakeMemory(gpu), baseline)


def fake_hardware(gpu: FakeGpu) -> Callable[[EngineConfig], CudaHardware]:
    """What `build_engine` opens to start on `gpu`; tensors are the CPU's."""

    def open_hardware(config: EngineConfig) -> CudaHardware:
        return CudaHardware(
            config,
            fake_device(gpu),
            torch.device("cpu"),
            dtype=torch.float32,
            virtual_memory=lambda: gpu,
            capture=gpu if config.graph_backend == "auto" else None,
        )

    return open_hardware
