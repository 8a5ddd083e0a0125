"""Reads the deployment's files as the tools see them: YAML, the objects that kustomize renders, and the app to compare.

Knows where files are. What must be true of them is in the tests.
"""

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from server.app import create_app
from server.settings import load_settings
from tests.fake_engine import FakeEngineClient

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
BASE = KUBERNETES / "base"
OVERLAYS = sorted(path.parent for path in KUBERNETES.glob("overlays/*/kustomization.yaml"))
COMPONENTS = sorted(path.parent for path in KUBERNETES.glob("components/*/kustomization.yaml"))
# Groups that are not Kubernetes' own: test_custom_objects.py and tests/clients/test_published_types.py validate them.
CUSTOM_GROUPS = (
    "monitoring.coreos.com/",
    "keda.sh/",
    "gateway.networking.k8s.io/",
)

Object = dict[str, Any]


def tool(name: str, *, comes_with: str = "make install") -> str:
    """Path of a program that the development dependencies bring, or that is installed on the machine.

    Their wheels exist for Linux and macOS, Debian's packages on Debian. Elsewhere the test is skipped, but never in CI.
    """
    folders = (str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/sbin")
    found = shutil.which(name, path=os.pathsep.join(folders))
    if found is None:
        reason = f"{name} is not installed: {comes_with} brings it"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return found


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def objects_of(path: Path) -> list[Object]:
    """The Kubernetes objects of a file, or of all files that a kustomization lists as resources."""
    if path.is_dir():
        resources = read_yaml(path / "kustomization.yaml").get("resources", ())
        return [item for name in resources for item in objects_of(path / name) if not (path / name).is_dir()]
    return [item for item in yaml.safe_load_all(path.read_text(encoding="utf-8")) if item is not None]


@cache
def rendered(directory: Path) -> tuple[Object, ...]:
    """What `kubectl apply --kustomize` would send. Offline."""
    done = subprocess.run(
        [tool("kubectl"), "kustomize", str(directory)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return tuple(item for item in yaml.safe_load_all(done.stdout) if item is not None)


def only(objects: Sequence[Object], kind: str) -> Object:
    """The one object of a kind."""
    found = [item for item in objects if item["kind"] == kind]
    assert len(found) == 1, (kind, [item["metadata"]["name"] for item in found])
    return found[0]


def named(objects: Sequence[Object], kind: str, name: str) -> Object:
    """The object of a kind and name."""
    return only([item for item in objects if item["metadata"]["name"] == name], kind)


def config_map(objects: Sequence[Object]) -> Object:
    """The ConfigMap of the application's variables."""
    maps = [item for item in objects if item["kind"] == "ConfigMap"]
    return only([item for item in maps if any(key.startswith("FOVEA_") for key in item["data"])], "ConfigMap")


def pod_of(objects: Sequence[Object]) -> Object:
    """The Deployment's pod specification."""
    spec = only(objects, "Deployment")["spec"]["template"]["spec"]
    assert isinstance(spec, dict)
    return spec


def env_file(path: Path) -> dict[str, str]:
    """NAME=value lines, as kustomize reads them."""
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@cache
def answers(*paths: str, is_ready: bool = True) -> dict[str, httpx.Response]:
    """What the application answers to GET on each path; on an engine that replays tokens."""

    async def ask() -> dict[str, httpx.Response]:
        client = FakeEngineClient()
        app = create_app(client, load_settings({}, environ={}))
        if is_ready:
            # In place of the lifespan, which would load the model's tokenizer too.
            await client.start()
            app.state.service.lifecycle.become_ready()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://fovea") as http:
            return {path: await http.get(path) for path in paths}

    return asyncio.run(ask())
