"""How arrays get to the device and results get back without the host waiting for more than it must.

Knows memory and streams; knows no steps and no models. On a CPU host and device are the same memory: nothing is copied,
nothing waits. On CUDA, copies go through pinned memory, in the order of the current stream, and an event says when the
pinned memory may be written again.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class CopyFence:
    """Says when the copies enqueued so far have read their pinned sources. Waits for nothing on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._is_pending = False

    def record(self) -> None:
        """Everything that is enqueued by now is what `wait` waits for."""
        if self._event is not None:
            self._event.record()
            self._is_pending = True

    def wait(self) -> None:
        """Returns once that is done; mostly it is long done, for a step's copies come before its tokens."""
        if self._event is not None and self._is_pending:
            self._event.synchronize()
            self._is_pending = False


class StagedTensor:
    """A device tensor and the host array from which it is filled: the same memory where the device is the CPU.

    `row_dim` is the dimension of which steps fill a front part. It lies outermost in memory, whatever the shape says,
    because only a contiguous part goes to the device in one copy, without a temporary that the host would wait for.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, row_dim: int = 0) -> None:
        rows_first = (shape[row_dim], *(size for dim, size in enumerate(shape) if dim != row_dim))
        self._staging = torch.zeros(rows_first, dtype=dtype, pin_memory=device.type == "cuda")
        self._storage = self._staging if device.type == "cpu" else self._staging.to(device)
        self.host: NDArray[Any] = np.moveaxis(self._staging.numpy(), 0, row_dim)
        self.device = self._storage.movedim(0, row_dim)

    def upload(self, num_rows: int) -> None:
        """Makes the first `num_rows` rows of the device tensor equal to the host's. Does not wait: the host array may
        be written again once a `CopyFence` recorded after this has passed."""
        if self._storage is not self._staging:
            self._storage[:num_rows].copy_(self._staging[:num_rows], non_blocking=True)


def pinned_bytes(num_bytes: int) -> Tensor:
    """Host memory that the device copies from and to on its own, uint8 [num_bytes]."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


class PinnedArena:
    """Pinned memory for arrays of changing sizes on their way to the device, `num_bytes` at a time.

    Between two `reuse` calls arrays are laid end to end. What does not fit goes to the device from where it is.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._device = device
        self._fence = CopyFence(device)
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self.grow(num_bytes)

    def grow(self, num_bytes: int) -> None:
        """Makes room for so many bytes a round, unless there is. On a CPU there is nothing to make."""
        if self._device.type == "cuda" and num_bytes > len(self._bytes):
            self._fence.wait()
            self._bytes = pinned_bytes(num_bytes)
            self._used = 0

    def reuse(self) -> None:
        """Starts over: waits until the copies of the last round have been read."""
        self._fence.wait()
        self._used = 0

    def finish(self) -> None:
        """Ends the round: `reuse` waits for the copies up to here."""
        self._fence.record()

    def stage(self, array: NDArray[np.generic]) -> Tensor:
        """The array as a tensor on the host: in pinned memory for CUDA, without a copy on a CPU. Read-only arrays, as
        messages bring them, are copied: torch does not wrap them without a warning."""
        if self._device.type == "cuda":
            start = -(-self._used // 16) * 16
            if start + array.nbytes <= len(self._bytes):
                self._used = start + array.nbytes
                pinned = self._bytes[start : self._used]
                pinned.numpy()[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                return pinned.view(torch.from_numpy(np.empty(0, array.dtype)).dtype).view(array.shape)
        return torch.from_numpy(array if array.flags.writeable else array.copy())

    def copy(self, array: NDArray[np.generic], target: Tensor) -> None:
        """Writes the array into a device tensor of its shape. Does not wait."""
        target.copy_(self.stage(array), non_blocking=True)


class PinnedArray:
    """Pinned memory, zeros at first, as a tensor [size] and as an array; and the fence after which it may be written.
    Ordinary memory on a CPU."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        num_bytes = size * dtype.itemsize
        memory = pinned_bytes(num_bytes) if device.type == "cuda" else torch.empty(num_bytes, dtype=torch.uint8)
        self.tensor = memory.zero_().view(dtype)
        self.array: NDArray[Any] = self.tensor.numpy()
        self.fence = CopyFence(device)


class PinnedPair:
    """Two pinned arrays in turns, so that one is written while the device may still read the other."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._arrays = [PinnedArray(size, dtype, device) for _ in range(2)]
        self._next = 0

    @property
    def first(self) -> Tensor:
        """The tensor of the one that is taken first."""
        return self._arrays[0].tensor

    def take(self) -> PinnedArray:
        """The one that is longer unused, once the device has read it: what its `fence` was told to wait for."""
        array = self._arrays[self._next]
        self._next = 1 - self._next
        array.fence.wait()
        return array


class HostCopy:
    """The way back: device tensors to the host, through pinned memory. The one copy that a step waits for.

    Two copies may be on their way at once: a step's tokens are read while the step after it runs.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """`num_bytes`: of the largest tensor that goes without a fresh buffer."""
        self._is_cuda = device.type == "cuda"
        self._bytes = [pinned_bytes(num_bytes) for _ in range(2)] if self._is_cuda else []
        self._done: list[torch.cuda.Event] = (
            [torch.cuda.Event() for _ in range(2)] if self._is_cuda else []  # type: ignore[no-untyped-call]
        )
        self._turn = 0

    def start(self, tensor: Tensor) -> "PendingCopy":
        """Enqueues a copy, into the buffer of the last but one."""
        if not self._is_cuda:
            return PendingCopy(tensor.cpu(), None)
        self._turn = turn = 1 - self._turn
        source = tensor.contiguous()
        if source.nbytes > len(self._bytes[turn]):
            self._bytes[turn] = pinned_bytes(source.nbytes)
        target = self._bytes[turn][: source.nbytes].view(source.dtype).view(source.shape)
        target.copy_(source, non_blocking=True)
        self._done[turn].record()
        return PendingCopy(target, self._done[turn])

    def fetch(self, tensor: Tensor, *, meanwhile: Callable[[], None] | None = None) -> NDArray[np.generic]:
        """The tensor's values, valid until the last but one `start` or `fetch` after it. `meanwhile` runs on the host
        while the device works."""
        return self.start(tensor).wait(meanwhile)


class PendingCopy:
    """A copy on its way to the host."""

    def __init__(self, target: Tensor, done: torch.cuda.Event | None) -> None:
        self._target = target
        self._done = done

    def wait(self, meanwhile: Callable[[], None] | None = None) -> NDArray[np.generic]:
        """The values, once they are here. `meanwhile` runs before."""
        if meanwhile is not None:
            meanwhile()
        if self._done is not None:
            self._done.synchronize()
        return self._target.numpy()
