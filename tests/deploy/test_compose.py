"""Compose, Prometheus and Grafana's provisioning: what one file names, another has."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from server.settings import load_settings
from tests.deploy.manifests import DEPLOY, ROOT, answers, read_yaml
from tests.deploy.test_manifests import STOP_SECONDS

COMPOSE = read_yaml(DEPLOY / "compose.yaml")
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
services = pytest.mark.parametrize("name", sorted(SERVICES))


def mounts(name: str) -> dict[str, str]:
    """Place in the container -> what is mounted there."""
    return {place: source for source, place, *_ in (volume.split(":") for volume in SERVICES[name]["volumes"])}


def test_every_yaml_file_parses() -> None:
    files = [path for pattern in ("*.yaml", "*.yml") for path in DEPLOY.rglob(pattern)]
    assert len(files) > 10
    for path in files:
        assert list(yaml.safe_load_all(path.read_text(encoding="utf-8"))), path


@services
def test_mounted_files_and_volumes_exist(name: str) -> None:
    for source in mounts(name).values():
        assert (DEPLOY / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], source


@services
def test_ports_are_local_and_no_capability_is_kept(name: str) -> None:
    assert all(port.startswith("127.0.0.1:") for port in SERVICES[name]["ports"])
    assert SERVICES[name]["cap_drop"] == ["ALL"]


def test_server_is_the_cpu_target_with_known_settings() -> None:
    server = SERVICES["fovea"]
    assert (DEPLOY / server["build"]["context"]).resolve() == ROOT
    assert f"AS {server['build']['target']}\n" in (ROOT / "Dockerfile").read_text(encoding="utf-8")
    settings = load_settings({}, environ=server["environment"])
    assert int(server["stop_grace_period"].removesuffix("s")) > settings.drain_timeout_seconds + STOP_SECONDS
    assert server["ports"] == [f"127.0.0.1:8000:{settings.port}"]
    assert "/cache" in mounts("fovea")
    assert "/tmp" in server["tmpfs"]


@pytest.mark.parametrize(
    ("file", "host"), [("prometheus.yml", "fovea"), ("prometheus.local.yml", load_settings({}, environ={}).host)]
)
def test_prometheus_scrapes_the_server(file: str, host: str) -> None:
    (job,) = read_yaml(DEPLOY / "prometheus" / file)["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"{host}:{load_settings({}, environ={}).port}"]}]
    assert answers(job["metrics_path"])[job["metrics_path"]].status_code == 200
    if file == "prometheus.yml":
        assert host in SERVICES
        assert mounts("prometheus")["/etc/prometheus/prometheus.yml"] == f"./prometheus/{file}"


def test_grafana_is_provisioned_with_its_data_source_and_dashboard() -> None:
    provisioning = DEPLOY / mounts("grafana")["/etc/grafana/provisioning"]
    (source,) = read_yaml(provisioning / "datasources" / "prometheus.yaml")["datasources"]
    host, port = source["url"].removeprefix("http://").split(":")
    assert host in SERVICES
    assert SERVICES[host]["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert source["type"] == "prometheus"
    interval = read_yaml(DEPLOY / "prometheus" / "prometheus.yml")["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == interval
    (provider,) = read_yaml(provisioning / "dashboards" / "fovea.yaml")["providers"]
    folder = Path(provider["options"]["path"])
    shown = {Path(place).name for place in mounts("grafana") if Path(place).parent == folder}
    assert shown == {path.name for path in (DEPLOY / "dashboards").glob("*.json")}


@pytest.mark.parametrize("file", ["prometheus.yml", "prometheus.local.yml"])
def test_prometheus_loads_the_rules(file: str) -> None:
    names = read_yaml(DEPLOY / "prometheus" / file)["rule_files"]
    rules = {path.name for path in (DEPLOY / "rules").glob("*.yaml")}
    assert {Path(name).name for name in names} == rules
    for name in names:
        if file == "prometheus.yml":
            # As mounted, relative to the configuration.
            source = mounts("prometheus")[f"/etc/prometheus/{name}"]
            assert source == f"./rules/{Path(name).name}"
        else:
            assert (DEPLOY / "prometheus" / name).exists()
