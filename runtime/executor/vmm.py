"""CUDA virtual memory behind the KV cache: addresses that never move, and memory mapped under their front.

Knows the driver's calls and pieces of memory; knows no blocks. Graphs bake addresses, not sizes, so the span may grow
and shrink under captured graphs (measured: docs/decisions.md).

    addresses   |------------------------------------------------------------|   reserved once
    pieces      [ 64 MiB ][ 64 MiB ][ rest ]                                     mapped from the front, no gaps
"""

import importlib
import logging
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

from runtime.config import MIB

log = logging.getLogger(__name__)

# Memory is mapped in pieces of this size, so that it can be given back in steps: a mapping goes as a whole.
PIECE_BYTES = 64 * MIB


class VirtualMemoryError(RuntimeError):
    """The driver refused a call; the message names the call and the driver's code."""


class VirtualMemoryDriver(Protocol):
    """The five things that a device's virtual memory can do. Sizes are multiples of `granularity_bytes`."""

    @property
    def granularity_bytes(self) -> int: ...

    def reserve(self, num_bytes: int) -> int:
        """Addresses without memory; the first one."""
        ...

    def map(self, address: int, num_bytes: int) -> object:
        """Puts new memory behind addresses, readable and writable; a handle for `unmap`.

        Raises:
            VirtualMemoryError: the device has no such memory left; nothing is mapped then.
        """
        ...

    def unmap(self, address: int, num_bytes: int, handle: object) -> None:
        """Takes away exactly what one `map` gave."""
        ...

    def free(self, address: int, num_bytes: int) -> None:
        """Gives the addresses of one `reserve` back."""
        ...

    def tensor(self, address: int, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] over the addresses, of which the first must have memory."""
        ...

    def synchronize(self) -> None:
        """Waits until the device uses no memory that may be unmapped."""
        ...


class CudaVirtualMemory:
    """The driver of one CUDA device, through cuda-bindings. The device's context must exist already."""

    def __init__(self, device: torch.device) -> None:
        """Raises:
        VirtualMemoryError: the device has no virtual memory management.
        ImportError: cuda-bindings is not installed.
        """
        self._device = device
        # Found by name: the package exists only where there is a GPU to serve.
        self._driver: Any = importlib.import_module("cuda.bindings.driver")
        driver, index = self._driver, device.index or 0
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        location = properties.location
        location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = index
        properties.location = location
        access = driver.CUmemAccessDesc()
        access.location = location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._properties, self._access = properties, access
        minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granularity_bytes = int(self._call("cuMemGetAllocationGranularity", properties, minimum))

    def reserve(self, num_bytes: int) -> int:
        return int(self._call("cuMemAddressReserve", num_bytes, 0, 0, 0))

    def map(self, address: int, num_bytes: int) -> object:
        handle = self._call("cuMemCreate", num_bytes, self._properties, 0)
        try:
            self._call("cuMemMap", address, num_bytes, 0, handle, 0)
        except VirtualMemoryError:
            self._call("cuMemRelease", handle)
            raise
        try:
            self._call("cuMemSetAccess", address, num_bytes, [self._access], 1)
        except VirtualMemoryError:
            self.unmap(address, num_bytes, handle)
            raise
        return handle

    def unmap(self, address: int, num_bytes: int, handle: object) -> None:
        self._call("cuMemUnmap", address, num_bytes)
        self._call("cuMemRelease", handle)

    def free(self, address: int, num_bytes: int) -> None:
        self._call("cuMemAddressFree", address, num_bytes)

    def tensor(self, address: int, num_bytes: int) -> Tensor:
        return torch.as_tensor(_Span(address, num_bytes), device=self._device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def _call(self, name: str, *arguments: object) -> Any:
        """The call's one result, or `None`."""
        code, *results = getattr(self._driver, name)(*arguments)
        if code != self._driver.CUresult.CUDA_SUCCESS:
            raise VirtualMemoryError(f"{name} failed: {getattr(code, 'name', code)}")
        return results[0] if results else None


class _Span:
    """What torch makes a tensor of without owning the memory."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


class MappedSpan:
    """The `KVBacking` of a device with virtual memory: grows and shrinks at its far end.

    Memory comes and goes in pieces, so that after shrinking a little more than asked for may stay mapped; what is
    mapped is what `resident_bytes` says. A span that nobody refers to any more is released, so that a process may
    start one engine after another.
    """

    def __init__(self, driver: VirtualMemoryDriver, capacity_bytes: int, *, piece_bytes: int = PIECE_BYTES) -> None:
        """Reserves addresses for `capacity_bytes`, rounded up to pieces of the driver, with memory under the first.

        Raises:
            VirtualMemoryError: the driver gives no addresses, or no memory at all.
        """
        granularity = driver.granularity_bytes
        self._granularity = granularity
        self._piece_bytes = _round_up(piece_bytes, granularity)
        capacity_bytes = _round_up(max(capacity_bytes, 1), granularity)
        self._span = _Mappings(driver, driver.reserve(capacity_bytes), capacity_bytes)
        # Not at the end of the process: the driver tidies up then, and may be gone first.
        self._release = weakref.finalize(self, self._span.release)
        self._release.atexit = False
        self._backed_bytes = 0
        self._tensor: Tensor | None = None
        try:
            self.resize(granularity)  # torch looks at the first address to learn the device
            self._tensor = driver.tensor(self._span.address, capacity_bytes)
            self._tensor[:granularity].zero_()
        except BaseException:
            self.release()
            raise

    @property
    def capacity_bytes(self) -> int:
        return self._span.capacity_bytes

    @property
    def backed_bytes(self) -> int:
        return self._backed_bytes

    def tensor(self) -> Tensor:
        assert self._tensor is not None, "a released span"
        return self._tensor

    def resize(self, num_bytes: int) -> None:
        """Maps until at least `num_bytes` have memory, or unmaps the pieces that lie wholly beyond.

        Raises:
            VirtualMemoryError: the device has not so much memory left; the size is then as it was.
        """
        assert 0 <= num_bytes <= self.capacity_bytes, (num_bytes, self.capacity_bytes)
        if num_bytes > self.resident_bytes():
            self._grow(_round_up(num_bytes, self._granularity))
        else:
            self._span.shrink(num_bytes)
        self._backed_bytes = num_bytes

    def resident_bytes(self) -> int:
        """Bytes that are mapped."""
        return self._span.mapped_bytes

    def release(self) -> None:
        """Gives back all memory and the addresses. No tensor over them may be used any more."""
        self._tensor = None
        self._release()
        self._backed_bytes = 0

    def _grow(self, num_bytes: int) -> None:
        mapped_before = self._span.mapped_bytes
        self._span.grow(num_bytes, self._piece_bytes)
        if self._tensor is not None:
            # New memory holds anything; a masked position contributes 0 times what is there, which must be a number.
            self._tensor[mapped_before : self._span.mapped_bytes].zero_()


class _Mappings:
    """Addresses and the pieces mapped under their front; a thing of its own so that it can outlive the span."""

    def __init__(self, driver: VirtualMemoryDriver, address: int, capacity_bytes: int) -> None:
        self.address = address
        self.capacity_bytes = capacity_bytes
        self._driver = driver
        self._pieces: list[tuple[int, int, object]] = []  # address, bytes, handle

    @property
    def mapped_bytes(self) -> int:
        return sum(piece_bytes for _, piece_bytes, _ in self._pieces)

    def grow(self, num_bytes: int, piece_bytes: int) -> None:
        """Maps until `num_bytes` have memory.

        Raises:
            VirtualMemoryError: the device has not so much memory left; what was mapped before is mapped then.
        """
        known, mapped = len(self._pieces), self.mapped_bytes
        try:
            while mapped < num_bytes:
                size = min(piece_bytes, num_bytes - mapped)
                self._pieces.append((self.address + mapped, size, self._driver.map(self.address + mapped, size)))
                mapped += size
        except VirtualMemoryError:
            self._drop(known)
            raise

    def shrink(self, num_bytes: int) -> None:
        """Unmaps the pieces that lie wholly beyond."""
        keep = len(self._pieces)
        end = self.address + num_bytes
        while keep and self._pieces[keep - 1][0] >= end:
            keep -= 1
        if keep < len(self._pieces):
            self._driver.synchronize()
            self._drop(keep)

    def release(self) -> None:
        """Unmaps everything and frees the addresses."""
        self.shrink(0)
        self._driver.free(self.address, self.capacity_bytes)

    def _drop(self, keep: int) -> None:
        while len(self._pieces) > keep:
            address, size, handle = self._pieces.pop()
            self._driver.unmap(address, size, handle)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
