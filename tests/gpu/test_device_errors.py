"""What torch really raises: errors that end the engine, and those that do not. Each in a process that may be spoilt."""

import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.gpu

SCRIPT = """
import sys, torch
from runtime.device_errors import is_device_lost
cells = torch.zeros(4, device="cuda")
try:
    if sys.argv[1] == "assert":
        cells[torch.tensor([1 << 20], device="cuda")].sum().item()
    elif sys.argv[1] == "oom":
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    else:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            graph.capture_begin()
            cells.sum().item()
except Exception as error:
    print(type(error).__name__, is_device_lost(error), str(error).splitlines()[0], flush=True)
"""


@pytest.mark.parametrize(
    ("kind", "expected"), [("assert", "AcceleratorError True"), ("oom", "OutOfMemoryError False"),
                           ("invalidated", "AcceleratorError False")]
)  # fmt: skip
def test_errors_are_told_apart_as_torch_raises_them(kind: str, expected: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    ended = subprocess.run([sys.executable, "-c", SCRIPT, kind], capture_output=True, text=True, timeout=120)
    assert ended.stdout.startswith(expected), (ended.stdout, ended.stderr[-2000:])
