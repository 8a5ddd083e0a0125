"""The decoder's Triton kernels, interpreted: equal to the layers that they stand in for."""

import os
import subprocess
import sys

import pytest


def test_kernels_agree_with_the_layers() -> None:
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-m", "tests.unit.runtime.model.triton_layers_interpreted"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout.endswith("agreed\n"), run.stderr
