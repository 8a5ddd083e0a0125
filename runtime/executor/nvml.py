"""Asks NVIDIA's management library who uses a GPU's memory. Needs no CUDA context and makes none.

Through ctypes: the library comes with the driver, and four of its calls are all that is needed (NVML API reference,
"Device Queries"). Where it is missing, callers do with less.
"""

import ctypes
import logging
import os

log = logging.getLogger(__name__)

LIBRARY = "libnvidia-ml.so.1"
SUCCESS = 0
_NOT_AVAILABLE = (1 << 64) - 1
_MAX_PROCESSES = 256


class NvmlError(RuntimeError):
    """The library is missing or refused a call."""


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class Nvml:
    """Readings of one GPU, found by its PCI bus id."""

    def __init__(self, pci_bus_id: str) -> None:
        """Raises:
        NvmlError: there is no such library, or it does not know the GPU.
        """
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise NvmlError(f"{LIBRARY} is not there") from error
        self._call("nvmlInit_v2")
        self._device = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByPciBusId_v2", pci_bus_id.encode(), ctypes.byref(self._device))

    def free_bytes(self) -> int:
        """What nobody uses."""
        memory = _Memory()
        self._call("nvmlDeviceGetMemoryInfo", self._device, ctypes.byref(memory))
        return int(memory.free)

    def used_by_process(self) -> dict[int, int] | None:
        """Bytes by process id (in the driver's own namespace), or `None` where the driver does not tell."""
        count = ctypes.c_uint(_MAX_PROCESSES)
        processes = (_Process * _MAX_PROCESSES)()
        try:
            self._call(
                "nvmlDeviceGetComputeRunningProcesses_v3", self._device, ctypes.byref(count), ctypes.byref(processes)
            )
        except NvmlError as error:
            log.debug("processes on the GPU are not told: %s", error)
            return None
        used = {int(one.pid): int(one.used_bytes) for one in processes[: count.value]}
        return None if _NOT_AVAILABLE in used.values() else used

    def _call(self, name: str, *arguments: object) -> None:
        try:
            function = getattr(self._library, name)
        except AttributeError as error:
            raise NvmlError(f"{LIBRARY} has no {name}") from error
        function.restype = ctypes.c_int
        code = function(*arguments)
        if code != SUCCESS:
            raise NvmlError(f"{name} answered {code}")


def own_process(before: dict[int, int] | None, after: dict[int, int] | None) -> int | None:
    """Which id is ours: our own where the driver knows it, or the only one that appeared with our context.

    In a container the driver may count in another namespace of process ids than we do.
    """
    if after is None:
        return None
    if os.getpid() in after:
        return os.getpid()
    appeared = set(after) - set(before or {})
    return appeared.pop() if before is not None and len(appeared) == 1 else None
