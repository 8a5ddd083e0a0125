"""What a start needs of the machine it runs on: memory readings, a backing for the KV cache, graph backends.

Knows a CPU. A GPU (`cuda_hardware`) stands beside it in the same shape; `build_engine` knows no other difference.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from runtime.assembly import Site
from runtime.config import EngineConfig, ResolvedConfig
from runtime.executor.device import CpuDevice, Device, allowed_cpus
from runtime.executor.graph_backend import EmulatedBackend, GraphBackend
from runtime.executor.kv_cache import AnonymousMapping, KVBacking, KVLayout
from runtime.executor.memory import KVRequest
from runtime.readings import CpuReadings, Readings
from runtime.threads import default_threads

# A default request on a CPU stops at a million tokens of KV: block numbers cost memory too.
MAX_DEFAULT_KV_TOKENS = 1 << 20

# Output tokens of the pictures that a step encodes on a CPU, if they are several: 256 patches, from where on products
# gain nothing by more rows (docs/decisions.md).
MAX_SHARED_ENCODER_TOKENS = 64

# Blocks that capture needs: the null block, on which self-tests work, and one more.
MIN_BLOCKS = 2


class Hardware(Site, Protocol):
    """One device and how an engine is put on it."""

    @property
    def device(self) -> Device: ...

    def kv_request(self, config: ResolvedConfig, layout: KVLayout) -> KVRequest:
        """What the KV cache must be, and in what steps it grows."""
        ...

    def max_request_bytes(self, config: ResolvedConfig) -> int | None:
        """What the requests in the engine may hold of this device's memory; `None`: they hold none of it."""
        ...

    def reserve_kv(self, config: EngineConfig, request: KVRequest) -> KVBacking:
        """Addresses for all that the plan can give, with memory behind the few blocks that capture needs."""
        ...

    def minimal_kv(self, config: EngineConfig, request: KVRequest) -> KVBacking:
        """An ordinary allocation of the least that capture needs: the probe's, which is dropped afterwards."""
        ...

    def allocate_kv(self, num_bytes: int) -> KVBacking:
        """An ordinary allocation of the planned size."""
        ...

    def readings(self) -> Readings:
        """The device's memory as this start goes on."""
        ...


class CpuHardware:
    """This machine's cores and memory. Sets torch's number of threads for the process."""

    torch_device = torch.device("cpu")
    max_shared_encoder_tokens: int | None = MAX_SHARED_ENCODER_TOKENS

    def __init__(self, config: EngineConfig) -> None:
        self.device = CpuDevice()
        self._baseline_bytes = self.device.used_bytes()
        # `auto` is float32 on a CPU: half precision is emulated on most.
        self.dtype: torch.dtype = getattr(torch, "float32" if config.dtype == "auto" else config.dtype)
        torch.set_num_threads(config.num_threads or default_threads(allowed_cpus()))

    def kv_request(self, config: ResolvedConfig, layout: KVLayout) -> KVRequest:
        engine = config.engine
        is_default = engine.memory_bytes is None
        return KVRequest(
            block_bytes=layout.block_bytes,
            block_size=layout.block_size,
            max_model_len=config.max_model_len,
            cache_bytes=engine.kv_cache_memory_bytes,
            max_num_blocks=MAX_DEFAULT_KV_TOKENS // layout.block_size if is_default else None,
        )

    def max_request_bytes(self, config: ResolvedConfig) -> int | None:
        return config.request_memory_bytes

    def encodes_ahead(self, config: EngineConfig) -> bool:
        """Not where operations have the other cores already, and not where there is one."""
        if config.encode_ahead != "auto":
            return config.encode_ahead == "on"
        return torch.get_num_threads() == 1 and allowed_cpus() > 1

    def reserve_kv(self, config: EngineConfig, request: KVRequest) -> KVBacking:
        capacity_bytes = request.cache_bytes or self.device.requested_bytes(config)
        if request.max_num_blocks is not None and request.cache_bytes is None:
            useful_blocks = max(request.max_num_blocks, request.min_num_blocks)
            capacity_bytes = min(capacity_bytes, useful_blocks * request.block_bytes)
        return AnonymousMapping(max(capacity_bytes, MIN_BLOCKS * request.block_bytes))

    def minimal_kv(self, config: EngineConfig, request: KVRequest) -> KVBacking:
        # Pages that nobody touches cost nothing: it has the addresses of the largest, so that block numbers count.
        return self.reserve_kv(config, request)

    def allocate_kv(self, num_bytes: int) -> KVBacking:
        return AnonymousMapping(num_bytes)

    def graph_backends(self, config: EngineConfig, *, counted: Sequence[Tensor]) -> tuple[GraphBackend, GraphBackend]:
        backend = EmulatedBackend(counted=counted)
        return backend, backend

    def readings(self) -> Readings:
        return CpuReadings(self.device, baseline_bytes=self._baseline_bytes)


def hardware_for(config: EngineConfig) -> Callable[[EngineConfig], Hardware]:
    """Which hardware `device` names: `auto` is a GPU where torch sees one."""
    if config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available()):
        from runtime.cuda_hardware import CudaHardware

        return CudaHardware.open
    return CpuHardware
