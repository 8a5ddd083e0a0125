"""Every image that is named anywhere: by a full version or a digest, and everywhere by the same one."""

import re
import tomllib
from itertools import chain

import pytest
import yaml

from tests.deploy.manifests import DEPLOY, KUBERNETES, OVERLAYS, ROOT, objects_of, pod_of, read_yaml, rendered

# A release, or what cannot change.
PINNED = re.compile(r"v?\d+\.\d+\.\d+([.-][\w.-]+)?|sha256:[0-9a-f]{64}")
PACKAGE = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
VERSION = PACKAGE["project"]["version"]


def parts(reference: str) -> tuple[str, str]:
    """Repository and tag or digest of `[registry/]name[:tag][@digest]`; a digest says more than a tag."""
    match = re.fullmatch(r"([\w./-]+(?::\d+/[\w./-]+)?)(?::([\w.-]+))?(?:@(sha256:\w+))?", reference)
    assert match is not None, reference
    return match[1], match[3] or match[2] or ""


def dockerfile_references() -> list[str]:
    """Arguments that name images, and images that stages are built on by name."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    stages = set(re.findall(r"(?m)^FROM \S+ AS (\S+)$", text))
    built_on = [image for image in re.findall(r"(?m)^FROM (\S+)", text) if image not in stages and "$" not in image]
    return [*re.findall(r"(?m)^ARG \w+_IMAGE=(\S+)$", text), *built_on]


def manifest_references() -> list[str]:
    """Images of all containers: in files as they lie, and as the overlays render them."""
    files = [
        item for path in KUBERNETES.rglob("*.yaml") if path.name != "kustomization.yaml" for item in objects_of(path)
    ]
    pods = [item["spec"]["template"]["spec"] for item in files if item.get("kind") in ("Deployment", "Job")]
    pods += [pod_of(rendered(overlay)) for overlay in OVERLAYS]
    containers = chain.from_iterable((*pod.get("containers", ()), *pod.get("initContainers", ())) for pod in pods)
    return [container["image"] for container in containers if "image" in container]


def chart_references() -> list[str]:
    """Images that values for other projects' charts name."""
    epp = read_yaml(KUBERNETES / "components" / "inference-gateway" / "endpoint-picker.values.yaml")["router"]["epp"]
    return [f"llm-d-router-endpoint-picker:{epp['image']['tag']}"]


def compose_references() -> list[str]:
    return [service["image"] for service in read_yaml(DEPLOY / "compose.yaml")["services"].values()]


def documented_references() -> list[str]:
    """What the documents tell people to build and to run."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))]
    texts.append((DEPLOY / "README.md").read_text(encoding="utf-8"))
    return [name for text in texts for name in re.findall(r"\b(?:fovea|grafana/grafana|prom/prometheus):[\w.-]+", text)]


REFERENCES = [
    *dockerfile_references(),
    *manifest_references(),
    *chart_references(),
    *compose_references(),
    *documented_references(),
]


def test_every_image_is_pinned() -> None:
    assert len(set(REFERENCES)) >= 7
    for reference in REFERENCES:
        _, version = parts(reference)
        assert PINNED.fullmatch(version), f"{reference} is not pinned to a release or a digest"


@pytest.mark.parametrize("floating", ["python", "python:3.12", "python:latest", "nvidia/cuda:13-devel", "r:5000/fovea"])
def test_floating_references_are_noticed(floating: str) -> None:
    assert not PINNED.fullmatch(parts(floating)[1])


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("r.example:5000/a/b:1.2.3-cpu", ("r.example:5000/a/b", "1.2.3-cpu")),
        (f"a/b:1.2@sha256:{'0' * 64}", ("a/b", f"sha256:{'0' * 64}")),
    ],
)
def test_registries_tags_and_digests_are_told_apart(reference: str, expected: tuple[str, str]) -> None:
    assert parts(reference) == expected
    assert PINNED.fullmatch(expected[1])


def test_an_image_has_one_version_everywhere() -> None:
    versions: dict[str, set[str]] = {}
    for reference in REFERENCES:
        repository, version = parts(reference)
        versions.setdefault(repository, set()).add(version)
    # Ours has a target's name behind the package's version; the base manifests leave it to the overlays.
    assert versions.pop("fovea") == {VERSION, f"{VERSION}-cpu", f"{VERSION}-cuda"}
    assert {name: found for name, found in versions.items() if len(found) != 1} == {}


def test_overlays_run_the_image_of_their_device() -> None:
    for overlay in OVERLAYS:
        image = pod_of(rendered(overlay))["containers"][0]["image"]
        assert image == f"fovea:{VERSION}-{'cpu' if overlay.name == 'cpu-demo' else 'cuda'}"


def test_grafana_is_the_one_whose_builders_make_the_dashboards() -> None:
    (requirement,) = [one for one in PACKAGE["dependency-groups"]["dev"] if one.startswith("grafana-foundation-sdk")]
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    assert parts(compose["services"]["grafana"]["image"])[1] == requirement.partition("!")[2]
