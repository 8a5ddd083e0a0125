"""Percentiles are values that were measured, in milliseconds."""

from runtime.percentiles import percentiles


def test_percentiles_are_nearest_rank() -> None:
    hundred = [0.001 * value for value in range(100, 0, -1)]
    assert percentiles(hundred) == {"mean": 50.5, "p50": 50.0, "p90": 90.0, "p99": 99.0}
    # Of three, the second is the middle one, and the last is all that lies above.
    assert percentiles([0.003, 0.001, 0.002]) == {"mean": 2.0, "p50": 2.0, "p90": 3.0, "p99": 3.0}


def test_one_value_is_every_percentile_and_none_has_no_percentiles() -> None:
    assert percentiles([0.0012344]) == dict.fromkeys(("mean", "p50", "p90", "p99"), 1.234)
    assert percentiles([]) == {}
