"""Objects of other projects' kinds. Where a published package carries a kind's schema, it validates; the others are
checked field by field, against the projects' published references.

PodMonitor, PrometheusRule: `cloudcoil-models-prometheus-operator`. ScaledObject: `cloudcoil-models-keda`. HTTPRoute: a
package of npm, in `tests/clients/test_published_types.py`. No package has the endpoint picker's configuration.
"""

import copy
import importlib
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from server.metric_aliases import VLLM_NAMES
from server.metrics_table import exported_name, families
from server.settings import load_settings
from tests.deploy.manifests import KUBERNETES, ROOT, Object, config_map, named, objects_of, only, rendered

COMPONENTS = KUBERNETES / "components"
GATEWAY = COMPONENTS / "inference-gateway"
SCHEMAS = {
    "PodMonitor": "cloudcoil.models.prometheus_operator.v1",
    "PrometheusRule": "cloudcoil.models.prometheus_operator.v1",
    "ScaledObject": "cloudcoil.models.keda.v1alpha1",
}
OBJECTS = [item for name in ("prometheus-operator", "keda") for item in objects_of(COMPONENTS / name)]


def schema(kind: str) -> Any:
    """The kind's model; its package is a development dependency."""
    try:
        return getattr(importlib.import_module(SCHEMAS[kind]), kind)
    except ModuleNotFoundError as error:
        reason = f"{error.name} is not installed: make install brings it"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)


def validate(item: Object) -> None:
    """
    Raises:
        ValidationError: a field is missing or has a wrong type.
        AssertionError: a field is unknown to the schema, which would drop it.
    """
    known = schema(item["kind"]).model_validate(copy.deepcopy(item))
    assert_kept(item, known.model_dump(mode="json", by_alias=True, exclude_unset=True), item["kind"])


def assert_kept(given: Any, kept: Any, at: str) -> None:
    """Everything of `given` is in `kept`."""
    if isinstance(given, dict):
        assert isinstance(kept, dict), at
        for key, value in given.items():
            assert key in kept, f"{at}.{key} is unknown"
            assert_kept(value, kept[key], f"{at}.{key}")
    elif isinstance(given, list):
        assert len(given) == len(kept), at
        for index, (one, other) in enumerate(zip(given, kept, strict=True)):
            assert_kept(one, other, f"{at}[{index}]")


@pytest.mark.parametrize("item", OBJECTS, ids=lambda item: item["kind"])
def test_objects_fit_their_published_schemas(item: Object) -> None:
    assert item["kind"] in SCHEMAS
    validate(item)


def test_unknown_fields_and_wrong_types_are_noticed() -> None:
    monitor = only(OBJECTS, "PodMonitor")
    monitor = copy.deepcopy(monitor)
    monitor["spec"]["podMetricsEndpoints"][0]["intervall"] = "15s"
    with pytest.raises(AssertionError, match="intervall is unknown"):
        validate(monitor)
    scaled = copy.deepcopy(only(OBJECTS, "ScaledObject"))
    scaled["spec"]["maxReplicaCount"] = "many"
    with pytest.raises(ValidationError):
        validate(scaled)


def metrics() -> set[str]:
    return {exported_name(family) for family in families()}


def test_scalers_ask_for_queue_and_kv_usage() -> None:
    wanted = {"fovea_num_requests_waiting", "fovea_kv_cache_usage_ratio"}
    assert wanted <= metrics()
    scaled = only(OBJECTS, "ScaledObject")["spec"]
    asked = {name for trigger in scaled["triggers"] for name in re.findall(r"fovea_\w+", trigger["metadata"]["query"])}
    assert asked == wanted
    # KEDA's own defaults would take a value for an average.
    assert all(trigger["metricType"] == "AverageValue" for trigger in scaled["triggers"])
    assert all(trigger["metadata"]["threshold"] for trigger in scaled["triggers"])
    autoscaler = only(objects_of(COMPONENTS / "hpa"), "HorizontalPodAutoscaler")["spec"]
    assert {metric["pods"]["metric"]["name"] for metric in autoscaler["metrics"]} == wanted
    bounds = ("minReplicas", "maxReplicas")
    assert [autoscaler[name] for name in bounds] == [scaled["minReplicaCount"], scaled["maxReplicaCount"]]
    adapter = yaml.safe_load((COMPONENTS / "hpa" / "prometheus-adapter.values.yaml").read_text(encoding="utf-8"))
    (rule,) = adapter["rules"]["custom"]
    (names,) = re.findall(r'__name__=~"([^"]+)"', rule["seriesQuery"])
    assert set(names.split("|")) == wanted
    assert set(rule["resources"]["overrides"]) == {"namespace", "pod"}


@pytest.fixture
def gateway(tmp_path: Path) -> tuple[Object, ...]:
    kustomization = {
        "resources": [os.path.relpath(KUBERNETES / "overlays" / "cpu-demo", tmp_path)],
        "components": [os.path.relpath(GATEWAY, tmp_path)],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization), encoding="utf-8")
    return rendered(tmp_path)


def picker_values() -> Object:
    values = yaml.safe_load((GATEWAY / "endpoint-picker.values.yaml").read_text(encoding="utf-8"))
    assert set(values) == {"router"}
    router = values["router"]
    assert isinstance(router, dict)
    return router


def picker_config() -> Object:
    """The picker's own configuration, as its chart mounts it."""
    epp = picker_values()["epp"]
    (name,) = epp["pluginsCustomConfig"]
    assert name == epp["pluginsConfigFile"]
    config = yaml.safe_load(epp["pluginsCustomConfig"][name])
    assert isinstance(config, dict)
    return config


def test_route_leads_to_the_pool_and_outlasts_the_server(gateway: tuple[Object, ...]) -> None:
    route = only(gateway, "HTTPRoute")
    (rule,) = route["spec"]["rules"]
    # The chart calls its pool by the release's name.
    assert rule["backendRefs"] == [
        {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": release_name()}
    ]
    (match,) = rule["matches"]
    assert match["path"] == {"type": "PathPrefix", "value": "/v1"}
    settings = load_settings({}, environ=config_map(gateway)["data"])
    assert int(rule["timeouts"]["request"].removesuffix("s")) > settings.request_timeout_seconds


def release_name() -> str:
    """The name by which the values file and the runbook say that the picker's chart is installed."""
    commands = [
        re.findall(r"helm upgrade --install (\S+) (\S+) --version (\S+)", path.read_text(encoding="utf-8"))
        for path in (GATEWAY / "endpoint-picker.values.yaml", ROOT / "docs" / "operations.md")
    ]
    assert commands[0] == commands[1]
    ((name, chart, version),) = commands[0]
    assert chart.endswith("/llm-d-router-gateway")
    assert version == picker_values()["epp"]["image"]["tag"]
    return str(name)


def test_pool_selects_our_pods_on_their_port(gateway: tuple[Object, ...]) -> None:
    servers = picker_values()["modelServers"]
    labels = only(gateway, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert servers["matchLabels"]
    assert servers["matchLabels"].items() <= labels.items()
    settings = load_settings({}, environ=config_map(gateway)["data"])
    assert servers["targetPorts"] == [{"number": settings.port}]
    assert picker_values()["inferencePool"] == {"create": True, "failureMode": "FailOpen"}


def test_picker_may_scrape_the_pods(gateway: tuple[Object, ...]) -> None:
    policy = named(gateway, "NetworkPolicy", "fovea-endpoint-picker")["spec"]
    labels = only(gateway, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    (ingress,) = policy["ingress"]
    # As the chart labels its pods.
    assert ingress["from"] == [{"podSelector": {"matchLabels": {"llm-d-router-gateway": f"{release_name()}-epp"}}}]
    assert ingress["ports"] == [{"port": "http", "protocol": "TCP"}]


def test_pickers_configuration_has_the_fields_of_its_reference() -> None:
    """llm-d.ai/v1alpha1, which the picker reads strictly: an unknown field is an error there."""
    config = picker_config()
    assert (config["apiVersion"], config["kind"]) == ("llm-d.ai/v1alpha1", "EndpointPickerConfig")
    assert set(config) == {"apiVersion", "kind", "plugins", "schedulingProfiles", "dataLayer"}
    for plugin in config["plugins"]:
        assert {"type"} <= set(plugin) <= {"type", "name", "parameters"}
    names = {plugin.get("name", plugin["type"]) for plugin in config["plugins"]}
    assert len(names) == len(config["plugins"])
    used = set()
    for profile in config["schedulingProfiles"]:
        assert set(profile) == {"name", "plugins"}
        for entry in profile["plugins"]:
            assert {"pluginRef"} <= set(entry) <= {"pluginRef", "weight"}
            used.add(entry["pluginRef"])
    (source,) = config["dataLayer"]["sources"]
    assert set(source) == {"pluginRef", "extractors"}
    used |= {source["pluginRef"], *(extractor["pluginRef"] for extractor in source["extractors"])}
    assert used == names, "each plugin is used, and each one used is there"


def test_picker_knows_our_metrics_by_the_pods_labels(gateway: tuple[Object, ...]) -> None:
    plugins = {plugin["type"]: plugin.get("parameters", {}) for plugin in picker_config()["plugins"]}
    parameters = plugins["core-metrics-extractor"]
    assert set(parameters) == {"defaultEngine", "engineConfigs"}
    (engine,) = parameters["engineConfigs"]
    assert parameters["defaultEngine"] == engine["name"]
    labels = only(gateway, "Deployment")["spec"]["template"]["metadata"]["labels"]
    for name in ("llm-d.ai/engine-type", "inference.networking.k8s.io/engine-type"):
        assert labels[name] == engine["name"]
    specs = {name: value for name, value in engine.items() if name != "name"}
    assert set(specs) == {
        *("queuedRequestsSpec", "runningRequestsSpec", "kvUsageSpec"),
        *("cacheBlockSizeSpec", "cacheNumBlocksSpec"),
    }
    gauges = {family.name for family in families() if family.type == "gauge"}
    assert set(specs.values()) <= gauges


def test_runbook_has_the_pickers_mapping() -> None:
    """The same names as in the configuration, and in the third column those of vLLM for them."""
    (engine,) = next(
        plugin["parameters"]["engineConfigs"]
        for plugin in picker_config()["plugins"]
        if plugin["type"] == "core-metrics-extractor"
    )
    table = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8").partition("the picker's word")[2]
    rows = [line for line in table.partition("\n\n")[0].splitlines() if line.startswith("|") and "fovea_" in line]
    told = [name for row in rows for name in re.findall(r"`(fovea_\w+)`", row)]
    assert told == [value for name, value in engine.items() if name != "name"]
    for row in rows:
        own = re.findall(r"`(fovea_\w+)`", row)
        aliases = re.findall(r"`vllm:(\w+)`", row)
        assert aliases == ["cache_config_info"] or aliases == [VLLM_NAMES[name][0] for name in own], row
