"""The Kubernetes manifests: valid, safe by default, and in agreement with the application's routes and settings."""

import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import kubernetes_validate
import pytest

from runtime.process_client import SHUTDOWN_SECONDS
from runtime.processing.image_processor import PEAK_BYTES_PER_PIXEL
from server.lifecycle import FAREWELL_SECONDS
from server.serve import GRACEFUL_SHUTDOWN_SECONDS
from server.settings import Settings, load_settings
from tests.deploy.manifests import (
    BASE,
    COMPONENTS,
    CUSTOM_GROUPS,
    DEPLOY,
    KUBERNETES,
    OVERLAYS,
    ROOT,
    Object,
    answers,
    config_map,
    env_file,
    named,
    objects_of,
    only,
    pod_of,
    read_yaml,
    rendered,
)

# The oldest release with `preStop.sleep`, and the newest whose schema is at hand.
VERSIONS = ("1.30", kubernetes_validate.latest_version())
# Of the model in the overlays for GPUs: 3.75 billion parameters in bfloat16.
WEIGHTS_BYTES = 7_500_000_000
# Resident at rest, with room to spare: measured at 110 and 40 MiB.
SERVER_BYTES, WORKER_BYTES = 256 << 20, 64 << 20
# After a drain that took all its time: the last answers' errors, connections that are left, the engine's process.
STOP_SECONDS = FAREWELL_SECONDS + GRACEFUL_SHUTDOWN_SECONDS + SHUTDOWN_SECONDS

rendering = pytest.mark.parametrize("directory", [BASE, *OVERLAYS], ids=lambda path: path.name)


def settings_of(objects: Sequence[Object]) -> Settings:
    """The application's settings under the ConfigMap's variables. Unknown names and bad values are errors."""
    return load_settings({}, environ=config_map(objects)["data"])


def validate(item: Object) -> None:
    if not item["apiVersion"].startswith(CUSTOM_GROUPS):
        for version in VERSIONS:
            kubernetes_validate.validate(item, version, strict=True)


def test_files_are_valid_objects() -> None:
    files = [item for directory in (BASE, *COMPONENTS) for item in objects_of(directory)]
    kinds = {item["kind"] for item in files}
    assert kinds >= {
        *("Deployment", "Service", "ServiceAccount", "PersistentVolumeClaim", "PodDisruptionBudget"),
        *("NetworkPolicy", "Job", "HorizontalPodAutoscaler", "PodMonitor", "PrometheusRule", "ScaledObject"),
    }
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
    annotations = only(objects, "Deployment")["spec"]["template"]["metadata"].get("annotations")
    # The Prometheus operator has a PodMonitor instead.
    assert bool(annotations) != any(item["kind"] == "PodMonitor" for item in objects)
    if annotations:
        assert annotations["prometheus.io/port"] == str(settings.port)
        path = annotations["prometheus.io/path"]
        assert answers(path)[path].status_code == 200


@rendering
def test_grace_period_exceeds_pre_stop_and_drain(directory: Path) -> None:
    pod = pod_of(rendered(directory))
    sleep = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain = settings_of(rendered(directory)).drain_timeout_seconds
    assert pod["terminationGracePeriodSeconds"] > sleep + drain + STOP_SECONDS
    # A gateway that asks by itself whether the pod is ready has heard that it is not before connections are refused.
    readiness = pod["containers"][0]["readinessProbe"]
    assert sleep >= readiness["periodSeconds"] * readiness["failureThreshold"]


@rendering
def test_start_may_take_long_and_only_the_start(directory: Path) -> None:
    """Until the startup probe has passed, the others are not asked: it alone covers loading, compiling and capture."""
    container = pod_of(rendered(directory))["containers"][0]
    for name in ("startup", "readiness", "liveness"):
        probe = container[f"{name}Probe"]
        assert "initialDelaySeconds" not in probe
        assert 0 < probe["timeoutSeconds"] <= probe["periodSeconds"]
    longest = container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"]
    assert longest >= 300
    # Kubernetes' own default; past it a rollout counts as failed.
    assert only(rendered(directory), "Deployment")["spec"].get("progressDeadlineSeconds", 600) > longest


@rendering
def test_keys_come_from_a_secret_that_may_be_absent(directory: Path) -> None:
    objects = rendered(directory)
    server = pod_of(objects)["containers"][0]
    secrets = [source["secretRef"] for source in server["envFrom"] if "secretRef" in source]
    assert secrets == [{"name": "fovea-keys", "optional": True}]
    # What the documents say that it holds; no key stands in what is checked in.
    text = (DEPLOY / "README.md").read_text(encoding="utf-8")
    (variable,) = re.findall(r"create secret generic fovea-keys --from-literal=(\w+)=", text)
    settings = load_settings({}, environ={**config_map(objects)["data"], variable: "first-key,second-key"})
    assert settings.all_api_keys() == ("first-key", "second-key")
    assert not any(item["kind"] == "Secret" for item in objects)
    assert not any("KEY" in name or "TOKEN" in name for name in config_map(objects)["data"])


@rendering
def test_liveness_is_slower_than_the_watchdog(directory: Path) -> None:
    probe = pod_of(rendered(directory))["containers"][0]["livenessProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] > settings_of(rendered(directory)).watchdog_seconds


@rendering
def test_settings_fit_the_container(directory: Path) -> None:
    """Every FOVEA_* is a known setting (else `load_settings` raises), and the planned memory fits."""
    objects = rendered(directory)
    settings = settings_of(objects)
    data = config_map(objects)["data"]
    assert data
    assert all(name.startswith("FOVEA_") for name in data)
    text = pod_of(objects)["containers"][0]["resources"]["limits"]["memory"]
    assert text.endswith("Gi")
    limit = int(text.removesuffix("Gi")) << 30
    # On a GPU, the weights once while they load; on a CPU what is planned, by itself a quarter of the limit.
    engine = WEIGHTS_BYTES if settings.device == "cuda" else settings.memory_bytes or limit // 4
    assert engine + host_bytes_beside_the_engine(settings) < limit


def host_bytes_beside_the_engine(settings: Settings) -> int:
    """The most that the server and its picture workers take, as the runbook adds it up."""
    worker = WORKER_BYTES + settings.max_image_pixels * PEAK_BYTES_PER_PIXEL
    return SERVER_BYTES + settings.max_in_flight_bytes + (settings.image_workers or 2) * worker


def test_runbook_adds_up_the_container_as_this_does() -> None:
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    settings = load_settings({}, environ={})
    for fact in (
        f"{SERVER_BYTES >> 20} MiB for the server",
        f"`--max-in-flight-bytes` ({settings.max_in_flight_bytes >> 20} MiB)",
        f"{WORKER_BYTES >> 20} MiB for each picture worker",
        f"`--max-image-pixels` x {PEAK_BYTES_PER_PIXEL} bytes "
        f"({settings.max_image_pixels * PEAK_BYTES_PER_PIXEL / (1 << 20):.0f} MiB)",
    ):
        assert fact in re.sub(r"\s+", " ", text), fact


def test_base_settings_are_the_configmap_of_the_base() -> None:
    assert config_map(rendered(BASE))["data"] == env_file(BASE / "fovea.env")


@rendering
def test_configuration_is_mounted_by_its_hashed_name(directory: Path) -> None:
    """So that a changed setting rolls the pods."""
    objects = rendered(directory)
    name = config_map(objects)["metadata"]["name"]
    assert name != "fovea"
    pods = [pod_of(objects), *(item["spec"]["template"]["spec"] for item in objects if item["kind"] == "Job")]
    for pod in pods:
        for container in chain(pod["containers"], pod.get("initContainers", ())):
            assert {"configMapRef": {"name": name}} in container["envFrom"]


@rendering
def test_pods_have_no_privileges(directory: Path) -> None:
    objects = rendered(directory)
    for pod in (pod_of(objects), *(item["spec"]["template"]["spec"] for item in objects if item["kind"] == "Job")):
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
            assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]


@rendering
def test_all_containers_run_one_image(directory: Path) -> None:
    objects = rendered(directory)
    pods = [pod_of(objects), *(item["spec"]["template"]["spec"] for item in objects if item["kind"] == "Job")]
    images = {c["image"] for pod in pods for c in chain(pod["containers"], pod.get("initContainers", ()))}
    assert len(images) == 1


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


@pytest.mark.parametrize("overlay", ["gpu", "gpu-ha"])
def test_gpu_overlays_ask_for_one_whole_gpu(overlay: str) -> None:
    objects = rendered(KUBERNETES / "overlays" / overlay)
    pod = pod_of(objects)
    resources = pod["containers"][0]["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == resources["requests"]["nvidia.com/gpu"] == "1"
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    shared = next(mount for mount in pod["containers"][0]["volumeMounts"] if mount["mountPath"] == "/dev/shm")
    assert volumes[shared["name"]]["emptyDir"]["medium"] == "Memory"
    assert settings_of(objects).device == "cuda"
    probe = pod["containers"][0]["startupProbe"]
    # Loading, a first compilation (FlashInfer's modules alone take minutes) and capture.
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 1800


def test_one_gpu_is_handed_over_and_several_are_rolled() -> None:
    # One GPU: a second pod could never start beside the first.
    alone = rendered(KUBERNETES / "overlays" / "gpu")
    assert only(alone, "Deployment")["spec"]["strategy"] == {"type": "Recreate"}
    several = rendered(KUBERNETES / "overlays" / "gpu-ha")
    deployment = only(several, "Deployment")["spec"]
    assert deployment["strategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    assert "replicas" not in deployment, "KEDA says how many"
    assert only(several, "PersistentVolumeClaim")["spec"]["accessModes"] == ["ReadWriteMany"]
    budget = only(several, "PodDisruptionBudget")["spec"]
    assert budget["minAvailable"] < only(several, "ScaledObject")["spec"]["minReplicaCount"]
    labels = deployment["template"]["metadata"]["labels"]
    constraints = deployment["template"]["spec"]["topologySpreadConstraints"]
    assert {constraint["topologyKey"] for constraint in constraints} == {
        "kubernetes.io/hostname",
        "topology.kubernetes.io/zone",
    }
    for constraint in constraints:
        assert constraint["labelSelector"]["matchLabels"].items() <= labels.items()


@pytest.mark.parametrize("overlay", ["gpu", "gpu-ha"])
def test_model_is_fetched_once_at_a_pinned_revision_and_served_offline(overlay: str) -> None:
    objects = rendered(KUBERNETES / "overlays" / overlay)
    assert re.fullmatch(r"[0-9a-f]{40}", settings_of(objects).revision or "")
    pod, job = pod_of(objects), only(objects, "Job")["spec"]["template"]["spec"]
    (waiting,), (fetching,) = pod["initContainers"], job["containers"]
    offline = {"name": "HF_HUB_OFFLINE", "value": "1"}
    assert offline in pod["containers"][0]["env"]
    assert offline in waiting["env"]
    assert offline not in fetching.get("env", ())
    assert fetching["args"] == ["download"]
    assert "fovea download" in waiting["command"][-1]
    # The hub's token is the download's alone.
    of_download = [source["secretRef"] for source in fetching["envFrom"] if "secretRef" in source]
    assert of_download == [{"name": "fovea-hub", "optional": True}]
    assert not any("secretRef" in source for source in waiting["envFrom"])
    claims = [
        volume["persistentVolumeClaim"]
        for volume in (*pod["volumes"], *job["volumes"])
        if "persistentVolumeClaim" in volume
    ]
    assert claims == [{"claimName": "fovea-cache"}] * 2
    # A volume of one node: the Job goes where the server's pod waits.
    (term,) = job["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    labels = only(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert term["labelSelector"]["matchLabels"].items() <= labels.items()


@rendering
def test_server_is_reached_by_gateway_and_prometheus_and_reaches_names_only(directory: Path) -> None:
    objects = rendered(directory)
    policy = named(objects, "NetworkPolicy", "fovea")["spec"]
    labels = only(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    (ingress,) = policy["ingress"]
    assert ingress["ports"] == [{"port": "http", "protocol": "TCP"}]
    assert ingress["from"]
    assert all(peer for peer in ingress["from"]), "an empty peer is everybody"
    (egress,) = policy["egress"]
    assert egress["to"]
    assert {port["port"] for port in egress["ports"]} == {53}


def test_only_the_download_leaves_the_cluster() -> None:
    objects = rendered(KUBERNETES / "overlays" / "gpu")
    policy = named(objects, "NetworkPolicy", "fovea-download")["spec"]
    selected = policy["podSelector"]["matchLabels"]
    job = only(objects, "Job")["spec"]["template"]["metadata"]["labels"]
    server = only(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert selected.items() <= job.items()
    assert not selected.items() <= server.items()
    assert "ingress" not in policy
    assert {port["port"] for rule in policy["egress"] for port in rule["ports"]} == {53, 443}


def test_every_manifest_belongs_to_a_kustomization() -> None:
    for kustomization in KUBERNETES.rglob("kustomization.yaml"):
        content = read_yaml(kustomization)
        listed = {str(entry) for entry in content.get("resources", ())}
        listed |= {patch["path"] for patch in content.get("patches", ()) if "path" in patch}
        generators = content.get("configMapGenerator", ())
        listed |= {str(file) for generator in generators for file in generator.get("files", ())}
        # Values are for another project's chart.
        files = {path.name for path in kustomization.parent.glob("*.yaml") if not path.name.endswith(".values.yaml")}
        assert files - {"kustomization.yaml"} <= listed, kustomization
