import asyncio

from prometheus_client.parser import text_string_to_metric_families

from server.lifecycle import Lifecycle
from server.metric_aliases import VLLM_NAMES
from server.metrics import Metrics
from tests.fake_engine import FakeEngineClient

LABELS = {"model_name": "m", "engine": "0"}
# Asked by the endpoint pickers, autoscalers and dashboards that were made for vLLM.
QUERIED = {
    "vllm:num_requests_waiting",
    "vllm:num_requests_running",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "vllm:cache_config_info",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:request_time_per_output_token_seconds_bucket",
    "vllm:time_per_output_token_seconds_bucket",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_inference_time_seconds_sum",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_params_max_tokens_bucket",
    "vllm:request_success_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:mm_cache_queries_total",
    "vllm:mm_cache_hits_total",
    "vllm:num_preemptions_total",
}


def started() -> Metrics:
    engine = FakeEngineClient(num_running=3)
    asyncio.run(engine.start())
    return Metrics(engine, Lifecycle(), model_name="m", version="1", aliases="vllm")


def test_names_that_others_query_are_there_and_only_on_demand() -> None:
    exported = {
        sample.name
        for family in text_string_to_metric_families(started().exposition().decode())
        for sample in family.samples
    }
    assert exported >= QUERIED
    plain = Metrics(FakeEngineClient(), Lifecycle(), model_name="m", version="1")
    assert "vllm:" not in plain.exposition().decode()


def test_aliases_are_our_numbers() -> None:
    source = started()
    source.time_to_first_token.observe(0.25)
    source.prompt_tokens.inc(7)
    source.finished["length"].inc()
    read = source.registry.get_sample_value
    assert read("vllm:num_requests_running", LABELS) == 3
    assert read("vllm:kv_cache_usage_perc", LABELS) == 0.25 == read("vllm:gpu_cache_usage_perc", LABELS)
    assert read("vllm:prompt_tokens_total", LABELS) == 7
    assert read("vllm:request_success_total", {**LABELS, "finished_reason": "length"}) == 1
    assert read("vllm:time_to_first_token_seconds_sum", LABELS) == 0.25
    assert read("vllm:time_to_first_token_seconds_bucket", {**LABELS, "le": "0.3"}) == 1
    assert read("vllm:cache_config_info", {**LABELS, "block_size": "16", "num_gpu_blocks": "100"}) == 1


def test_every_alias_has_a_source() -> None:
    families = {family.name for family in started().registry.collect()}
    assert families >= VLLM_NAMES.keys()
    assert families >= {f"vllm:{name}" for names in VLLM_NAMES.values() for name in names}
