"""CUDA virtual memory behind the KV cache: addresses that never move, and memory mapped under their front.

Knows the driver's calls and pieces of memory; knows no blocks. Graphs bake addresses, not sizes, so the span may grow
and shrink under captured graphs (measured: docs/decisions.md).

    addresses   |------------------------------------------------------------|   reserved once
    pieces      [ 64 MiB ][ 64 MiB ][ rest ]                                     mapped from the front, no gaps
"""

import importlib
import logging
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
    mapped is what `resident_bytes` says.
    """

    def __init__(self, driver: VirtualMemoryDriver, capacity_bytes: int, *, piece_bytes: int = PIECE_BYTES) -> None:
        """Reserves addresses for `capacity_bytes`, rounded up to pieces of the driver, with memory under the first.

        Raises:
            VirtualMemoryError: the driver gives no addresses, or no memory at all.
        """
        self._driver = driver
        granularity = driver.granularity_bytes
        self._granularity = granularity
        self._piece_bytes = _round_up(piece_bytes, granularity)
        self._capacity_bytes = _round_up(max(capacity_bytes, 1), granularity)
        self._address = driver.reserve(self._capacity_bytes)
        self._pieces: list[tuple[int, int, object]] = []  # address, bytes, handle
        self._backed_bytes = 0
        self._tensor: Tensor | None = None
        try:
            self.resize(granularity)  # torch looks at the first address to learn the device
            self._tensor = driver.tensor(self._address, self._capacity_bytes)
            self._tensor[:granularity].zero_()
        except BaseException:
            self.release()
            raise

    @property
    def capacity_bytes(self) -> int:
        return self._capacity_bytes

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
        assert 0 <= num_bytes <= self._capacity_bytes, (num_bytes, self._capacity_bytes)
        if num_bytes > self.resident_bytes():
            self._grow(_round_up(num_bytes, self._granularity))
        else:
            self._shrink(num_bytes)
        self._backed_bytes = num_bytes

    def resident_bytes(self) -> int:
        """Bytes that are mapped."""
        return sum(piece_bytes for _, piece_bytes, _ in self._pieces)

    def release(self) -> None:
        """Gives back all memory and the addresses. No tensor over them may be used any more."""
        if not self._address:
            return
        self._shrink(0)
        self._tensor = None
        self._driver.free(self._address, self._capacity_bytes)
        self._address, self._backed_bytes = 0, 0

    def _grow(self, num_bytes: int) -> None:
        known, mapped = len(self._pieces), self.resident_bytes()
        mapped_before = mapped
        try:
            while mapped < num_bytes:
                size = min(self._piece_bytes, num_bytes - mapped)
                address = self._address + mapped
                self._pieces.append((address, size, self._driver.map(address, size)))
                mapped += size
        except VirtualMemoryError:
            self._drop(known)
            raise
        if self._tensor is not None:
            # New memory holds anything; a masked position contributes 0 times what is there, which must be a number.
            self._tensor[mapped_before:mapped].zero_()

    def _shrink(self, num_bytes: int) -> None:
        keep = len(self._pieces)
        end = self._address + num_bytes
        while keep and self._pieces[keep - 1][0] >= end:
            keep -= 1
        if keep < len(self._pieces):
            self._driver.synchronize()
            self._drop(keep)

    def _drop(self, keep: int) -> None:
        while len(self._pieces) > keep:
            address, size, handle = self._pieces.pop()
            self._driver.unmap(address, size, handle)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
