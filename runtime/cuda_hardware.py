"""An engine on a GPU: CUDA's readings, virtual memory or an ordinary tensor behind the KV cache, CUDA graphs.

Knows which implementation stands behind each seam of `Hardware`; the implementations know the driver and torch.
"""

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from runtime.checkpoint import locate_model, read_model_config
from runtime.config import MIB, ConfigError, EngineConfig, ResolvedConfig
from runtime.executor.cuda_device import CudaDevice, open_cuda_device
from runtime.executor.cuda_graphs import CudaCapture, CudaGraphBackend, TorchCapture
from runtime.executor.graph_backend import EmulatedBackend, GraphBackend
from runtime.executor.kv_cache import KVBacking, KVLayout, TensorBacking
from runtime.executor.memory import KVRequest
from runtime.executor.vmm import CudaVirtualMemory, MappedSpan, VirtualMemoryDriver, VirtualMemoryError
from runtime.readings import CudaReadings, Readings

log = logging.getLogger(__name__)

# torch's allocator gives tensors beyond 10 MiB segments of their own size, in steps of this.
TORCH_GRANULARITY_BYTES = 2 * MIB
MIN_TORCH_KV_BYTES = 16 * MIB


class CudaHardware:
    """One GPU. `open` takes the first that is visible.

    Args:
        virtual_memory: makes the driver's virtual memory when `kv_backing` is `vmm`.
        capture: what graphs are captured with; `None` when they are emulated.
    """

    max_shared_encoder_tokens: int | None = None

    def __init__(
        self,
        config: EngineConfig,
        device: CudaDevice,
        torch_device: torch.device,
        *,
        dtype: torch.dtype,
        virtual_memory: Callable[[], VirtualMemoryDriver],
        capture: CudaCapture | None,
    ) -> None:
        self.device = device
        self.torch_device = torch_device
        self.dtype = dtype
        self._capture = capture
        self._is_mapped = config.kv_backing == "vmm" and not config.mm_encoder_only
        self._virtual_memory = _virtual_memory(virtual_memory) if self._is_mapped else None

    def encodes_ahead(self, config: EngineConfig) -> bool:
        """A GPU computes one after the other what several threads launch."""
        if config.encode_ahead == "on":
            raise ConfigError("encode_ahead is on; it is for a CPU: leave it at auto")
        return False

    @classmethod
    def open(cls, config: EngineConfig) -> "CudaHardware":
        """Makes this process's context on the GPU.

        Raises:
            ConfigError: there is no GPU, or it has no virtual memory and `kv_backing` is `vmm`.
        """
        torch_device = torch.device("cuda", 0)
        device = open_cuda_device(torch_device)
        name = config.dtype
        if name == "auto":
            name = read_model_config(locate_model(config.model, config.revision)).dtype
        capture = None
        if config.graph_backend == "auto" and not config.enforce_eager:
            capture = TorchCapture(torch_device, device.resting_bytes)
        return cls(
            config,
            device,
            torch_device,
            dtype=getattr(torch, name),
            virtual_memory=lambda: CudaVirtualMemory(torch_device),
            capture=capture,
        )

    def kv_request(self, config: ResolvedConfig, layout: KVLayout) -> KVRequest:
        granularity = self._virtual_memory.granularity_bytes if self._virtual_memory else TORCH_GRANULARITY_BYTES
        return KVRequest(
            block_bytes=layout.block_bytes,
            block_size=layout.block_size,
            max_model_len=config.max_model_len,
            cache_bytes=config.engine.kv_cache_memory_bytes,
            granularity_bytes=granularity,
        )

    def max_request_bytes(self, config: ResolvedConfig) -> int | None:
        return None  # pixels and prompts wait in the host's memory

    def reserve_kv(self, config: EngineConfig, request: KVRequest) -> KVBacking:
        assert self._virtual_memory is not None, "kv_backing is torch"
        span = MappedSpan(self._virtual_memory, max(self.device.total_bytes, request.cache_bytes or 0))
        self.device.mapped_bytes = span.resident_bytes
        return span

    def minimal_kv(self, config: EngineConfig, request: KVRequest) -> KVBacking:
        return self.allocate_kv(max(MIN_TORCH_KV_BYTES, 2 * request.block_bytes))

    def allocate_kv(self, num_bytes: int) -> KVBacking:
        """Rounded up to what torch's allocator takes for it."""
        size = -(-num_bytes // TORCH_GRANULARITY_BYTES) * TORCH_GRANULARITY_BYTES
        return TensorBacking(size, self.torch_device)

    def graph_backends(self, config: EngineConfig, *, counted: Sequence[Tensor]) -> tuple[GraphBackend, GraphBackend]:
        if self._capture is None:
            emulated = EmulatedBackend(counted=counted)
            return emulated, emulated
        is_measuring = config.reserve_graph_memory != "skip"
        encoder, decoder = (CudaGraphBackend(self._capture, is_measuring=is_measuring) for _ in range(2))
        return encoder, decoder

    def readings(self) -> Readings:
        return CudaReadings(self.device, is_kv_in_torch=not self._is_mapped)


def _virtual_memory(make: Callable[[], VirtualMemoryDriver]) -> VirtualMemoryDriver:
    try:
        return make()
    except (VirtualMemoryError, ImportError) as error:
        raise ConfigError(f"kv_backing is 'vmm', but this GPU has no virtual memory ({error}): use 'torch'") from error
