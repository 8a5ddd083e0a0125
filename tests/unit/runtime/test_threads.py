"""Threads: one core is left to the server, and nobody spins unless told to."""

import pytest

from runtime.threads import MAX_DEFAULT_THREADS, default_threads, keep_numpy_on_one_thread, wait_without_spinning


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (4, 3), (128, MAX_DEFAULT_THREADS)])
def test_one_core_is_left_to_the_server(cores: int, threads: int) -> None:
    assert default_threads(cores) == threads


def test_threads_sleep_unless_the_operator_decided() -> None:
    environment: dict[str, str] = {}
    wait_without_spinning(environment)
    assert environment == {"OMP_WAIT_POLICY": "PASSIVE"}
    for decided in ({"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "1000"}):
        environment = dict(decided)
        wait_without_spinning(environment)
        assert environment == decided


def test_numpy_stays_on_one_thread_unless_the_operator_decided() -> None:
    environment: dict[str, str] = {}
    keep_numpy_on_one_thread(environment)
    assert environment == {"OPENBLAS_NUM_THREADS": "1"}
    environment = {"OPENBLAS_NUM_THREADS": "4"}
    keep_numpy_on_one_thread(environment)
    assert environment == {"OPENBLAS_NUM_THREADS": "4"}
