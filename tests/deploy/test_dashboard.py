"""The Grafana dashboards: generated as checked in, and every query names series that the application exports."""

import json
import re
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.deploy.manifests import DEPLOY, ROOT, answers
from tests.deploy.queries import vector_selectors

FILES = sorted((DEPLOY / "dashboards").glob("*.json"))
DASHBOARDS: dict[str, dict[str, Any]] = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in FILES}
# Labels that scraping adds, and those that a query makes itself.
TARGET_LABELS = {"job", "instance", "namespace", "pod"}
# Exported for a process that has them; the platform decides (/proc).
PROCESS_METRICS = {"process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds"}
VARIABLES = ("datasource", "model", "namespace", "pod", "instance")
ROWS = {
    "fovea-service": ("Overview", "Traffic and errors", "Latency", "Tokens", "Images", "HTTP process"),
    "fovea-engine": ("Overview", "Scheduler", "Vision encoder", "Graphs", "Memory", "Start-up"),
}
# What the design names, beside the usual: a dashboard without them would miss its point.
CARD = {
    "fovea_graph_hits_total",
    "fovea_graph_misses_total",
    "fovea_graph_reserved_mib",
    "fovea_graph_measured_mib",
    "fovea_graph_captured_mib",
    "fovea_graph_replays_total",
    "fovea_graph_padded_tokens_total",
    "fovea_memory_bytes",
    "fovea_memory_requested_bytes",
    "fovea_memory_unplanned_bytes",
    "fovea_startup_phase_seconds",
    "fovea_kv_cache_usage_ratio",
}

Panel = dict[str, Any]
PANELS = [
    (name, panel) for name, content in DASHBOARDS.items() for panel in content["panels"] if panel["type"] != "row"
]
panels = pytest.mark.parametrize(
    "panel", [panel for _, panel in PANELS], ids=[f"{name}: {panel['title']}" for name, panel in PANELS]
)
dashboards = pytest.mark.parametrize("name", DASHBOARDS)


@cache
def exported() -> dict[str, set[str]]:
    """Names of all series of the application's /metrics, each with its labels."""
    series: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(answers("/metrics")["/metrics"].text):
        for sample in family.samples:
            series.setdefault(sample.name, set()).update(sample.labels)
    return series


def expressions(panel: Panel) -> list[str]:
    return [target["expr"] for target in panel["targets"]]


def filled(expression: str) -> str:
    """The query as Prometheus would get it: Grafana's variables filled in."""
    query = (
        expression.replace("$__rate_interval", "1m").replace("$__range", "1h").replace("$instance", "127.0.0.1:8000")
    )
    assert not re.search(r"\$(?!1\b)", query), f"an unknown variable in {expression}"
    return query


def selectors(expression: str) -> list[tuple[str, set[str]]]:
    """Each metric that a query reads, with the labels that it matches."""
    found = vector_selectors(filled(expression))
    named = [(str(node.name), {matcher.name for matcher in node.matchers.matchers}) for node in found]
    # The walk has missed nothing that looks like one of our metrics.
    assert sorted(name for name, _ in named) == sorted(re.findall(r"\b(?:fovea|process)_\w+", expression))
    return named


def test_json_is_what_the_code_builds() -> None:
    code = (
        "import json; from deploy.dashboards.build import files; "
        "print(json.dumps({path.name: text for path, text in files().items()}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    found = {path.name: path.read_text(encoding="utf-8") for path in FILES}
    assert json.loads(done.stdout) == found, "run python -m deploy.dashboards.build"


@panels
def test_queries_name_exported_series_and_labels(panel: Panel) -> None:
    for expression in expressions(panel):
        for name, used in selectors(expression):
            assert name in exported().keys() | PROCESS_METRICS, expression
            known = exported().get(name, set()) | TARGET_LABELS
            assert used <= known, f"{name} has no label {used - known}"
            assert "instance" in used, f"{expression} ignores the dashboard's variables"


@panels
def test_groupings_and_legends_name_labels(panel: Panel) -> None:
    for target in panel["targets"]:
        known = set(TARGET_LABELS).union(*(exported().get(name, ()) for name, _ in selectors(target["expr"])))
        made = set(re.findall(r'label_replace\(.*?, "(\w+)", "', target["expr"]))
        grouped = {
            label.strip() for group in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in group.split(",")
        }
        legend = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert grouped | legend <= known | made, target["expr"]
        # A legend can only show what the aggregation left.
        if grouped and legend:
            assert legend <= grouped | made, target["expr"]


@panels
def test_counters_are_rated_and_gauges_are_not(panel: Panel) -> None:
    for expression in expressions(panel):
        rated = set(re.findall(r"(?:rate|increase)\((\w+)\{", expression))
        for name, _ in selectors(expression):
            is_counter = re.search(r"_(total|bucket|sum|count)$", name) is not None
            assert (name in rated) == is_counter, expression
        windows = len(re.findall(r"\[\$__(?:rate_interval|range)\]", expression))
        assert len(re.findall(r"\b(?:rate|increase)\(", expression)) == windows, expression


@panels
def test_panels_have_unit_description_and_datasource_variable(panel: Panel) -> None:
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["description"].endswith(".")
    sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)
    references = [target["refId"] for target in panel["targets"]]
    assert len(set(references)) == len(references)


@dashboards
def test_rows_variables_and_identity(name: str) -> None:
    content = DASHBOARDS[name]
    assert tuple(panel["title"] for panel in content["panels"] if panel["type"] == "row") == ROWS[name]
    assert tuple(variable["name"] for variable in content["templating"]["list"]) == VARIABLES
    assert content["uid"] == name
    (link,) = content["links"]
    assert set(link["tags"]) <= set(content["tags"])


def test_what_the_design_names_is_shown() -> None:
    shown = {
        name for _, panel in PANELS for expression in expressions(panel) for name, _ in selectors(expression)
    }  # fmt: skip
    assert shown >= CARD
    kinds = {panel["type"] for _, panel in PANELS}
    assert kinds >= {"heatmap", "timeseries", "stat", "barchart", "bargauge"}


def test_heat_maps_read_buckets() -> None:
    maps = [panel for _, panel in PANELS if panel["type"] == "heatmap"]
    assert maps
    for panel in maps:
        (target,) = panel["targets"]
        assert "_bucket{" in target["expr"]
        assert target["format"] == "heatmap"
        assert target["legendFormat"] == "{{le}}"


@dashboards
def test_variables_narrow_one_another_by_exported_labels(name: str) -> None:
    metric, labels = "fovea_build_info", exported()["fovea_build_info"] | TARGET_LABELS
    known: set[str] = set()
    for variable in DASHBOARDS[name]["templating"]["list"][1:]:
        query = re.fullmatch(r"label_values\((\w+)(?:\{(.*)\})?, (\w+)\)", variable["query"]["query"])
        assert query is not None
        assert query[1] == metric
        assert query[3] in labels
        assert set(re.findall(r'(\w+)=~"\$\1"', query[2] or "")) == known
        known.add(variable["name"])


@dashboards
def test_panels_do_not_overlap_and_have_identities(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARDS[name]["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert place["x"] + place["w"] <= 24, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells
    identities = [panel["id"] for panel in DASHBOARDS[name]["panels"]]
    assert len(set(identities)) == len(identities)
