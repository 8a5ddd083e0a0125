"""Objects of other projects' kinds. Where a published package carries a kind's schema, it validates; the others are
checked field by field, against the projects' published references.

PodMonitor, PrometheusRule: `cloudcoil-models-prometheus-operator`. ScaledObject: `cloudcoil-models-keda`. No package
has InferencePool (inference.networking.k8s.io/v1), HTTPRoute (gateway.networking.k8s.io/v1) or the endpoint picker's
configuration.
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

from server.metrics_table import exported_name, families
from server.settings import load_settings
from tests.deploy.manifests import KUBERNETES, Object, config_map, objects_of, only, rendered

COMPONENTS = KUBERNETES / "components"
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
        "components": [os.path.relpath(COMPONENTS / "inference-gateway", tmp_path)],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization), encoding="utf-8")
    return rendered(tmp_path)


def test_inference_pool_has_the_fields_of_its_reference(gateway: tuple[Object, ...]) -> None:
    pool = only(gateway, "InferencePool")
    assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
    assert set(pool["spec"]) == {"selector", "targetPorts", "endpointPickerRef"}
    labels = only(gateway, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert set(pool["spec"]["selector"]) == {"matchLabels"}
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    settings = load_settings({}, environ=config_map(gateway)["data"])
    assert pool["spec"]["targetPorts"] == [{"number": settings.port}]
    picker = pool["spec"]["endpointPickerRef"]
    assert set(picker) == {"name", "port", "failureMode"}
    assert set(picker["port"]) == {"number"}
    assert picker["failureMode"] in ("FailOpen", "FailClose")


def test_route_leads_to_the_pool_and_outlasts_the_server(gateway: tuple[Object, ...]) -> None:
    route = only(gateway, "HTTPRoute")
    assert route["apiVersion"] == "gateway.networking.k8s.io/v1"
    assert set(route["spec"]) == {"parentRefs", "rules"}
    (rule,) = route["spec"]["rules"]
    assert set(rule) == {"matches", "backendRefs", "timeouts"}
    pool = only(gateway, "InferencePool")
    group = pool["apiVersion"].partition("/")[0]
    assert rule["backendRefs"] == [{"group": group, "kind": "InferencePool", "name": pool["metadata"]["name"]}]
    (match,) = rule["matches"]
    assert match["path"] == {"type": "PathPrefix", "value": "/v1"}
    settings = load_settings({}, environ=config_map(gateway)["data"])
    assert int(rule["timeouts"]["request"].removesuffix("s")) > settings.request_timeout_seconds


def test_endpoint_picker_knows_our_metrics_by_the_pods_labels(gateway: tuple[Object, ...]) -> None:
    found = [item for item in gateway if item["metadata"]["name"] == "fovea-endpoint-picker"]
    config = yaml.safe_load(only(found, "ConfigMap")["data"]["endpoint-picker.yaml"])
    assert config["kind"] == "EndpointPickerConfig"
    plugins = {plugin["type"]: plugin.get("parameters", {}) for plugin in config["plugins"]}
    (engine,) = plugins["core-metrics-extractor"]["engineConfigs"]
    labels = only(gateway, "Deployment")["spec"]["template"]["metadata"]["labels"]
    for name in ("llm-d.ai/engine-type", "inference.networking.k8s.io/engine-type"):
        assert labels[name] == engine["name"]
    specs = {engine[name] for name in ("queuedRequestsSpec", "runningRequestsSpec", "kvUsageSpec")}
    assert specs <= metrics()
    used = {entry["pluginRef"] for profile in config["schedulingProfiles"] for entry in profile["plugins"]}
    assert used <= plugins.keys()
