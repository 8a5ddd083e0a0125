"""Memory mapped under addresses, on a driver that checks every call."""

import gc

import pytest
import torch

from runtime.config import GIB, MIB
from runtime.executor.kv_cache import KVCache, KVLayout
from runtime.executor.vmm import CudaVirtualMemory, MappedSpan, VirtualMemoryError
from tests.fake_cuda import GRANULARITY, FakeGpu

LAYOUT = KVLayout(num_layers=2, block_size=16, num_kv_heads=2, head_dim=64, dtype=torch.float32)


def test_memory_comes_in_pieces_from_the_front_and_starts_as_zeros() -> None:
    gpu = FakeGpu()
    span = MappedSpan(gpu, GIB, piece_bytes=8 * MIB)
    assert span.capacity_bytes == GIB
    assert span.resident_bytes() == GRANULARITY
    span.tensor()[10 * MIB] = 255  # what was in the memory before
    span.resize(21 * MIB)
    assert span.backed_bytes == 21 * MIB
    assert span.resident_bytes() == 22 * MIB
    assert sorted(gpu.mapped.values()) == [2 * MIB, 4 * MIB, 8 * MIB, 8 * MIB]
    assert int(span.tensor()[: 22 * MIB].max()) == 0


def test_shrinking_gives_whole_pieces_back_and_keeps_the_rest() -> None:
    gpu = FakeGpu()
    span = MappedSpan(gpu, GIB, piece_bytes=8 * MIB)
    span.resize(34 * MIB)
    span.tensor()[5 * MIB] = 7
    span.resize(11 * MIB)
    assert span.resident_bytes() == 18 * MIB  # 2 + 8 + 8: the last piece is in use in part
    assert int(span.tensor()[5 * MIB]) == 7
    span.resize(34 * MIB)
    assert int(span.tensor()[5 * MIB]) == 7
    span.release()
    assert not gpu.mapped
    span.release()


def test_a_span_that_nobody_refers_to_is_released() -> None:
    gpu = FakeGpu()
    cache = KVCache(LAYOUT, 2, MappedSpan(gpu, GIB))
    cache.resize(64)
    assert gpu.mapped
    del cache
    gc.collect()
    assert not gpu.mapped
    assert not gpu._spans


def test_a_growth_that_the_device_cannot_give_changes_nothing() -> None:
    gpu = FakeGpu(total_bytes=GIB)
    span = MappedSpan(gpu, 4 * GIB, piece_bytes=64 * MIB)
    span.resize(100 * MIB)
    before = dict(gpu.mapped)
    with pytest.raises(VirtualMemoryError, match="OUT_OF_MEMORY"):
        span.resize(2 * GIB)
    assert gpu.mapped == before
    assert span.backed_bytes == 100 * MIB


def test_blocks_grow_and_shrink_over_mapped_memory() -> None:
    gpu = FakeGpu()
    cache = KVCache(LAYOUT, 2, MappedSpan(gpu, GIB))
    assert cache.resident_bytes() == GRANULARITY
    assert cache.max_blocks == GIB // LAYOUT.block_bytes
    cache.resize(4096)
    cache.layer(1)[4095].fill_(3)
    assert cache.resident_bytes() >= cache.num_bytes
    cache.resize(64)
    assert cache.resident_bytes() < 4096 * LAYOUT.block_bytes


def test_the_driver_is_asked_for_pinned_device_memory_and_refusals_name_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    class Bindings:
        """As much of cuda.bindings.driver as is used."""

        class CUresult:
            CUDA_SUCCESS = 0

        class _Struct:
            def __init__(self) -> None:
                self.location = type("Location", (), {})()

        CUmemAllocationProp = CUmemAccessDesc = _Struct
        CUmemAllocationType = type("T", (), {"CU_MEM_ALLOCATION_TYPE_PINNED": 1})
        CUmemLocationType = type("T", (), {"CU_MEM_LOCATION_TYPE_DEVICE": 1})
        CUmemAccess_flags = type("T", (), {"CU_MEM_ACCESS_FLAGS_PROT_READWRITE": 3})
        CUmemAllocationGranularity_flags = type("T", (), {"CU_MEM_ALLOC_GRANULARITY_MINIMUM": 0})

        def __getattr__(self, name: str) -> object:
            def call(*arguments: object) -> tuple[object, ...]:
                calls.append(name)
                if name == "cuMemSetAccess":
                    return (700,)
                return (0,) if name in ("cuMemMap", "cuMemUnmap", "cuMemRelease") else (0, GRANULARITY)

            return call

    monkeypatch.setattr("runtime.executor.vmm.importlib.import_module", lambda name: Bindings())
    driver = CudaVirtualMemory(torch.device("cuda", 0))
    assert driver.granularity_bytes == GRANULARITY
    with pytest.raises(VirtualMemoryError, match="cuMemSetAccess failed: 700"):
        driver.map(1 << 40, GRANULARITY)
    assert calls[1:] == ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease"]
