import subprocess
import sys

import pytest

# Buffers with small objects between them, which keep the heap from shrinking when the buffers go.
CODE = """
from ctypes import CDLL, c_size_t, c_void_p, memset
from pathlib import Path
from server.allocator import give_back_large_buffers

def resident_kib():
    return next(int(l.split()[1]) for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmRSS"))

libc = CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = c_void_p, [c_size_t], [c_void_p]
if {fixed}:
    assert give_back_large_buffers()
# What raises glibc's own limit.
libc.free(libc.malloc(16 << 20))
before = resident_kib()
kept, large = [], []
for _ in range(200):
    large.append(memset(libc.malloc(200_000), 1, 200_000))
    kept.append(libc.malloc(2000))
for pointer in large:
    libc.free(pointer)
print(resident_kib() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_large_buffers_return_to_the_system_whatever_lives_between_them() -> None:
    def growth_kib(fixed: bool) -> int:
        code = CODE.replace("{fixed}", str(fixed))
        return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)

    assert growth_kib(True) < 4000
    # What it is good for: without it the pages stay.
    assert growth_kib(False) > 20_000
