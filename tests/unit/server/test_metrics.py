import random

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from runtime.stats import GRAPH_FAMILIES, MEMORY_COMPONENTS, MISS_REASONS
from server.errors import REJECT_REASONS
from server.histogram import FINE_SECONDS, Histogram, LabelledHistogram
from server.lifecycle import ABORT_REASONS, PHASES, Lifecycle
from server.metrics import FINISH_REASONS, HANDLERS, Metrics
from tests.fake_engine import FakeEngineClient


def metrics(engine: FakeEngineClient | None = None) -> Metrics:
    return Metrics(engine or FakeEngineClient(), Lifecycle(), model_name="m", version="1", watchdog_seconds=30)


def value(metrics: Metrics, name: str, /, **labels: str) -> float:
    found = metrics.registry.get_sample_value(name, labels)
    assert found is not None, f"{name}{labels}"
    return found


def test_histogram_equals_the_librarys() -> None:
    ours_registry, theirs_registry = prometheus_client.CollectorRegistry(), prometheus_client.CollectorRegistry()
    ours = Histogram("h", "x", FINE_SECONDS, ours_registry)
    theirs = prometheus_client.Histogram("h", "x", buckets=FINE_SECONDS, registry=theirs_registry)
    generator = random.Random(0)
    values = [*FINE_SECONDS, 0.0, 99.0, *(generator.expovariate(5) for _ in range(500))]
    for one in values[:100]:
        ours.observe(one)
    ours.observe_many(values[100:])
    for one in values:
        theirs.observe(one)
    assert ours.count == len(values)
    for family in theirs_registry.collect():
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                assert ours_registry.get_sample_value(sample.name, sample.labels) == pytest.approx(sample.value)


def test_labelled_histogram_keeps_its_values_apart() -> None:
    registry = prometheus_client.CollectorRegistry()
    histogram = LabelledHistogram("h", "x", (1.0, 2.0), "route", ("a", "b"), registry)
    histogram.children["a"].observe(1.5)
    counts = {
        (route, bound): registry.get_sample_value("h_bucket", {"route": route, "le": bound})
        for route in ("a", "b")
        for bound in ("1.0", "2.0", "+Inf")
    }
    assert [counts["a", bound] for bound in ("1.0", "2.0", "+Inf")] == [0, 1, 1]
    assert [counts["b", bound] for bound in ("1.0", "2.0", "+Inf")] == [0, 0, 0]
    assert registry.get_sample_value("h_sum", {"route": "a"}) == 1.5


def test_exactly_one_phase_is_told() -> None:
    lifecycle = Lifecycle()
    source = Metrics(FakeEngineClient(), lifecycle, model_name="m", version="1")
    for expected in ("starting", "ready", "dead"):
        if expected == "ready":
            lifecycle.become_ready()
        elif expected == "dead":
            lifecycle.die("killed")
        told = {phase for phase in PHASES if value(source, "fovea_service_phase", phase=phase)}
        assert told == {expected}


def test_every_label_value_is_there_from_the_start() -> None:
    source = metrics()
    for graph in GRAPH_FAMILIES:
        assert value(source, "fovea_graph_hits_total", graph=graph) in (0, 3)
        for name in ("reserved_mib", "measured_mib", "captured_mib", "padded_tokens_total"):
            value(source, f"fovea_graph_{name}", graph=graph)
        for reason in MISS_REASONS[graph]:
            value(source, "fovea_graph_misses_total", graph=graph, reason=reason)
    for component in MEMORY_COMPONENTS:
        assert value(source, "fovea_memory_bytes", component=component) == 0
    for reason in REJECT_REASONS:
        assert value(source, "fovea_requests_rejected_total", reason=reason) == 0
    for reason in ABORT_REASONS:
        assert value(source, "fovea_requests_aborted_total", reason=reason) == 0
    for reason in FINISH_REASONS:
        assert value(source, "fovea_request_success_total", finish_reason=reason) == 0
    for handler, (method, statuses) in HANDLERS.items():
        for status in statuses:
            assert value(source, "fovea_http_requests_total", handler=handler, method=method, status=str(status)) == 0
    assert value(source, "fovea_engine_up") == 0
    assert value(source, "fovea_memory_unplanned_bytes") == 0


async def started() -> FakeEngineClient:
    engine = FakeEngineClient()
    await engine.start()
    return engine


def test_engines_numbers_are_exported() -> None:
    import asyncio

    source = metrics(asyncio.run(started()))
    components = [value(source, "fovea_memory_bytes", component=name) for name in MEMORY_COMPONENTS]
    assert sum(components) == value(source, "fovea_memory_requested_bytes") > 0
    assert value(source, "fovea_graph_reserved_mib", graph="encoder") == 2
    assert value(source, "fovea_graph_measured_mib", graph="encoder") == 2
    assert value(source, "fovea_graph_captured_mib", graph="encoder") == 1
    assert value(source, "fovea_graph_hits_total", graph="encoder") == 3
    assert value(source, "fovea_graph_misses_total", graph="encoder", reason="too_large") == 1
    assert value(source, "fovea_graph_replays_total", graph="encoder", bucket="64") == 2
    assert value(source, "fovea_graph_backend_info", graph="encoder", backend="emulated") == 1
    assert value(source, "fovea_graph_backend_info", graph="decoder", backend="none") == 1
    assert value(source, "fovea_graph_buckets", graph="encoder", state="captured") == 1
    assert value(source, "fovea_kv_cache_usage_ratio") == 0.25
    assert value(source, "fovea_startup_phase_seconds", phase="load_weights") == 0.5
    assert value(source, "fovea_engine_up") == 1


def test_exposition_parses_and_names_follow_the_rules() -> None:
    source = metrics()
    families = list(text_string_to_metric_families(source.exposition().decode()))
    own = [family for family in families if family.name.startswith("fovea_")]
    assert len(own) > 40
    for family in own:
        assert ":" not in family.name
        assert not family.name.endswith("_created")
        assert family.documentation
        if family.type == "counter":
            assert all(sample.name.endswith("_total") for sample in family.samples)


def test_registries_do_not_meet() -> None:
    first, second = metrics(), metrics()
    first.prompt_tokens.inc(5)
    assert value(second, "fovea_prompt_tokens_total") == 0


def test_labels_stay_bounded() -> None:
    source = metrics()
    source.count_http("other", 418, 0.1)
    source.count_image("ftp", "TIFF", "rejected")
    assert value(source, "fovea_http_requests_total", handler="other", method="other", status="418") == 1
    assert value(source, "fovea_images_total", source="data", format="unknown", outcome="rejected") == 1
