"""Staging on a CPU, and the rules of pinned memory with events and memory that a test watches."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from runtime import staging
from runtime.staging import CopyFence, HostCopy, PinnedArena, PinnedPair, StagedTensor

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class FakeEvent:
    """An event that writes down what happened to it."""

    def __init__(self, journal: list[str]) -> None:
        self._journal = journal

    def record(self) -> None:
        self._journal.append("record")

    def synchronize(self) -> None:
        self._journal.append("wait")


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Pinned memory without a GPU, and what its events saw."""
    events: list[str] = []
    monkeypatch.setattr(torch.cuda, "Event", lambda: FakeEvent(events))
    monkeypatch.setattr(staging, "pinned_bytes", lambda size: torch.zeros(size, dtype=torch.uint8))
    return events


def test_on_a_cpu_host_and_device_are_one_memory_in_the_shape_asked_for() -> None:
    staged = StagedTensor((3, 5), torch.int64, CPU, row_dim=1)
    staged.host[:, :2] = np.arange(6).reshape(3, 2)
    staged.upload(2)
    assert staged.device.shape == (3, 5)
    assert staged.device[:, :2].tolist() == [[0, 1], [2, 3], [4, 5]]
    # The first two rows are one piece of memory, so that one copy takes them.
    assert staged.device[:, :2].t().is_contiguous()


def test_fence_waits_once_for_what_was_recorded(journal: list[str]) -> None:
    fence = CopyFence(CUDA)
    fence.wait()
    fence.record()
    fence.wait()
    fence.wait()
    assert journal == ["record", "wait"]
    CopyFence(CPU).record()
    assert journal == ["record", "wait"]


def test_pair_is_written_in_turns_and_waits_for_the_last_but_one(journal: list[str]) -> None:
    pair = PinnedPair(3, torch.int32, CUDA)
    first = pair.take()
    assert first.array.tolist() == [0, 0, 0]
    first.array[:] = [1, 2, 3]
    first.fence.record()
    second = pair.take()
    assert second.tensor.tolist() == [0, 0, 0]
    second.fence.record()
    assert journal == ["record", "record"]
    assert pair.take().tensor.tolist() == [1, 2, 3]
    assert journal == ["record", "record", "wait"]


def test_arena_lays_arrays_end_to_end_and_is_reused_only_behind_its_fence(journal: list[str]) -> None:
    arena = PinnedArena(100, CUDA)
    first = arena.stage(np.array([1, 2, 3], np.int32))
    second = arena.stage(np.array([[1.5], [2.5]], np.float64))
    assert first.tolist() == [1, 2, 3]
    assert second.tolist() == [[1.5], [2.5]]
    assert second.data_ptr() - first.data_ptr() == 16
    arena.finish()
    assert journal == ["record"]
    arena.reuse()
    assert journal == ["record", "wait"]
    assert arena.stage(np.zeros(4, np.uint8)).data_ptr() == first.data_ptr()


def test_arena_takes_what_does_not_fit_from_where_it_is(journal: list[str]) -> None:
    arena = PinnedArena(8, CUDA)
    array = np.arange(9, dtype=np.uint8)
    assert arena.stage(array).data_ptr() == array.ctypes.data
    arena.grow(64)
    assert arena.stage(array).data_ptr() != array.ctypes.data
    target = torch.zeros(9, dtype=torch.uint8)
    arena.copy(array, target)
    assert target.tolist() == list(range(9))


def test_read_only_arrays_are_copied_on_a_cpu() -> None:
    array = np.arange(4, dtype=np.uint8)
    array.flags.writeable = False
    staged = PinnedArena(0, CPU).stage(array)
    assert staged.tolist() == [0, 1, 2, 3]
    assert staged.data_ptr() != array.ctypes.data


def test_result_is_fetched_with_host_work_between_copy_and_wait(journal: list[str]) -> None:
    copy = HostCopy(16, CUDA)
    values = copy.fetch(
        torch.arange(6, dtype=torch.int32).view(2, 3).t(), meanwhile=lambda: journal.append("meanwhile")
    )
    assert values.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert journal == ["record", "meanwhile", "wait"]


def test_on_a_cpu_a_result_is_there_at_once(journal: list[str]) -> None:
    values = HostCopy(0, CPU).fetch(torch.tensor([7]), meanwhile=lambda: journal.append("meanwhile"))
    assert (values.tolist(), journal) == ([7], ["meanwhile"])
