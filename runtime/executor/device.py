"""What a device says of its memory: how much there is, how much we use, how high a call peaks. Plans nothing.

`CpuDevice` reads the kernel's account of this process. A CUDA device stands beside it in the same shape.
"""

import ctypes
import gc
import logging
import mmap
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol

from runtime.config import GIB, MIB, ConfigError, EngineConfig

log = logging.getLogger(__name__)

# A CPU's default request: the smaller of this and a quarter of what the container or machine allows.
MAX_DEFAULT_REQUEST_BYTES = 4 * GIB

# Two peaks agree within this, or this part of them: the allocator takes and returns memory in steps.
PEAK_TOLERANCE_BYTES = 4 * MIB
PEAK_TOLERANCE = 1 / 32
MAX_PEAK_READINGS = 4

# A cgroup v1 without a limit says a number near 2 ** 63.
_NO_LIMIT_BYTES = 1 << 60


class Device(Protocol):
    """Memory readings of the device that the engine runs on, in bytes."""

    @property
    def name(self) -> Literal["cpu", "cuda"]: ...

    @property
    def request_knob(self) -> str:
        """The setting that sizes the request."""
        ...

    @property
    def total_bytes(self) -> int:
        """What there is for us and everybody else."""
        ...

    def requested_bytes(self, config: EngineConfig) -> int:
        """What the configuration asks for.

        Raises:
            ConfigError: it asks for more than there is.
        """
        ...

    def reachable_bytes(self, requested_bytes: int) -> int:
        """What of the request can still be had: less where other tenants grew since the start, which is warned of."""
        ...

    def used_bytes(self) -> int:
        """What this process uses now."""
        ...

    def settled_bytes(self) -> int:
        """What this process uses when it rests: without memory that an allocator merely keeps."""
        ...

    def peak_bytes(self, run: Callable[[], None]) -> int:
        """The most that this process used during `run`, once two readings agree."""
        ...


class CpuDevice:
    """The machine's memory as this process's resident set. Anonymous mappings count as they are touched.

    Elsewhere than on Linux the only reading is the highest resident set so far: plans are then right but generous.
    """

    name: Literal["cpu"] = "cpu"
    request_knob = "memory_bytes"

    def __init__(self, *, root: Path = Path("/")) -> None:
        self._root = root
        self.total_bytes = allowed_bytes(root)
        self._can_reset_peak = True

    def requested_bytes(self, config: EngineConfig) -> int:
        if config.memory_bytes is None:
            return min(MAX_DEFAULT_REQUEST_BYTES, self.total_bytes // 4)
        if config.memory_bytes > self.total_bytes:
            raise ConfigError(
                f"memory_bytes is {config.memory_bytes}; the container or machine allows {self.total_bytes}"
            )
        return config.memory_bytes

    def used_bytes(self) -> int:
        try:
            fields = (self._root / "proc/self/statm").read_text().split()
        except OSError:
            return _highest_resident_bytes()
        return int(fields[1]) * mmap.PAGESIZE

    def reachable_bytes(self, requested_bytes: int) -> int:
        """The request: a CPU's memory is not shared out."""
        return requested_bytes

    def settled_bytes(self) -> int:
        """What is resident once unreachable objects are gone: the allocator gives back what is free."""
        gc.collect()
        return self.used_bytes()

    def peak_bytes(self, run: Callable[[], None]) -> int:
        """The larger of two agreeing readings; a first one may be higher than all others, as it makes caches."""

        def read() -> int:
            self._reset_peak()
            run()
            return self._peak_since_reset()

        return agreeing_peak(read)

    def _reset_peak(self) -> None:
        """Sets the kernel's high-water mark to the present resident set (proc(5), clear_refs, 5). Without permission
        the mark since the process began stands in for it: never too low."""
        if not self._can_reset_peak:
            return
        try:
            (self._root / "proc/self/clear_refs").write_text("5")
        except OSError as error:
            self._can_reset_peak = False
            log.info("the peak of memory cannot be reset; plans are generous", extra={"error": str(error)})

    def _peak_since_reset(self) -> int:
        try:
            for line in (self._root / "proc/self/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        except OSError:
            pass
        return _highest_resident_bytes()


def agreeing_peak(read: Callable[[], int]) -> int:
    """The largest of readings, once the last two agree; with a warning where they never do."""
    peaks: list[int] = []
    while len(peaks) < MAX_PEAK_READINGS:
        peaks.append(read())
        tolerance = max(PEAK_TOLERANCE_BYTES, max(peaks) * PEAK_TOLERANCE)
        if len(peaks) > 1 and abs(peaks[-1] - peaks[-2]) <= tolerance:
            return max(peaks)
    log.warning("readings of the peak do not agree; the plan takes the largest", extra={"peak_bytes": peaks})
    return max(peaks)


def trim_heap() -> bool:
    """Lets the C library give its free pages back to the system, of the heaps of all threads (malloc_trim(3)). It
    keeps them otherwise: what came over a socket is freed within a heap whose top is in use. Returns whether the
    library knows how."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return False
    trim(0)
    return True


def allowed_bytes(root: Path = Path("/")) -> int:
    """What this process may use at most: the machine's memory, or the smallest limit of the control groups above us."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in _cgroup_files(root, controller="memory", v1="memory.limit_in_bytes", v2="memory.max"):
        try:
            limit = int(path.read_text())
        except (OSError, ValueError):  # no such file here, or "max"
            continue
        if 0 < limit < _NO_LIMIT_BYTES:
            limits.append(limit)
    return min(limits)


def allowed_cpus(root: Path = Path("/")) -> int:
    """Physical cores that this process may use, from its affinity and its control groups' quotas; at least 1."""
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    cores = {_core_of(root, cpu) for cpu in cpus}
    quotas = [float(len(cores))]
    for path in _cgroup_files(root, controller="cpu", v1="cpu.cfs_quota_us", v2="cpu.max"):
        try:
            words = path.read_text().split()
            period = words[1] if len(words) > 1 else (path.parent / "cpu.cfs_period_us").read_text()
            quota = int(words[0]) / int(period)
        except (OSError, ValueError, IndexError, ZeroDivisionError):
            continue
        if quota > 0:
            quotas.append(quota)
    return max(1, int(min(quotas)))


def _core_of(root: Path, cpu: int) -> str:
    """A name for the physical core of a logical CPU: its siblings, or itself where the kernel does not say."""
    try:
        return (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _cgroup_files(root: Path, *, controller: str, v1: str, v2: str) -> list[Path]:
    """The limit files of our control group and of all above it, whether they exist or not, in both versions."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    mount = root / "sys/fs/cgroup"
    files: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, name = mount, v2
        elif controller in controllers.split(","):
            base, name = mount / controllers, v1
            if not base.is_dir():
                base = mount / controller
        else:
            continue
        group = base / path.lstrip("/")
        files += [directory / name for directory in (group, *group.parents) if directory.is_relative_to(base)]
    return files


def _highest_resident_bytes() -> int:
    """The highest resident set since the process began (kilobytes on Linux, bytes on macOS: getrusage(2))."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
