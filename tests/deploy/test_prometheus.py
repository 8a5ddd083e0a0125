"""A real Prometheus scrapes the real server under a small load: every query of ours has data."""

import contextlib
import math
import re
import subprocess
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from server.bench_startup import free_port
from tests.deploy import test_dashboard, test_rules
from tests.deploy.manifests import KUBERNETES, objects_of, only, read_yaml, tool
from tests.deploy.queries import bare, vector_selectors
from tests.http_server import chat, data_url, http_client, image_part, picture, wait_until
from tests.integration.test_http_engine import Fovea, serving

NUM_REQUESTS = 12
# What gateways and scalers made for vLLM ask.
VLLM_QUERIES = (
    "vllm:num_requests_waiting",
    "sum(vllm:num_requests_running)",
    'vllm:kv_cache_usage_perc{engine="0"}',
    "rate(vllm:generation_tokens_total[1m])",
    "histogram_quantile(0.95, sum by (le, model_name) (rate(vllm:time_to_first_token_seconds_bucket[1m])))",
    'sum by (finished_reason) (vllm:request_success_total{finished_reason!=""})',
    "vllm:cache_config_info",
)


class Prometheus:
    """A running Prometheus, asked over its HTTP interface."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http

    def ask(self, query: str) -> list[dict[str, Any]]:
        answer = self.http.get("/api/v1/query", params={"query": query})
        assert answer.status_code == 200, f"{query}: {answer.text}"
        result = answer.json()["data"]["result"]
        assert isinstance(result, list)
        return result

    def number(self, query: str) -> float:
        """The value of a query with one result; NaN if it has none."""
        result = self.ask(query)
        return float(result[0]["value"][1]) if result else math.nan

    def has_data(self, query: str) -> bool:
        return any(not math.isnan(float(series["value"][1])) for series in self.ask(query))


@contextlib.contextmanager
def prometheus_of(target: str, folder: Path) -> Generator[Prometheus, None, None]:
    """Prometheus with our rules, scraping `target` every half second, with the labels of a pod."""
    labels = {"namespace": "demo", "pod": "fovea-0"}
    config = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"},
        "rule_files": [str(path) for path in test_rules.FILES],
        "scrape_configs": [{"job_name": "fovea", "static_configs": [{"targets": [target], "labels": labels}]}],
    }
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    address = f"127.0.0.1:{free_port()}"
    program = tool("prometheus", comes_with="Debian's package prometheus")
    flags = (f"--config.file={path}", f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}")
    with open(folder / "log", "wb") as log, http_client(f"http://{address}") as http:
        process = subprocess.Popen([program, *flags], stdout=log, stderr=log)

        def is_ready() -> bool:
            assert process.poll() is None, (folder / "log").read_text(encoding="utf-8")
            try:
                return http.get("/-/ready").status_code == 200
            except httpx.TransportError:
                return False

        try:
            wait_until(is_ready)
            yield Prometheus(http)
        finally:
            process.terminate()
            process.wait(20)


def send_load(server: Fovea) -> None:
    """Pictures of three formats, one of them twice, text, streams, and what is refused."""

    def ask(number: int) -> int:
        kind = ("PNG", "JPEG", "WEBP")[number % 3]
        part = image_part(picture(56 + 28 * (number // 2 % 3), 56, "red", kind))
        content = [part, {"type": "text", "text": f"What is it? {number}"}] if number % 4 else "Hello, hello, hello!"
        body = chat(content, max_tokens=8, temperature=0, stream=number % 2 == 0, ignore_eos=True)
        return server.post(body).status_code

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(ask, range(NUM_REQUESTS))) == {200}
    broken = {"type": "image_url", "image_url": {"url": data_url(b"nothing")}}
    assert server.post(chat([broken])).status_code == 400


@pytest.fixture(scope="module")
def prometheus(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[Prometheus, None, None]:
    """With data: a first scrape came before the load, and one after it was evaluated by the rules."""
    with serving(tiny_checkpoint, "--metrics-aliases", "vllm") as server:
        target = str(server.client.base_url).removeprefix("http://").rstrip("/")
        with prometheus_of(target, tmp_path_factory.mktemp("prometheus")) as prometheus:
            wait_until(lambda: prometheus.number("fovea_ready") == 1)
            send_load(server)
            done = "fovea_time_to_first_token_seconds_count"
            wait_until(lambda: prometheus.number(done) == NUM_REQUESTS)
            wait_until(lambda: prometheus.number("job:fovea_requests:rate5m") > 0)
            wait_until(lambda: prometheus.number("job:fovea_ttft_over_objective:ratio_rate6h") >= 0)
            yield prometheus


def test_every_query_of_the_dashboards_has_data(prometheus: Prometheus) -> None:
    queries = [query for _, panel in test_dashboard.PANELS for query in test_dashboard.expressions(panel)]
    assert len(queries) > 80
    without = []
    for query in queries:
        query = query.replace("$__rate_interval", "1m").replace("$__range", "1m").replace("$instance", ".+")
        if not prometheus.has_data(query):
            without.append(query)
    assert without == []


def test_variables_of_the_dashboards_find_values(prometheus: Prometheus) -> None:
    answer = prometheus.http.get("/api/v1/series", params={"match[]": "fovea_build_info"}).json()["data"]
    (series,) = answer
    assert (series["model"], series["namespace"], series["pod"]) == ("tiny", "demo", "fovea-0")


def test_every_rule_is_evaluated_on_data(prometheus: Prometheus) -> None:
    groups = prometheus.http.get("/api/v1/rules").json()["data"]["groups"]
    evaluated = [rule for group in groups for rule in group["rules"]]
    assert len(evaluated) == len(test_rules.rules())
    assert {rule["name"]: rule.get("lastError") for rule in evaluated if rule["health"] != "ok"} == {}
    for rule in test_rules.RECORDS:
        assert prometheus.has_data(rule["record"]), rule["record"]
    for rule in test_rules.ALERTS:
        for selector in vector_selectors(rule["expr"]):
            assert prometheus.has_data(bare(selector)), f"{rule['alert']}: {bare(selector)}"


def test_a_server_that_is_well_raises_no_alert(prometheus: Prometheus) -> None:
    assert prometheus.ask('ALERTS{alertstate="firing"}') == []


def test_names_of_vllm_have_data(prometheus: Prometheus) -> None:
    for query in VLLM_QUERIES:
        assert prometheus.has_data(query), query


def test_every_query_of_the_scalers_has_data(prometheus: Prometheus) -> None:
    queries = [
        trigger["metadata"]["query"]
        for item in objects_of(KUBERNETES / "components" / "keda")
        if item["kind"] == "ScaledObject"
        for trigger in item["spec"]["triggers"]
        if trigger["type"] == "prometheus"
    ]
    # As prometheus-adapter fills it in for the metrics of a pod.
    adapter = read_yaml(KUBERNETES / "components" / "hpa" / "prometheus-adapter.values.yaml")
    (rule,) = adapter["rules"]["custom"]
    autoscaler = only(objects_of(KUBERNETES / "components" / "hpa"), "HorizontalPodAutoscaler")
    for metric in autoscaler["spec"]["metrics"]:
        query = rule["metricsQuery"].replace("<<.Series>>", metric["pods"]["metric"]["name"])
        query = query.replace("<<.LabelMatchers>>", 'namespace="demo",pod=~"fovea-0"').replace("<<.GroupBy>>", "pod")
        (series,) = prometheus.ask(query)
        assert series["metric"] == {"pod": "fovea-0"}, "the adapter asks to which pod a value belongs"
    assert len(queries) >= 2
    for query in queries:
        assert prometheus.has_data(re.sub(r'namespace="[^"]*"', 'namespace="demo"', query)), query
