"""The CUDA backend's order of readings and what it leaves of a failed capture, on a device that fails on demand."""

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from runtime.config import MIB
from runtime.executor.cuda_graphs import CudaGraphBackend
from runtime.executor.graph_backend import CaptureError
from tests.fake_cuda import Failure, FakeGpu

X = torch.arange(4.0)


def double() -> Tensor:
    return X * 2


def test_what_the_device_says_was_taken_is_split_into_segments_and_driver() -> None:
    gpu = FakeGpu()
    backend = CudaGraphBackend(gpu)
    first = backend.capture(double, [X])
    assert first.graph_bytes - first.driver_bytes == gpu.segment_bytes
    assert first.driver_bytes == gpu.driver_bytes_per_graph + MIB  # and what the bootstrap took
    second = backend.capture(double, [X])
    assert (second.graph_bytes, second.driver_bytes) == (15 * MIB, 3 * MIB)
    assert first.graph_bytes + second.graph_bytes == gpu.used_bytes() - gpu.context_bytes - gpu.resident_bytes
    assert backend.segment_bytes == 24 * MIB
    assert torch.equal(first.replay(), X * 2)


def test_what_warm_up_takes_is_not_the_graphs() -> None:
    gpu = FakeGpu()
    calls = []

    def forward() -> Tensor:
        calls.append(1)
        if len(calls) == 1:
            gpu.resident_bytes += 30 * MIB  # a workspace that is made once
        gpu.cached_bytes += 7 * MIB
        return X * 2

    graph = CudaGraphBackend(gpu).capture(forward, [X])
    assert graph.graph_bytes == 16 * MIB


def test_without_measuring_the_device_is_not_read() -> None:
    gpu = FakeGpu()
    gpu.settle = lambda: pytest.fail("settled")  # type: ignore[method-assign]
    graph = CudaGraphBackend(gpu, is_measuring=False).capture(double, [X])
    assert (graph.graph_bytes, graph.driver_bytes) == (12 * MIB, 0)


def test_a_neighbour_that_gives_memory_back_during_a_capture_makes_no_negative_graph() -> None:
    gpu = FakeGpu()
    backend = CudaGraphBackend(gpu)
    backend.capture(double, [X])

    def forward() -> Tensor:
        gpu.context_bytes -= 10 * MIB
        return X * 2

    graph = backend.capture(forward, [X])
    assert (graph.graph_bytes, graph.driver_bytes) == (12 * MIB, 0)


@pytest.mark.parametrize("kind", ["python", "oom", "invalidated", "replay"])
def test_a_failed_capture_says_what_is_retained_and_the_next_one_works(kind: Failure) -> None:
    gpu = FakeGpu(fail={2: kind})
    backend = CudaGraphBackend(gpu)
    good = backend.capture(double, [X])
    with pytest.raises(CaptureError, match="injected") as caught:
        backend.capture(double, [X])
    assert caught.value.retained_bytes == gpu.segment_bytes
    assert len(next(iter(graphs for graphs in gpu.graphs.values() if graphs))) == 1
    assert gpu.driver_bytes == MIB + gpu.driver_bytes_per_graph
    backend.capture(double, [X])
    assert torch.equal(good.replay(), X * 2)


def test_no_tensor_of_a_failed_forward_lives() -> None:
    alive: list[weakref.ref[Tensor]] = []

    def forward() -> Tensor:
        hidden = torch.ones(3)
        alive.append(weakref.ref(hidden))
        inner(hidden)
        return hidden

    def inner(hidden: Tensor) -> None:
        more = hidden + 1
        alive.append(weakref.ref(more))
        try:
            raise KeyError("first")
        except KeyError:
            raise TypeError("injected in the model")  # noqa: B904  the first error is its context

    gpu = FakeGpu()
    gpu.warm_up = lambda forward, count: None  # type: ignore[method-assign]
    with pytest.raises(CaptureError, match="injected in the model"):
        CudaGraphBackend(gpu).capture(forward, [])
    assert len(alive) == 2
    assert [reference() for reference in alive] == [None, None]


def test_a_bootstrap_that_fails_is_a_failed_capture_that_retains_nothing() -> None:
    gpu = FakeGpu(fail_setup=True)
    backend = CudaGraphBackend(gpu)
    for _ in range(2):
        with pytest.raises(CaptureError, match="capture could not be set up: RuntimeError: injected") as caught:
            backend.capture(double, [X])
        assert caught.value.retained_bytes == 0
    assert backend.segment_bytes == 0
    assert gpu.driver_bytes == 0


def test_released_graphs_give_their_pool_back_with_the_last_of_them() -> None:
    gpu = FakeGpu()
    backend = CudaGraphBackend(gpu)
    first, second = (backend.capture(double, [X]) for _ in range(2))
    second.release()
    assert (second.graph_bytes, second.driver_bytes) == (gpu.segment_bytes, 0)  # the pool has another graph
    first.release()
    assert first.graph_bytes == 0
    assert backend.segment_bytes == 0
    with pytest.raises(AssertionError):
        first.replay()


def test_pools_are_private_to_a_family() -> None:
    gpu = FakeGpu()
    forwards: Callable[[], Tensor] = double
    encoder, decoder = CudaGraphBackend(gpu), CudaGraphBackend(gpu)
    encoder.capture(forwards, [X])
    decoder.capture(forwards, [X]).release()
    assert (encoder.segment_bytes, decoder.segment_bytes) == (12 * MIB, 0)
