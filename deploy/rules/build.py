"""Writes the rules as an object of the Prometheus operator: `python -m deploy.rules.build`. Edits nothing in them."""

from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent
SOURCES = ("recording.yaml", "alerts.yaml")
OUTPUT = FOLDER.parent / "kubernetes" / "components" / "prometheus-operator" / "prometheusrule.yaml"
HEAD = "# Made from deploy/rules by `python -m deploy.rules.build`.\n"


def manifest() -> str:
    """The PrometheusRule as YAML, the same for the same rules."""
    groups: list[Any] = []
    for name in SOURCES:
        groups += yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))["groups"]
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "fovea", "labels": {"app.kubernetes.io/name": "fovea"}},
        "spec": {"groups": groups},
    }
    return HEAD + yaml.safe_dump(rule, sort_keys=False, width=120)


if __name__ == "__main__":
    OUTPUT.write_text(manifest(), encoding="utf-8")
    print(OUTPUT)
