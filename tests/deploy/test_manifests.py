"""The Kubernetes manifests: valid, safe by default, and in agreement with the application's routes and settings."""

import os
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from server.settings import Settings, load_settings
from tests.deploy.manifests import (
    BASE,
    COMPONENTS,
    CUSTOM_GROUPS,
    DEPLOY,
    KUBERNETES,
    OVERLAYS,
    Object,
    answers,
    env_file,
    objects_of,
    only,
    pod_of,
    read_yaml,
    rendered,
)

# The oldest release with `preStop.sleep`, and the newest whose schema is at hand.
VERSIONS = ("1.30", kubernetes_validate.latest_version())
ENGINE_STOP_SECONDS = 10

rendering = pytest.mark.parametrize("directory", [BASE, *OVERLAYS], ids=lambda path: path.name)


def settings_of(objects: Sequence[Object]) -> Settings:
    """The application's settings under the ConfigMap's variables. Unknown names and bad values are errors."""
    return load_settings({}, environ=only(objects, "ConfigMap")["data"])


def validate(item: Object) -> None:
    if not item["apiVersion"].startswith(CUSTOM_GROUPS):
        for version in VERSIONS:
            kubernetes_validate.validate(item, version, strict=True)


def test_files_are_valid_objects() -> None:
    files = [item for directory in (BASE, *COMPONENTS) for item in objects_of(directory)]
    kinds = {item["kind"] for item in files}
    assert kinds >= {"Deployment", "Service", "ServiceAccount", "PersistentVolumeClaim", "PodDisruptionBudget"}
    for item in files:
        validate(item)


def test_an_invalid_object_is_noticed() -> None:
    deployment = only(objects_of(BASE), "Deployment")
    deployment["spec"]["replica"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(deployment)


@rendering
def test_rendered_objects_are_valid(directory: Path) -> None:
    for item in rendered(directory):
        validate(item)


@rendering
def test_probes_ask_for_what_the_application_serves(directory: Path) -> None:
    container = pod_of(rendered(directory))["containers"][0]
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/health",
        "readiness": "/health/ready",
        "liveness": "/health/live",
    }
    assert {probe["port"] for probe in probes.values()} == {"http"}
    paths = [probe["path"] for probe in probes.values()]
    assert {path: answer.status_code for path, answer in answers(*paths).items()} == dict.fromkeys(paths, 200)
    loading = answers(*paths, is_ready=False)
    assert (loading["/health"].status_code, loading["/health/ready"].status_code) == (503, 503)


@rendering
def test_ports_agree_with_the_settings(directory: Path) -> None:
    objects = rendered(directory)
    settings = settings_of(objects)
    assert settings.host == "0.0.0.0"
    container = pod_of(objects)["containers"][0]
    assert container["ports"] == [{"name": "http", "containerPort": settings.port}]
    assert only(objects, "Service")["spec"]["ports"][0]["targetPort"] == "http"
    annotations = only(objects, "Deployment")["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(settings.port)
    path = annotations["prometheus.io/path"]
    assert answers(path)[path].status_code == 200


@rendering
def test_grace_period_exceeds_pre_stop_and_drain(directory: Path) -> None:
    pod = pod_of(rendered(directory))
    sleep = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain = settings_of(rendered(directory)).drain_timeout_seconds
    assert pod["terminationGracePeriodSeconds"] >= sleep + drain + ENGINE_STOP_SECONDS
    # The endpoint is gone before SIGTERM: the pod fails readiness only by then.
    readiness = pod["containers"][0]["readinessProbe"]
    assert sleep >= readiness["periodSeconds"]


@rendering
def test_liveness_is_slower_than_the_watchdog(directory: Path) -> None:
    probe = pod_of(rendered(directory))["containers"][0]["livenessProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] > settings_of(rendered(directory)).watchdog_seconds


@rendering
def test_settings_fit_the_container(directory: Path) -> None:
    """Every FOVEA_* is a known setting (else `load_settings` raises), and the planned memory fits."""
    objects = rendered(directory)
    settings = settings_of(objects)
    data = only(objects, "ConfigMap")["data"]
    assert data
    assert all(name.startswith("FOVEA_") for name in data)
    limit = pod_of(objects)["containers"][0]["resources"]["limits"]["memory"]
    assert limit.endswith("Gi")
    assert (settings.memory_bytes or 0) < int(limit.removesuffix("Gi")) << 30


def test_base_settings_are_the_configmap_of_the_base() -> None:
    assert only(rendered(BASE), "ConfigMap")["data"] == env_file(BASE / "fovea.env")


@rendering
def test_configuration_is_mounted_by_its_hashed_name(directory: Path) -> None:
    """So that a changed setting rolls the pods."""
    objects = rendered(directory)
    name = only(objects, "ConfigMap")["metadata"]["name"]
    assert name != "fovea"
    assert {"configMapRef": {"name": name}} in pod_of(objects)["containers"][0]["envFrom"]


@rendering
def test_pods_have_no_privileges(directory: Path) -> None:
    pod = pod_of(rendered(directory))
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["fsGroup"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in chain(pod["containers"], pod.get("initContainers", ())):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert ":" in container["image"]
        assert not container["image"].endswith(":latest")


@rendering
def test_every_mount_has_a_volume_and_writes_have_a_place(directory: Path) -> None:
    objects = rendered(directory)
    pod = pod_of(objects)
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in pod["containers"][0]["volumeMounts"]}
    assert {"/tmp", "/cache"} <= set(mounts)
    assert "emptyDir" in mounts["/tmp"]
    claims = {item["metadata"]["name"] for item in objects if item["kind"] == "PersistentVolumeClaim"}
    used = {
        volume["persistentVolumeClaim"]["claimName"] for volume in volumes.values() if "persistentVolumeClaim" in volume
    }
    assert used == claims


@rendering
def test_selectors_match_the_pods(directory: Path) -> None:
    objects = rendered(directory)
    labels = only(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert {"app.kubernetes.io/name", "app.kubernetes.io/component", "app.kubernetes.io/part-of"} <= set(labels)
    selectors = [
        only(objects, "Deployment")["spec"]["selector"]["matchLabels"],
        only(objects, "Service")["spec"]["selector"],
        only(objects, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
    ]
    for selector in selectors:
        assert selector
        assert selector.items() <= labels.items()
    account = only(objects, "ServiceAccount")
    assert account["automountServiceAccountToken"] is False
    assert pod_of(objects)["serviceAccountName"] == account["metadata"]["name"]


def test_gpu_overlay_asks_for_one_whole_gpu() -> None:
    objects = rendered(KUBERNETES / "overlays" / "gpu")
    pod = pod_of(objects)
    resources = pod["containers"][0]["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == resources["requests"]["nvidia.com/gpu"] == "1"
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    shared = next(mount for mount in pod["containers"][0]["volumeMounts"] if mount["mountPath"] == "/dev/shm")
    assert volumes[shared["name"]]["emptyDir"]["medium"] == "Memory"
    # One GPU: a second pod could never start beside the first.
    assert only(objects, "Deployment")["spec"]["strategy"] == {"type": "Recreate"}
    assert settings_of(objects).device == "cuda"


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_components_apply_to_every_overlay(overlay: Path, tmp_path: Path) -> None:
    components = [*COMPONENTS, DEPLOY / "dashboards"]
    kustomization = {
        "resources": [os.path.relpath(overlay, tmp_path)],
        "components": [os.path.relpath(component, tmp_path) for component in components],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization), encoding="utf-8")
    objects = rendered(tmp_path)
    for item in objects:
        validate(item)
    monitor = only(objects, "PodMonitor")
    deployment = only(objects, "Deployment")
    template = deployment["spec"]["template"]
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert set(monitor["spec"]) == {"selector", "podMetricsEndpoints"}
    assert monitor["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    endpoint = monitor["spec"]["podMetricsEndpoints"][0]
    assert endpoint["port"] in {port["name"] for port in template["spec"]["containers"][0]["ports"]}
    assert answers(endpoint["path"])[endpoint["path"]].status_code == 200
    assert not template["metadata"].get("annotations"), "scraped twice"
    assert template["spec"]["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is False
    dashboards = [item for item in objects if item["metadata"]["name"] == "fovea-dashboards"]
    assert dashboards[0]["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_every_manifest_belongs_to_a_kustomization() -> None:
    for kustomization in KUBERNETES.rglob("kustomization.yaml"):
        content = read_yaml(kustomization)
        named = {str(entry) for entry in content.get("resources", ())}
        named |= {patch["path"] for patch in content.get("patches", ()) if "path" in patch}
        beside = {path.name for path in kustomization.parent.glob("*.yaml")} - {"kustomization.yaml"}
        assert beside <= named, kustomization
