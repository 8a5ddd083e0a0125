"""How a device captures a forward and replays it: the protocol, and its emulation for a CPU.

Knows no buckets, no families and no counting. CUDA's backend (`cuda_graphs`) has the same shape as the emulated one.
"""

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from torch import Tensor


class CaptureError(RuntimeError):
    """A backend could not capture. `retained_bytes`: what the device's allocator keeps all the same; it is counted."""

    def __init__(self, message: str, *, retained_bytes: int = 0) -> None:
        super().__init__(message)
        self.retained_bytes = retained_bytes


class CapturedGraph(Protocol):
    """One captured bucket. `graph_bytes`: what capture took from the device, the first replay included; of these
    `driver_bytes` lie outside of the allocator. After `release` they are what is retained all the same."""

    @property
    def graph_bytes(self) -> int: ...
    @property
    def driver_bytes(self) -> int: ...

    @property
    def captured_output(self) -> Tensor | None:
        """The static output where the capture ran what it captured; None where it only recorded it."""
        ...

    def replay(self) -> Tensor:
        """The static output, which the next replay overwrites."""
        ...

    def release(self) -> None:
        """Gives back everything the capture took."""
        ...


class GraphBackend(Protocol):
    """How a device captures: `emulated` here, CUDA graphs on a GPU."""

    @property
    def name(self) -> Literal["cuda", "emulated"]: ...

    @property
    def segment_bytes(self) -> int:
        """What the backend's own pool of memory holds now; 0 once all graphs are released and nothing is retained."""
        ...

    @property
    def replays_eagerly(self) -> bool:
        """A replay is the eager call itself, so that comparing the two would compare a thing with itself."""
        ...

    def capture(self, forward: Callable[[], Tensor], static_tensors: Sequence[Tensor]) -> CapturedGraph:
        """Warms up and captures `forward`, which reads `static_tensors`.

        Raises:
            Exception: whatever went wrong, after freeing what was taken; `CaptureError` when some of it is retained.
        """
        ...


class EmulatedBackend:
    """Graphs without graphs, for a CPU: a replay is an eager call whose result lands in a static output buffer.

    Its bytes are exactly those of the static buffers: inputs and output, shared storage once. What is already `counted`
    elsewhere, such as buffers that eager steps use too, is not counted again.
    """

    name: Literal["emulated"] = "emulated"
    replays_eagerly = True
    segment_bytes = 0  # no pool of its own

    def __init__(self, *, counted: Sequence[Tensor] = ()) -> None:
        self._counted_storages = {tensor.untyped_storage().data_ptr() for tensor in counted}

    def capture(self, forward: Callable[[], Tensor], static_tensors: Sequence[Tensor]) -> "EmulatedGraph":
        output = forward().detach().clone()
        new_storages: dict[int, int] = {}
        for tensor in (*static_tensors, output):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._counted_storages:
                new_storages[storage.data_ptr()] = storage.nbytes()
        self._counted_storages.update(new_storages)
        return EmulatedGraph(forward, output, new_storages, self._counted_storages)


class EmulatedGraph:
    """What `EmulatedBackend` captured. While it lives its storages are counted; a released address may be reused."""

    driver_bytes = 0

    def __init__(
        self, forward: Callable[[], Tensor], output: Tensor, storages: dict[int, int], counted_storages: set[int]
    ) -> None:
        self._captured: tuple[Callable[[], Tensor], Tensor] | None = (forward, output)
        self._storages = storages
        self._counted_storages = counted_storages

    @property
    def graph_bytes(self) -> int:
        return sum(self._storages.values())

    @property
    def captured_output(self) -> Tensor | None:
        return None if self._captured is None else self._captured[1]

    def replay(self) -> Tensor:
        assert self._captured is not None, "replay of a released graph"
        forward, output = self._captured
        return output.copy_(forward())

    def release(self) -> None:
        self._counted_storages.difference_update(self._storages)
        self._captured = None
        self._storages = {}
