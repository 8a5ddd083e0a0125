"""Fixtures that any test may use."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a random float32 checkpoint with a tied head, of 0.45 M parameters. Read-only: it is shared."""
    # transformers takes seconds to import: only tests that need a checkpoint should pay.
    from tests.checkpoint_factory import build_checkpoint

    return build_checkpoint(tmp_path_factory.mktemp("tiny_checkpoint"))
