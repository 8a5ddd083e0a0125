"""Exports what the engine says of itself, read at scrape time. The engine counts; nothing is counted here.

Every series exists from the first scrape on, also before the engine is ready, so that rates and alerts see the start.
"""

import platform
from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from runtime.client import EngineClient
from runtime.config import MIB
from runtime.stats import (
    BUCKET_STATES,
    GRAPH_BACKENDS,
    GRAPH_FAMILIES,
    MEMORY_COMPONENTS,
    MISS_REASONS,
    EngineInfo,
    EngineStats,
    GraphCounts,
)


class EngineCollector(Collector):
    """A Prometheus collector over an engine client. `model_name` is the served name."""

    def __init__(self, client: EngineClient, *, model_name: str, version: str, revision: str = "unknown") -> None:
        self._client = client
        self._model_name = model_name
        self._version = version
        self._revision = revision

    def collect(self) -> Iterable[Metric]:
        info, stats = self._client.info, self._client.stats
        yield gauge("engine_up", "1 while the engine is ready.", float(self._client.state == "ready"))
        yield gauge(
            "engine_heartbeat_age_seconds", "Time since the engine's last sign of life.",
            self._client.seconds_since_heartbeat,
        )  # fmt: skip
        yield self._build(info)
        yield from scheduler_metrics(stats, info)
        yield from encoder_metrics(stats, info)
        yield from graph_metrics(stats, info)
        yield from memory_metrics(stats, info)
        yield labelled_gauge(
            "startup_phase_seconds", "Duration of each phase of the start.", "phase",
            info.startup_phase_seconds if info else {},
        )  # fmt: skip

    def _build(self, info: EngineInfo | None) -> Metric:
        family = GaugeMetricFamily(
            "fovea_build_info", "What runs here; always 1.",
            labels=["version", "revision", "python", "model", "device", "dtype", "attention_backend",
                    "encoder_attention_backend"],
        )  # fmt: skip
        engine = (info.device, info.dtype, info.attention_backend, info.encoder_attention_backend) if info else [""] * 4
        family.add_metric([self._version, self._revision, platform.python_version(), self._model_name, *engine], 1)
        return family


def scheduler_metrics(stats: EngineStats, info: EngineInfo | None) -> Iterable[Metric]:
    """Queue, KV cache, prefix cache and steps."""
    yield gauge("num_requests_running", "Sequences that the engine runs.", stats.num_running)
    yield gauge("num_requests_waiting", "Sequences that wait for the engine.", stats.num_waiting)
    usage = stats.num_blocks_used / stats.num_blocks if stats.num_blocks else 0.0
    yield gauge("kv_cache_usage_ratio", "Part of the KV blocks in use.", usage)
    yield gauge("kv_cache_blocks", "KV blocks there are, without the null block.", stats.num_blocks)
    yield gauge("kv_cache_used_blocks", "KV blocks in use.", stats.num_blocks_used)
    block_size = info.memory.block_size if info else 0
    yield gauge("kv_cache_block_size_tokens", "Tokens in one KV block.", block_size)
    block_bytes = info.memory.block_bytes if info else 0
    yield gauge("kv_cache_block_size_bytes", "Bytes of one KV block.", block_bytes)
    yield gauge("max_model_len_tokens", "Most tokens of one sequence.", info.max_model_len if info else 0)
    yield counter("engine_steps_total", "Steps of the engine.", stats.num_steps)
    yield counter(
        "engine_failed_steps_total", "Steps that raised; their requests were run alone.", stats.num_failed_steps
    )
    yield counter("engine_step_seconds_total", "Time spent in steps.", stats.step_seconds)
    yield counter("engine_step_sequences_total", "Sequences in all steps; per step: batch.", stats.num_step_sequences)
    yield counter("engine_prompt_tokens_total", "Prompt tokens computed.", stats.num_prompt_tokens)
    yield counter("engine_generation_tokens_total", "Tokens sampled.", stats.num_generation_tokens)
    yield counter(
        "preemptions_total", "Sequences that lost their blocks and were computed anew.", stats.num_preemptions
    )
    yield counter("prefix_cache_query_tokens_total", "Prompt tokens looked up.", stats.prefix_cache_query_tokens)
    yield counter("prefix_cache_hit_tokens_total", "Prompt tokens found.", stats.prefix_cache_hit_tokens)


def encoder_metrics(stats: EngineStats, info: EngineInfo | None) -> Iterable[Metric]:
    """The vision encoder and the cache of its embeddings."""
    yield counter("encoder_cache_queries_total", "Pictures looked up.", stats.encoder_cache_queries)
    yield counter("encoder_cache_hits_total", "Pictures whose embeddings were there.", stats.encoder_cache_hits)
    yield gauge("encoder_cache_used_tokens", "Embedding rows in use.", stats.encoder_cache_tokens_used)
    yield gauge("encoder_cache_tokens", "Embedding rows there are.", info.encoder_cache_tokens if info else 0)
    yield counter("images_encoded_total", "Pictures encoded.", stats.num_images_encoded)
    yield counter("image_tokens_encoded_total", "Tokens of encoded pictures.", stats.num_image_tokens_encoded)
    yield counter("encode_seconds_total", "Time spent in the vision encoder.", stats.encode_seconds)
    yield counter("encode_batches_total", "Runs of the vision encoder.", stats.encode_batches)


def graph_metrics(stats: EngineStats, info: EngineInfo | None) -> Iterable[Metric]:
    """Hits, misses and bytes of both graph families. MiB is the one exception to base units."""
    hits = CounterMetricFamily("fovea_graph_hits_total", "Items served by a replay.", labels=["graph"])
    misses = CounterMetricFamily(
        "fovea_graph_misses_total", "Items that ran eager, and why.", labels=["graph", "reason"]
    )
    replays = CounterMetricFamily("fovea_graph_replays_total", "Replays of each bucket.", labels=["graph", "bucket"])
    padded = CounterMetricFamily("fovea_graph_padded_tokens_total", "Tokens of padding replayed.", labels=["graph"])
    reserved = mib_gauge("reserved", "What KV sizing subtracted.")
    measured = mib_gauge("measured", "What the graphs were measured to take, subtracted or not.")
    captured = mib_gauge("captured", "What the graphs in use took.")
    backend = GaugeMetricFamily("fovea_graph_backend_info", "Backend in use; 1.", labels=["graph", "backend"])
    buckets = GaugeMetricFamily("fovea_graph_buckets", "Buckets by what became of them.", labels=["graph", "state"])
    capture_seconds = GaugeMetricFamily(
        "fovea_graph_capture_seconds", "Time that a bucket's capture took at the start.", labels=["graph", "bucket"]
    )
    bucket_mib = GaugeMetricFamily(
        "fovea_graph_bucket_mib", "What a bucket's graph took, or retains after a failure.", labels=["graph", "bucket"]
    )
    families = {family.family: family for family in info.graphs} if info else {}
    for name in GRAPH_FAMILIES:
        counts = stats.graphs.get(name, GraphCounts())
        family = families.get(name)
        hits.add_metric([name], counts.hits)
        padded.add_metric([name], counts.padded_tokens)
        for reason in MISS_REASONS[name]:
            misses.add_metric([name, reason], counts.misses.get(reason, 0))
        names = [bucket.name for bucket in family.buckets] if family else []
        for bucket in dict.fromkeys([*names, *counts.replays]):
            replays.add_metric([name, bucket], counts.replays.get(bucket, 0))
        reserved.add_metric([name], family.reserved_bytes / MIB if family else 0)
        measured.add_metric([name], family.measured_bytes / MIB if family else 0)
        captured.add_metric([name], family.captured_bytes / MIB if family else 0)
        for one in family.buckets if family else ():
            capture_seconds.add_metric([name, one.name], one.capture_seconds)
            bucket_mib.add_metric([name, one.name], one.graph_bytes / MIB)
        for kind in GRAPH_BACKENDS:
            backend.add_metric([name, kind], float(family is not None and family.backend == kind))
        for state in BUCKET_STATES:
            buckets.add_metric([name, state], sum(b.state == state for b in family.buckets) if family else 0)
    yield from (
        hits,
        misses,
        replays,
        padded,
        reserved,
        measured,
        captured,
        backend,
        buckets,
        capture_seconds,
        bucket_mib,
    )


def memory_metrics(stats: EngineStats, info: EngineInfo | None) -> Iterable[Metric]:
    """The ledger: components sum to the requested bytes."""
    ledger = info.memory if info else None
    yield gauge("memory_requested_bytes", "Memory the plan may use.", ledger.requested_bytes if ledger else 0)
    components = ledger.components if ledger else {}
    yield labelled_gauge(
        "memory_bytes", "The plan's rows; they sum to fovea_memory_requested_bytes.", "component",
        {name: components.get(name, 0) for name in dict.fromkeys([*MEMORY_COMPONENTS, *components])},
    )  # fmt: skip
    yield gauge("memory_unplanned_bytes", "Memory in use beyond the plan; at most 0.", stats.unplanned_bytes)


def gauge(name: str, documentation: str, value: float) -> Metric:
    return GaugeMetricFamily(f"fovea_{name}", documentation, value=value)


def counter(name: str, documentation: str, value: float) -> Metric:
    return CounterMetricFamily(f"fovea_{name}", documentation, value=value)


def labelled_gauge(name: str, documentation: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"fovea_{name}", documentation, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def mib_gauge(kind: str, documentation: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"fovea_graph_{kind}_mib", documentation, labels=["graph"])
