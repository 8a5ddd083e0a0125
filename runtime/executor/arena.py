"""Memory for eager forwards under the limit of torch's allocator: one piece, and a second try. Knows no model.

From `ready` on the allocator may hold no more than it holds then. What it keeps for eager forwards, it keeps as one
segment, of which it cuts blocks of every size. Left to itself it would take a segment for each large block and one of
20 MiB for the middle ones, so that a smaller forward could want more segments than the largest did.

The allocator is the process's, and so is what is said of it here.
"""

import gc
import logging
from collections.abc import Callable
from typing import TypeVar

import torch

log = logging.getLogger(__name__)

T = TypeVar("T")

_arena: tuple[int, torch.device] | None = None


def keep_arena(num_bytes: int, device: torch.device) -> None:
    """Lets torch's allocator keep one free segment of so many bytes from now on; 0: as it likes.

    Raises:
        torch.OutOfMemoryError: there is no such memory.
    """
    global _arena
    _arena = (num_bytes, device) if num_bytes else None
    _make_arena()


def retry_on_empty_cache(run: Callable[[], T]) -> T:
    """`run()`, and once more where torch's allocator had no memory for it: what earlier forwards left in its cache can
    be cut so that a later one does not fit.

    Raises:
        torch.OutOfMemoryError: there is no memory on an empty cache either.
    """
    try:
        return run()
    except torch.OutOfMemoryError as error:
        log.warning("an eager forward is run again on an empty cache", extra={"error": str(error)[:200]})
    # Out of the block above, whose error holds the failed forward's tensors.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        try:
            _make_arena()
        except torch.OutOfMemoryError:
            log.warning("the arena cannot be had again: something else holds a part of its memory")
    return run()


def _make_arena() -> None:
    if _arena is not None:
        num_bytes, device = _arena
        # Freed at once: the cache keeps its segment.
        torch.empty(num_bytes, dtype=torch.uint8, device=device)
