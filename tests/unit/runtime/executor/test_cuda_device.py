"""Readings of a GPU that is made of numbers: ours and others', peaks, and tenants that come and go."""

import logging

import pytest

from runtime.config import GIB, MIB, ConfigError, EngineConfig
from runtime.executor.nvml import own_process
from tests.fake_cuda import FakeGpu, fake_device


def test_what_we_use_is_the_context_and_what_came_since() -> None:
    gpu = FakeGpu(others_bytes=GIB)
    device = fake_device(gpu)
    assert device.used_bytes() == gpu.context_bytes + gpu.resident_bytes
    assert device.baseline_bytes == GIB
    gpu.driver_bytes += 70 * MIB
    gpu.cached_bytes += 30 * MIB
    assert device.used_bytes() == gpu.used_bytes()
    assert device.settled_bytes() == gpu.used_bytes()
    assert gpu.cached_bytes == 0


@pytest.mark.parametrize("tells_others", [True, False])
@pytest.mark.parametrize("change", [2 * GIB, -GIB])
def test_a_tenant_that_grows_or_shrinks_is_a_warning_and_not_ours(
    caplog: pytest.LogCaptureFixture, tells_others: bool, change: int
) -> None:
    gpu = FakeGpu(others_bytes=GIB + GIB // 2, tells_others=tells_others)
    device = fake_device(gpu)
    before = device.used_bytes()
    gpu.others_bytes += change
    with caplog.at_level(logging.WARNING):
        assert device.used_bytes() == before
    assert f"another process {'took' if change > 0 else 'gave back'} memory" in caplog.text
    assert device.others_bytes == gpu.others_bytes
    gpu.driver_bytes += 50 * MIB
    assert device.used_bytes() == before + 50 * MIB


def test_a_quiet_tenant_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    gpu = FakeGpu(others_bytes=GIB)
    device = fake_device(gpu)
    gpu.others_bytes += 5 * MIB
    gpu.driver_bytes += 200 * MIB
    assert device.used_bytes() == gpu.used_bytes()
    assert not caplog.records


def test_the_peak_is_what_torch_reserved_at_most_beyond_what_stayed() -> None:
    gpu = FakeGpu(transient_bytes=300 * MIB)
    device = fake_device(gpu)
    calls = []
    peak = device.peak_bytes(lambda: calls.append(1))
    assert len(calls) == 2
    assert peak - device.settled_bytes() == 300 * MIB


def test_readings_at_rest_are_repeated_until_two_agree(caplog: pytest.LogCaptureFixture) -> None:
    gpu = FakeGpu()
    device = fake_device(gpu)
    steps = iter([40 * MIB, 30 * MIB, 0, 0, 0])

    def grow() -> None:
        gpu.driver_bytes += next(steps)

    gpu.on_settle = grow
    assert device.settled_bytes() == gpu.used_bytes()
    assert not caplog.records


def test_the_request_is_a_part_of_the_device_rounded_up() -> None:
    device = fake_device(FakeGpu(total_bytes=8 * GIB + 1))
    assert device.requested_bytes(EngineConfig(gpu_memory_utilization=0.5)) == 4 * GIB + 1


def test_more_than_was_free_before_us_is_refused_with_a_number_that_fits() -> None:
    device = fake_device(FakeGpu(others_bytes=4 * GIB))
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization is 0\.9, .*4,096\.0 MiB were in use.*to 0\.50"):
        device.requested_bytes(EngineConfig(gpu_memory_utilization=0.9))


def test_a_tenant_that_took_our_share_lowers_what_can_be_had(caplog: pytest.LogCaptureFixture) -> None:
    gpu = FakeGpu()
    device = fake_device(gpu)
    assert device.reachable_bytes(6 * GIB) == 6 * GIB
    gpu.others_bytes += 5 * GIB
    with caplog.at_level(logging.WARNING):
        assert device.reachable_bytes(6 * GIB) == 3 * GIB
    assert "makes do with the rest" in caplog.text


def test_our_process_is_found_by_its_id_or_as_the_one_that_appeared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getpid", lambda: 7)
    assert own_process({}, {7: 1, 8: 2}) == 7
    assert own_process({8: 2}, {8: 2, 9001: 1}) == 9001
    assert own_process({8: 2}, {8: 2, 9001: 1, 9002: 1}) is None
    assert own_process(None, {9001: 1}) is None
    assert own_process({}, None) is None
