"""Memory of one CUDA device as this process sees it: what we use, what others use, how high a call peaks.

Knows readings and their pitfalls; plans nothing. What the device has free is the only truth about the whole; what of
the rest is ours follows from the reading before our context existed, and from what other processes took since.

    total = free + others + ours            ours = context, modules, torch's segments, mapped KV, graphs in the driver
    ours  = (free before us - free now) - (others now - others before us)

Where the driver does not tell of other processes, a change that cannot be ours counts as theirs, with a warning.
"""

import gc
import importlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from runtime.config import GIB, MIB, ConfigError, EngineConfig
from runtime.executor.arena import keep_arena
from runtime.executor.device import agreeing_peak
from runtime.executor.nvml import Nvml, NvmlError, own_process

log = logging.getLogger(__name__)

# Two readings of memory at rest agree within this: the driver takes and returns memory in steps of it.
SETTLED_TOLERANCE_BYTES = 2 * MIB
MAX_SETTLED_READINGS = 5

# Without a reading from before our context, no more than this of what is in use is taken for the context.
MAX_CONTEXT_BYTES = 2 * GIB

# Our driver-side memory (modules, graphs) does not grow by more than this between two readings.
MAX_DRIVER_STEP_BYTES = GIB

# A tenant's change below this is not worth a warning.
TENANT_STEP_BYTES = 64 * MIB


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The device before our context: bytes free, and used by others (`None`: the driver does not tell)."""

    free_bytes: int
    others_bytes: int | None = None


class CudaMemory(Protocol):
    """Raw readings of one device, in bytes."""

    def free_and_total(self) -> tuple[int, int]: ...

    def others_bytes(self) -> int | None:
        """What other processes use now, or `None` where it is not told."""
        ...

    def reserved_bytes(self) -> int:
        """Segments that torch's allocator holds."""
        ...

    def peak_reserved_bytes(self) -> int:
        """Most of them since `reset_peak`."""
        ...

    def small_bytes(self) -> int:
        """Segments that torch's allocator cuts blocks below a MiB of."""
        ...

    def peak_small_bytes(self) -> int:
        """Most of them since `reset_peak`."""
        ...

    def reset_peak(self) -> None: ...

    def settle(self) -> None:
        """Waits for the device, and hands back what torch's allocator merely keeps."""
        ...

    def limit_reserved(self, num_bytes: int, *, arena_bytes: int) -> None:
        """Makes torch's allocator give back what it keeps rather than hold more than that, and keep `arena_bytes` of
        it in one piece."""
        ...


class CudaDevice:
    """The `Device` of a GPU. Never aborts for what other tenants do; raises when the request cannot be had at all."""

    name: Literal["cuda"] = "cuda"
    request_knob = "gpu_memory_utilization"

    def __init__(self, memory: CudaMemory, baseline: Baseline, *, mapped_bytes: Callable[[], int] = lambda: 0) -> None:
        """`mapped_bytes`: memory that we mapped ourselves, beside torch's allocator."""
        self._memory = memory
        self._baseline = baseline
        self.mapped_bytes = mapped_bytes
        free, self.total_bytes = memory.free_and_total()
        # What others took since the baseline, where only changes that cannot be ours tell of it.
        self._others_shift = 0
        self._others_seen = 0
        used = baseline.free_bytes - free - (self._others_change() or 0)
        self._driver_bytes = self._context_bytes = max(0, used - self._known_bytes())
        self._others_seen = self._others_change() or 0

    @property
    def baseline_bytes(self) -> int:
        """What was in use before us: other tenants, and what the driver keeps for itself."""
        return self.total_bytes - self._baseline.free_bytes

    @property
    def tells_others(self) -> bool:
        """Whether the driver tells us apart from other processes; otherwise only jumps do."""
        return self._others_change() is not None

    @property
    def others_bytes(self) -> int:
        """What others use now, as far as it can be told."""
        return self.baseline_bytes + self._tenants_change()

    def requested_bytes(self, config: EngineConfig) -> int:
        """`ceil(total * gpu_memory_utilization)`.

        Raises:
            ConfigError: other tenants left less than that before we came.
        """
        requested = math.ceil(self.total_bytes * config.gpu_memory_utilization)
        if config.kv_cache_memory_bytes is None and requested > self._baseline.free_bytes:
            fits = math.floor(100 * self._baseline.free_bytes / self.total_bytes) / 100
            raise ConfigError(
                f"gpu_memory_utilization is {config.gpu_memory_utilization}, which asks for {_mib(requested)} of "
                f"{_mib(self.total_bytes)}, but {_mib(self.baseline_bytes)} were in use before: lower it to {fits:.2f}"
            )
        return requested

    def reachable_bytes(self, requested_bytes: int) -> int:
        """The request, or what is left of it after other tenants grew: then with a warning."""
        used, free = self.used_bytes(), self._memory.free_and_total()[0]
        if used + free >= requested_bytes:
            return requested_bytes
        log.warning(
            "other processes took memory of the device since the start; the plan makes do with the rest",
            extra={"requested_bytes": requested_bytes, "reachable_bytes": used + free, "others": self.others_bytes},
        )
        return used + free

    def used_bytes(self) -> int:
        """What this process uses now, what torch's allocator keeps included. Waits for nothing."""
        free, _ = self._memory.free_and_total()
        return max(0, self._baseline.free_bytes - free - self._tenants_change(free))

    def settled_bytes(self) -> int:
        """What this process uses when nothing runs, nothing is merely kept, and unreachable objects are gone."""
        gc.collect()
        return self.resting_bytes()

    def resting_bytes(self) -> int:
        """The same without looking for unreachable objects, which takes longer than a capture: two readings that
        agree."""
        self._memory.settle()
        readings = [self.used_bytes()]
        while len(readings) < MAX_SETTLED_READINGS:
            self._memory.settle()
            readings.append(self.used_bytes())
            if abs(readings[-1] - readings[-2]) <= SETTLED_TOLERANCE_BYTES:
                return readings[-1]
        log.warning("readings of the memory at rest do not agree", extra={"readings": readings})
        return max(readings)

    def reserved_bytes(self) -> int:
        """Segments of torch's allocator."""
        return self._memory.reserved_bytes()

    def peak_bytes(self, run: Callable[[], None]) -> int:
        """The most that this process used during `run`: what it uses afterwards, and by how much torch's segments were
        more at their peak."""

        def read() -> int:
            self._memory.settle()
            self._memory.reset_peak()
            run()
            self._memory.settle()
            return self.used_bytes() + self._memory.peak_reserved_bytes() - self._memory.reserved_bytes()

        return agreeing_peak(read)

    def small_peak_bytes(self, run: Callable[[], None]) -> int:
        """By how much the segments for small blocks are more at their peak during `run`, which starts without a
        cache."""
        self._memory.settle()
        self._memory.reset_peak()
        before = self._memory.small_bytes()
        run()
        return self._memory.peak_small_bytes() - before

    def limit_reserved(self, num_bytes: int, *, arena_bytes: int) -> None:
        """From now on torch's allocator holds at most that: it gives back what it keeps before it takes more.
        `arena_bytes`: of these it keeps so many in one piece, for forwards (`executor.arena`).

        Raises:
            torch.OutOfMemoryError: that piece cannot be had.
        """
        self._memory.limit_reserved(num_bytes, arena_bytes=arena_bytes)

    def lift_limit(self) -> None:
        """Torch's allocator may hold what there is."""
        self._memory.limit_reserved(self.total_bytes, arena_bytes=0)

    def _known_bytes(self) -> int:
        return self._memory.reserved_bytes() + self.mapped_bytes()

    def _others_change(self) -> int | None:
        now, before = self._memory.others_bytes(), self._baseline.others_bytes
        return None if now is None or before is None else now - before

    def _tenants_change(self, free: int | None = None) -> int:
        """By how much other tenants' memory changed since the baseline; warns when it did."""
        change = self._others_change()
        if change is None:
            free = self._memory.free_and_total()[0] if free is None else free
            ours = self._baseline.free_bytes - free - self._others_shift
            driver = ours - self._known_bytes()
            if driver < self._context_bytes - TENANT_STEP_BYTES:
                # We cannot use less than our context and what we know of: somebody else gave memory back.
                self._others_shift -= self._driver_bytes - driver
            elif driver > self._driver_bytes + MAX_DRIVER_STEP_BYTES:
                self._others_shift += driver - self._driver_bytes
            else:
                self._driver_bytes = driver
            change = self._others_shift
        if abs(change - self._others_seen) >= TENANT_STEP_BYTES:
            log.warning(
                "another process %s memory of the device",
                "took" if change > self._others_seen else "gave back",
                extra={"bytes": abs(change - self._others_seen), "others_bytes": self.baseline_bytes + change},
            )
            self._others_seen = change
        return change


class TorchCudaMemory:
    """Readings through torch, and NVML where it is there."""

    def __init__(self, device: torch.device, nvml: Nvml | None, own_pid: int | None) -> None:
        self._device = device
        self._nvml = nvml
        self._own_pid = own_pid

    def free_and_total(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(self._device)
        return int(free), int(total)

    def others_bytes(self) -> int | None:
        if self._nvml is None or self._own_pid is None:
            return None
        used = self._nvml.used_by_process()
        if used is None or self._own_pid not in used:
            return None
        return sum(num_bytes for pid, num_bytes in used.items() if pid != self._own_pid)

    def reserved_bytes(self) -> int:
        return int(torch.cuda.memory_reserved(self._device))

    def peak_reserved_bytes(self) -> int:
        return int(torch.cuda.memory_stats(self._device)["reserved_bytes.all.peak"])

    def small_bytes(self) -> int:
        return int(torch.cuda.memory_stats(self._device)["reserved_bytes.small_pool.current"])

    def peak_small_bytes(self) -> int:
        return int(torch.cuda.memory_stats(self._device)["reserved_bytes.small_pool.peak"])

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def limit_reserved(self, num_bytes: int, *, arena_bytes: int) -> None:
        _, total = self.free_and_total()
        # Half a MiB more, so that the product with the total does not round below a segment's size.
        torch.cuda.set_per_process_memory_fraction(min(1.0, (num_bytes + MIB // 2) / total), self._device)
        keep_arena(arena_bytes, self._device)


def open_cuda_device(device: torch.device) -> CudaDevice:
    """Reads the baseline, then makes this process's context on `device`.

    Raises:
        ConfigError: torch sees no such GPU.
    """
    if not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but torch sees no GPU: install torch with CUDA and a driver, or use 'cpu'")
    nvml = _nvml(device.index or 0)
    free_before = nvml.free_bytes() if nvml else None
    processes_before = nvml.used_by_process() if nvml else None
    torch.cuda.set_device(device)
    # An engine that this process had before left its own limit.
    torch.cuda.set_per_process_memory_fraction(1.0, device)
    keep_arena(0, device)
    torch.zeros(1, device=device)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    processes = nvml.used_by_process() if nvml else None
    memory = TorchCudaMemory(device, nvml, own_process(processes_before, processes))
    free, total = memory.free_and_total()
    context_bytes = None if free_before is None else free_before - free
    if context_bytes is None or not 0 < context_bytes <= MAX_CONTEXT_BYTES:
        context_bytes = min(total - free, MAX_CONTEXT_BYTES)
        log.warning(
            "the memory in use before this process is unknown; all in use, up to a limit, counts as ours",
            extra={"free_before_bytes": free_before, "free_bytes": free, "context_bytes": context_bytes},
        )
    others = memory.others_bytes()
    return CudaDevice(memory, Baseline(free_bytes=free + context_bytes, others_bytes=others))


def _nvml(index: int) -> Nvml | None:
    try:
        return Nvml(_pci_bus_id(index))
    except (NvmlError, ImportError, RuntimeError) as error:
        log.info("no NVML: other tenants are told from us by differences", extra={"error": str(error)})
        return None


def _pci_bus_id(index: int) -> str:
    """Of the device that CUDA counts as `index`, CUDA_VISIBLE_DEVICES applied; makes no context."""
    driver: Any = importlib.import_module("cuda.bindings.driver")
    (code,) = driver.cuInit(0)
    if code != driver.CUresult.CUDA_SUCCESS:
        raise NvmlError(f"cuInit answered {code}")
    code, device = driver.cuDeviceGet(index)
    if code != driver.CUresult.CUDA_SUCCESS:
        raise NvmlError(f"cuDeviceGet answered {code}")
    code, name = driver.cuDeviceGetPCIBusId(32, device)
    if code != driver.CUresult.CUDA_SUCCESS:
        raise NvmlError(f"cuDeviceGetPCIBusId answered {code}")
    text: str = bytes(name).split(b"\0")[0].decode().strip()
    return text


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.1f} MiB"
