"""Sets the C library's allocator for a process that handles large buffers for short times. No HTTP, no model."""

import ctypes

# glibc's number of the option (malloc.h), and its own first value of it.
M_MMAP_THRESHOLD = -3
LARGE_BYTES = 128 * 1024


def give_back_large_buffers() -> bool:
    """Lets every buffer of `LARGE_BYTES` or more return to the system when it is freed.

    glibc raises that limit up to 32 MiB as such buffers are freed, and then carves bodies and pixels from its heap,
    where small objects that outlive them keep the pages (docs/decisions.md). Returns whether the C library knows the
    option.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(M_MMAP_THRESHOLD, LARGE_BYTES) == 1
