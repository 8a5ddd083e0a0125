"""Mean and percentiles of times, as every measurement of load reports them. Knows no engine and no server."""

from collections.abc import Sequence

PERCENTILES = (50, 90, 99)


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """The mean and the nearest-rank percentiles of times in seconds, in milliseconds: `mean`, `p50`, `p90`, `p99`.
    Empty without values."""
    if not seconds:
        return {}
    ordered = sorted(seconds)
    found = {f"p{p}": ordered[max(0, -(-len(ordered) * p // 100) - 1)] for p in PERCENTILES}
    return {name: round(value * 1000, 3) for name, value in {"mean": sum(seconds) / len(seconds), **found}.items()}
