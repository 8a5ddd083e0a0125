"""Which errors end the engine: those after which CUDA refuses every later call, however they are wrapped."""

import pytest
import torch

from runtime.device_errors import EngineFatalError, is_device_lost, raise_if_device_lost
from runtime.executor.graph_backend import CaptureError
from runtime.executor.vmm import VirtualMemoryError


def with_code(code: int) -> torch.AcceleratorError:
    error = torch.AcceleratorError("CUDA error: in words that nobody knows")
    error.error_code = code  # type: ignore[attr-defined]
    return error


def wrapped(error: BaseException) -> BaseException:
    try:
        try:
            raise error
        except type(error):
            raise RuntimeError("the layer failed")  # noqa: B904  the first error is its context
    except RuntimeError as outer:
        return outer


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nSearch for `cudaError...'"),
        torch.AcceleratorError("CUDA error: device-side assert triggered"),
        torch.AcceleratorError("CUDA error: unspecified launch failure"),
        torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
        torch.AcceleratorError("CUDA error: misaligned address"),
        with_code(715),
        RuntimeError("BatchPrefillWithPagedKVCache failed with error an illegal memory access was encountered"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        VirtualMemoryError("cuMemUnmap failed: CUDA_ERROR_ILLEGAL_ADDRESS"),
        CaptureError("AcceleratorError: CUDA error: an illegal instruction was encountered"),
        wrapped(torch.AcceleratorError("CUDA error: the launch timed out and was terminated")),
    ],
)
def test_errors_that_stay_are_the_end(error: BaseException) -> None:
    assert is_device_lost(error)
    with pytest.raises(EngineFatalError, match="the process must end"):
        raise_if_device_lost(error)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        torch.AcceleratorError("CUDA error: out of memory"),
        torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing"),
        torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture"),
        torch.AcceleratorError("CUDA error: invalid argument"),
        with_code(2),
        with_code(901),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        VirtualMemoryError("cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY"),
        # What a client wrote is quoted in errors about it.
        ValueError("prompt says 'an illegal memory access was encountered'"),
        KeyError("device-side assert triggered"),
    ],
)
def test_errors_of_one_request_are_not(error: BaseException) -> None:
    assert not is_device_lost(error)
    raise_if_device_lost(error)


def test_what_is_fatal_already_stays_as_it_is() -> None:
    fatal = EngineFatalError("the device is gone")
    with pytest.raises(EngineFatalError) as caught:
        raise_if_device_lost(fatal)
    assert caught.value is fatal
