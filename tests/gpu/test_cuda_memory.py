"""The CUDA memory code on a real GPU: readings, virtual memory under graphs, captures that fail, other tenants."""

from collections.abc import Iterator

import pytest
import torch

from benchmarks.gpu_checks import CHECKS, open_device
from runtime.executor.cuda_device import CudaDevice

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device() -> Iterator[CudaDevice]:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    yield open_device()
    torch.cuda.empty_cache()


# Tests before made the context already: its size is the smoke run's to see.
@pytest.mark.parametrize("name", [name for name in CHECKS if name != "context"])
def test_check(device: CudaDevice, name: str) -> None:
    CHECKS[name](device)
