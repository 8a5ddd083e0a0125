"""The components: they apply to the overlays, alone and in each other's place."""

import os
import re
import shutil
from pathlib import Path

import pytest
import yaml

from tests.deploy.manifests import COMPONENTS, DEPLOY, KUBERNETES, ROOT, Object, answers, named, only, rendered
from tests.deploy.test_manifests import validate


def with_components(directory: Path, overlay: str, *components: Path) -> tuple[Object, ...]:
    kustomization = {
        "resources": [os.path.relpath(KUBERNETES / "overlays" / overlay, directory)],
        "components": [os.path.relpath(component, directory) for component in components],
    }
    (directory / "kustomization.yaml").write_text(yaml.safe_dump(kustomization), encoding="utf-8")
    return rendered(directory)


DASHBOARDS = DEPLOY / "dashboards"
OPERATOR, KEDA, HPA, GATEWAY, WRITABLE = (
    KUBERNETES / "components" / name
    for name in ("prometheus-operator", "keda", "hpa", "inference-gateway", "writable-root")
)


@pytest.mark.parametrize(
    ("overlay", "components"),
    [
        ("cpu-demo", (OPERATOR, DASHBOARDS, KEDA, GATEWAY, WRITABLE)),
        ("gpu", (OPERATOR, DASHBOARDS, HPA, GATEWAY, WRITABLE)),
        ("gpu-ha", (GATEWAY, WRITABLE)),
    ],
)
def test_components_apply_to_the_overlays(overlay: str, components: tuple[Path, ...], tmp_path: Path) -> None:
    objects = with_components(tmp_path, overlay, *components)
    for item in objects:
        validate(item)
    template = only(objects, "Deployment")["spec"]["template"]
    monitor = only(objects, "PodMonitor")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in {port["name"] for port in template["spec"]["containers"][0]["ports"]}
    assert answers(endpoint["path"])[endpoint["path"]].status_code == 200
    assert not template["metadata"].get("annotations"), "scraped twice"
    assert template["spec"]["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is False
    dashboards = named(objects, "ConfigMap", "fovea-dashboards")
    assert dashboards["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert set(dashboards["data"]) == {path.name for path in DASHBOARDS.glob("*.json")}
    scaler = only(objects, "HorizontalPodAutoscaler" if HPA in components else "ScaledObject")
    assert scaler["spec"]["scaleTargetRef"]["name"] == only(objects, "Deployment")["metadata"]["name"]
    assert "replicas" not in only(objects, "Deployment")["spec"]


def test_hpa_takes_the_place_of_keda_in_one_line(tmp_path: Path) -> None:
    """As the documents say: in a copy of the overlay, `components/hpa` instead of `components/keda`."""
    original = KUBERNETES / "overlays" / "gpu-ha"
    overlay = shutil.copytree(original, tmp_path / "overlays" / "gpu-ha")
    kustomization = overlay / "kustomization.yaml"
    text = kustomization.read_text(encoding="utf-8")
    assert text.count("components/keda\n") == 1
    text = text.replace("components/keda\n", "components/hpa\n")
    for path in re.findall(r"(?m)^  - (\.\./\S+)$", text):
        target = (original / path.replace("components/hpa", "components/keda")).resolve()
        target = target.with_name("hpa") if target.name == "keda" else target
        text = text.replace(f"  - {path}\n", f"  - {os.path.relpath(target, overlay)}\n")
    kustomization.write_text(text, encoding="utf-8")
    objects = rendered(overlay)
    for item in objects:
        validate(item)
    assert only(objects, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]["name"] == "fovea"
    assert not any(item["kind"] == "ScaledObject" for item in objects)
    assert "replicas" not in only(objects, "Deployment")["spec"]
    documents = [(ROOT / "deploy" / "README.md"), (ROOT / "docs" / "operations.md")]
    assert any(
        "`components/hpa` in the place of `components/keda`" in path.read_text(encoding="utf-8") for path in documents
    )


def test_every_component_is_tried() -> None:
    assert set(COMPONENTS) == {OPERATOR, KEDA, HPA, GATEWAY, WRITABLE, KUBERNETES / "components" / "model-download"}
