"""A second try for eager forwards that found no memory under the allocator's limit. Knows no model."""

import gc
import logging
from collections.abc import Callable
from typing import TypeVar

import torch

log = logging.getLogger(__name__)

T = TypeVar("T")


def retry_on_empty_cache(run: Callable[[], T]) -> T:
    """`run()`, and once more where torch's allocator had no memory for it.

    At `ready` the allocator is limited to what the worst forward took on an empty cache. What earlier forwards of other
    sizes left in the cache can be cut so that a later one does not fit beside it; on an empty cache it fits again.

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
    return run()
