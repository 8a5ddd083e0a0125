"""Writes the table of all metrics from the code that exports them: `python -m server.metrics_table > docs/metrics.md`.

Asks a registry without an engine, in which every metric and every bounded label value exists from the start.
"""

from collections.abc import AsyncGenerator, Sequence

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import Metric

from runtime.client import EngineState
from runtime.request import Request, RequestOutput
from runtime.stats import EngineInfo, EngineStats
from server.lifecycle import Lifecycle
from server.metric_aliases import VLLM_NAMES
from server.metrics import Metrics

# More values than these are told as a number.
MAX_VALUES = 15

HEAD = """# Metrics

Made from the code by `python -m server.metrics_table > docs/metrics.md`; a test compares.

`GET /metrics` is Prometheus' text format. Names are in base units (`_seconds`, `_bytes`, `_ratio`, `_tokens`),
counters end in `_total`; MiB (`_mib`), the word of the graphs' own accounting, is the one exception. Labels are
bounded, and every value listed here exists at 0 from the first scrape on, also before the engine is ready. A histogram
has `_bucket`, `_sum` and `_count`. The engine counts since its start and never resets; what it says of itself (sizes,
the memory ledger, graphs, start-up phases) is 0 or absent until it is ready. Beside these stand `process_*` and
`python_*` of the HTTP process.

| metric | type | labels | meaning |
|---|---|---|---|
"""

ALIASES = """
## Names of vLLM

`--metrics-aliases vllm` exports the same numbers also under the names that gateways, scalers and dashboards made for
vLLM query, with the labels `model_name` and `engine="0"`:

| name | is |
|---|---|
"""


class NoEngine:
    """An engine client before its start."""

    state: EngineState = "starting"
    info: EngineInfo | None = None
    stats = EngineStats()
    seconds_since_heartbeat = 0.0

    async def start(self) -> None:
        raise AssertionError("it is never started")

    async def generate(
        self, request: Request, pixels: Sequence[NDArray[np.uint8]]
    ) -> AsyncGenerator[RequestOutput, None]:
        raise AssertionError("it is never asked")
        yield

    async def wait_dead(self) -> str:
        raise AssertionError("it never lives")

    async def shutdown(self) -> None:
        """Nothing runs."""


def families() -> list[Metric]:
    """Our own metrics, by name, as they are before the engine has said anything."""
    metrics = Metrics(NoEngine(), Lifecycle(), model_name="", version="")
    own = [family for family in metrics.registry.collect() if family.name.startswith("fovea_")]
    return sorted(own, key=lambda family: family.name)


def table() -> str:
    """The document, the same for the same code."""
    rows = "".join(
        f"| `{exported_name(family)}` | {family.type} | {labels_of(family)} | {family.documentation} |\n"
        for family in families()
    )
    types = {family.name: exported_name(family) for family in families()}
    aliases = "".join(
        f"| `vllm:{alias}{'_total' if types[name].endswith('_total') else ''}` | `{types[name]}` |\n"
        for name, others in VLLM_NAMES.items()
        for alias in others
    )
    info = "| `vllm:cache_config_info` | labels `block_size` and `num_gpu_blocks`; always 1 |\n"
    return HEAD + rows + ALIASES + aliases + info


def exported_name(family: Metric) -> str:
    return f"{family.name}_total" if family.type == "counter" else family.name


def labels_of(family: Metric) -> str:
    """The labels with their values, as far as these are few and known without an engine."""
    # A family of which nothing is known yet has no samples; it knows its labels all the same.
    names = [name for name in getattr(family, "_labelnames", ()) if name] or sorted(
        {name for sample in family.samples for name in sample.labels} - {"le"}
    )
    told = []
    for name in names:
        values = dict.fromkeys(sample.labels[name] for sample in family.samples)
        known = not family.name.endswith("_build_info") and len(values) > 0
        if known and len(values) <= MAX_VALUES:
            told.append(f"`{name}`: {', '.join(values)}")
        else:
            told.append(f"`{name}`: {len(values)} values" if known else f"`{name}`")
    return "; ".join(told)


if __name__ == "__main__":
    print(table(), end="")
