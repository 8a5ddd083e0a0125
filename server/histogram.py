"""A histogram for the hot path: one bisection and two additions an observation, no lock. For one event loop only."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

# Seconds. From a token of a small model (1 ms) to a request that waits for minutes; dense below 300 ms.
FINE_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
LATENCY_SECONDS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0),
)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
BYTES = tuple(float(1 << power) for power in range(10, 26))
PIXELS = tuple(float(1 << power) for power in range(10, 27, 2))


class Histogram(Collector):
    """Counts observations into buckets with inclusive upper bounds, as Prometheus defines them."""

    def __init__(
        self, name: str, documentation: str, bounds: Sequence[float], registry: CollectorRegistry | None
    ) -> None:
        """`registry` is None for one that is a part of a `LabelledHistogram`."""
        assert list(bounds) == sorted(set(bounds)), bounds
        self._name = name
        self._documentation = documentation
        self._bounds = tuple(float(bound) for bound in bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        if registry is not None:
            registry.register(self)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def observe_many(self, values: Iterable[float]) -> None:
        counts, bounds = self._counts, self._bounds
        total = 0.0
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            total += value
        self._sum += total

    @property
    def count(self) -> int:
        return sum(self._counts)

    def collect(self) -> Iterable[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._documentation)
        self.add_to(family, [])
        yield family

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Adds these counts to `family` under the label values `labels`."""
        cumulative = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*map(repr, self._bounds), "+Inf"), self._counts, strict=True):
            cumulative += count
            buckets.append((bound, float(cumulative)))
        family.add_metric(labels, buckets, sum_value=self._sum)


class LabelledHistogram(Collector):
    """A histogram for each of the known values of one label. `children` are bound once and looked up by value."""

    def __init__(
        self, name: str, documentation: str, bounds: Sequence[float], label: str, values: Iterable[str],
        registry: CollectorRegistry,
    ) -> None:  # fmt: skip
        self.children = {value: Histogram(name, documentation, bounds, None) for value in values}
        self._name = name
        self._documentation = documentation
        self._label = label
        registry.register(self)

    def collect(self) -> Iterable[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=[self._label])
        for value, child in self.children.items():
            child.add_to(family, [value])
        yield family
