"""Readings of a CPU's memory, on the real process and on made-up control groups."""

import gc
import mmap
import time
from pathlib import Path

import numpy as np
import pytest

from runtime.config import GIB, MIB, ConfigError, EngineConfig
from runtime.executor.device import CpuDevice, allowed_bytes, allowed_cpus


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def steady_bytes(device: CpuDevice) -> int:
    """What is in use once it stays: what tests before us left must not go away in between, and a kernel may take a
    moment to take freed pages back."""
    gc.collect()
    readings = [device.used_bytes()]
    while len(readings) < 4 or len(set(readings[-4:])) > 1:
        time.sleep(0.05)
        readings.append(device.used_bytes())
    return readings[-1]


def test_memory_in_use_grows_and_shrinks_with_the_process() -> None:
    device = CpuDevice()
    before = device.used_bytes()
    array = np.ones(64 * MIB, dtype=np.uint8)
    assert 60 * MIB <= device.used_bytes() - before <= 70 * MIB
    del array
    assert device.used_bytes() - before <= 10 * MIB


def test_peak_is_of_the_run_alone() -> None:
    device = CpuDevice()
    big = np.ones(256 * MIB, dtype=np.uint8)
    del big
    before = steady_bytes(device)
    calls = []

    def run() -> None:
        # Fresh pages: the heap may still hold what earlier tests freed, and would give that.
        with mmap.mmap(-1, 32 * MIB) as pages:
            for offset in range(0, 32 * MIB, mmap.PAGESIZE):
                pages[offset] = 1
        calls.append(1)

    peak = device.peak_bytes(run) - before
    assert len(calls) >= 2
    assert peak >= 31 * MIB
    if device._can_reset_peak:
        assert peak <= 48 * MIB


def test_peak_takes_the_largest_of_readings_that_do_not_agree(caplog: pytest.LogCaptureFixture) -> None:
    device = CpuDevice()
    before = steady_bytes(device)
    sizes = iter([100, 260, 120, 290])
    peak = device.peak_bytes(lambda: np.ones(next(sizes) * MIB, dtype=np.uint8).sum() and None) - before
    assert peak >= 288 * MIB
    if device._can_reset_peak:
        assert "do not agree" in caplog.text


def test_peak_that_cannot_be_reset_is_never_too_low(tmp_path: Path) -> None:
    device = CpuDevice(root=tmp_path)  # no /proc at all
    before = CpuDevice().used_bytes()
    assert device.peak_bytes(lambda: None) >= before
    assert device.used_bytes() >= before


def test_default_request_is_a_quarter_of_what_is_allowed_or_four_gib() -> None:
    device = CpuDevice()
    device.total_bytes = 8 * GIB
    assert device.requested_bytes(EngineConfig()) == 2 * GIB
    device.total_bytes = 64 * GIB
    assert device.requested_bytes(EngineConfig()) == 4 * GIB
    assert device.requested_bytes(EngineConfig(memory_bytes=GIB)) == GIB
    with pytest.raises(ConfigError, match="memory_bytes is 137438953472; the container or machine allows 68719476736"):
        device.requested_bytes(EngineConfig(memory_bytes=128 * GIB))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "1048576\n"}, 1048576),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/memory.max": "4096\n"}, 4096),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/memory.max": "4096\n",
                "sys/fs/cgroup/a/b/memory.max": "2048\n",
            },
            2048,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/pod\n",
                "sys/fs/cgroup/memory/pod/memory.limit_in_bytes": "8192\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            8192,
        ),
    ],
)
def test_the_smallest_control_group_limit_above_us_holds(
    tmp_path: Path, files: dict[str, str], expected: int | None
) -> None:
    for path, text in files.items():
        write(tmp_path, path, text)
    machine = allowed_bytes(tmp_path / "nothing")
    assert allowed_bytes(tmp_path) == (machine if expected is None else expected)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "20000 100000\n"}, 1),
        (
            {
                "proc/self/cgroup": "2:cpu,cpuacct:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            1,
        ),
    ],
)
def test_a_cpu_quota_limits_the_cores(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    for path, text in files.items():
        write(tmp_path, path, text)
    assert allowed_cpus(tmp_path) == expected


def test_no_quota_leaves_the_cores_of_the_affinity(tmp_path: Path) -> None:
    unlimited = allowed_cpus(tmp_path)
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    write(tmp_path, "sys/fs/cgroup/cpu.max", "max 100000\n")
    assert allowed_cpus(tmp_path) == unlimited >= 1


def test_hardware_threads_of_one_core_count_once(tmp_path: Path) -> None:
    for cpu in range(256):
        write(tmp_path, f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", "0-255\n")
    assert allowed_cpus(tmp_path) == 1
