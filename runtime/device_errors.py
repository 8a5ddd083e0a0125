"""Tells errors that leave the device unusable from all others. Knows CUDA's codes and texts; imports no torch.

After some errors every later call of the process's CUDA context fails too: an illegal address, a failed launch, a
device-side assert, memory that cannot be corrected. Nothing heals that but a new process. Any other error (out of
memory, an invalidated capture, a wrong shape) may be that of one request.
"""

# Codes that stay (CUDA Runtime API, enum cudaError): the documentation says of each that the process must be ended.
STICKY_CODES = frozenset({214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721})

# What cudaGetErrorString says of them, and the driver's names: libraries pass these on in errors of their own.
STICKY_TEXTS = (
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
    "an illegal memory access was encountered",
    "the launch timed out and was terminated",
    "context is destroyed",
    "device-side assert triggered",
    "hardware stack error",
    "an illegal instruction was encountered",
    "CUDA error: misaligned address",
    "operation not supported on global/shared address space",
    "invalid program counter",
    "unspecified launch failure",
    "CUDA_ERROR_ECC_UNCORRECTABLE",
    "CUDA_ERROR_NVLINK_UNCORRECTABLE",
    "CUDA_ERROR_ILLEGAL_ADDRESS",
    "CUDA_ERROR_LAUNCH_TIMEOUT",
    "CUDA_ERROR_CONTEXT_IS_DESTROYED",
    "CUDA_ERROR_ASSERT",
    "CUDA_ERROR_HARDWARE_STACK_ERROR",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION",
    "CUDA_ERROR_MISALIGNED_ADDRESS",
    "CUDA_ERROR_INVALID_ADDRESS_SPACE",
    "CUDA_ERROR_INVALID_PC",
    "CUDA_ERROR_LAUNCH_FAILED",
)


class EngineFatalError(Exception):
    """The device or the engine is beyond use: no request can be served any more, and the process must end."""


def is_device_lost(error: BaseException) -> bool:
    """Whether an error, or one that it came from, leaves the device unusable.

    torch raises `AcceleratorError` with the code where it knows it; FlashInfer, Triton and cuBLAS raise errors of their
    own with CUDA's text. The errors that Python raises for wrong arguments are never the device's: their text may be
    anybody's.
    """
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if not isinstance(current, (ValueError, TypeError, LookupError, OSError)):
            if getattr(current, "error_code", None) in STICKY_CODES:
                return True
            text = str(current)
            if any(sticky in text for sticky in STICKY_TEXTS):
                return True
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return False


def raise_if_device_lost(error: BaseException) -> None:
    """To be called wherever an error would be taken for that of a request, an image or a bucket.

    Raises:
        EngineFatalError: the error, or one that it came from, leaves the device unusable.
    """
    if isinstance(error, EngineFatalError):
        raise error
    if is_device_lost(error):
        first_line = next(iter(str(error).splitlines()), "")
        raise EngineFatalError(
            f"the device cannot be used any more, the process must end: {type(error).__name__}: {first_line}"
        ) from error
