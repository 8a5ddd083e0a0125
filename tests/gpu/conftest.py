"""GPU tests: marked, and skipped where torch sees no GPU."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from runtime.executor.arena import keep_arena
from tests.gpu.places import write_small_model


@pytest.fixture(autouse=True, scope="module")
def _no_limit_of_other_modules() -> None:
    _lift()


@pytest.fixture(autouse=True)
def _memory_comes_back() -> Iterator[None]:
    """What a test started is gone before the next one reads the device, and so is the limit of its engine."""
    yield
    # pytest keeps the last failure's frames, and with them an engine.
    sys.last_value = sys.last_traceback = None
    sys.last_exc = None  # type: ignore[attr-defined, unused-ignore]
    _lift()


def _lift() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0)
        keep_arena(0, torch.device("cuda", 0))


@pytest.fixture(scope="session")
def small_model_directory(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the published head widths, without weights."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    return write_small_model(tiny_checkpoint, tmp_path_factory.mktemp("small_model"))
