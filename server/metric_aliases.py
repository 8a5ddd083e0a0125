"""Exports our numbers also under the names of vLLM, which gateways, scalers and dashboards of others query.

Knows names and labels only: every value is one of our own metrics, read at scrape time. What we do not count is not
exported. The colons are vLLM's; our own names have none.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from runtime.client import EngineClient

MetricsAliases = Literal["none", "vllm"]

# Our family -> the names of vLLM for it, the newest first. Families of counters have no `_total` here.
VLLM_NAMES: dict[str, tuple[str, ...]] = {
    "fovea_num_requests_running": ("num_requests_running",),
    "fovea_num_requests_waiting": ("num_requests_waiting",),
    "fovea_kv_cache_usage_ratio": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    "fovea_preemptions": ("num_preemptions",),
    "fovea_prefix_cache_query_tokens": ("prefix_cache_queries",),
    "fovea_prefix_cache_hit_tokens": ("prefix_cache_hits",),
    "fovea_encoder_cache_queries": ("mm_cache_queries",),
    "fovea_encoder_cache_hits": ("mm_cache_hits",),
    "fovea_prompt_tokens": ("prompt_tokens",),
    "fovea_generation_tokens": ("generation_tokens",),
    "fovea_request_success": ("request_success",),
    "fovea_time_to_first_token_seconds": ("time_to_first_token_seconds",),
    "fovea_inter_token_latency_seconds": ("inter_token_latency_seconds",),
    "fovea_request_time_per_output_token_seconds": (
        "request_time_per_output_token_seconds",
        "time_per_output_token_seconds",
    ),
    "fovea_e2e_request_latency_seconds": ("e2e_request_latency_seconds",),
    "fovea_request_queue_time_seconds": ("request_queue_time_seconds",),
    "fovea_request_prefill_time_seconds": ("request_prefill_time_seconds",),
    "fovea_request_decode_time_seconds": ("request_decode_time_seconds",),
    "fovea_request_inference_time_seconds": ("request_inference_time_seconds",),
    "fovea_request_prompt_tokens": ("request_prompt_tokens",),
    "fovea_request_generation_tokens": ("request_generation_tokens",),
    "fovea_request_params_max_tokens": ("request_params_max_tokens",),
}
VLLM_LABELS = {"finish_reason": "finished_reason"}


class AliasCollector(Collector):
    """A collector of renamed copies. `sources`: the collectors of our own metrics; they are asked once more a scrape.

    One engine a process: the label `engine` is always "0".
    """

    def __init__(self, sources: Sequence[Collector], client: EngineClient, *, model_name: str) -> None:
        self._sources = sources
        self._client = client
        self._labels = {"model_name": model_name, "engine": "0"}

    def collect(self) -> Iterable[Metric]:
        for source in self._sources:
            for family in source.collect():
                for name in VLLM_NAMES.get(family.name, ()):
                    yield self._renamed(family, f"vllm:{name}")
        yield self._cache_config()

    def _renamed(self, family: Metric, name: str) -> Metric:
        alias = Metric(name, family.documentation, family.type)
        for sample in family.samples:
            labels = {VLLM_LABELS.get(label, label): value for label, value in sample.labels.items()}
            alias.add_sample(name + sample.name.removeprefix(family.name), {**self._labels, **labels}, sample.value)
        return alias

    def _cache_config(self) -> Metric:
        """Size of the KV cache as labels, as the endpoint pickers read it."""
        info = self._client.info
        sizes = (info.memory.block_size, info.memory.num_blocks) if info else (0, 0)
        family = GaugeMetricFamily(
            "vllm:cache_config_info", "Size of the KV cache; always 1.",
            labels=[*self._labels, "block_size", "num_gpu_blocks"],
        )  # fmt: skip
        family.add_metric([*self._labels.values(), *map(str, sizes)], 1)
        return family
