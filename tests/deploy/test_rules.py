"""The recording and alert rules: promtool's unit tests, and agreement with code, manifest and runbook."""

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from server.metrics_table import families
from tests.deploy.manifests import DEPLOY, ROOT, read_yaml, tool
from tests.deploy.queries import metric_names, vector_selectors

RULES = DEPLOY / "rules"
FILES = (RULES / "recording.yaml", RULES / "alerts.yaml")
TESTS = sorted((RULES / "tests").glob("*.yaml"))
RUNBOOK = ROOT / "docs" / "operations.md"
# From Prometheus itself and from the HTTP process.
FOREIGN = {"up", "process_start_time_seconds"}

Rule = dict[str, Any]


def rules() -> list[Rule]:
    return [rule for file in FILES for group in read_yaml(file)["groups"] for rule in group["rules"]]


ALERTS = [rule for rule in rules() if "alert" in rule]
RECORDS = [rule for rule in rules() if "record" in rule]
each_rule = pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.get("alert") or rule["record"])
each_alert = pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])


def exported() -> set[str]:
    """Names of all our series, those of histograms in their three forms."""
    names = set()
    for family in families():
        forms = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
        names |= {family.name + form for form in forms}
    return names


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_promtool_finds_what_is_expected(path: Any) -> None:
    promtool = tool("promtool", comes_with="Debian's package prometheus")
    done = subprocess.run(
        [promtool, "test", "rules", str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_rules_and_configurations() -> None:
    promtool = tool("promtool", comes_with="Debian's package prometheus")
    for command in (
        ["check", "rules", *map(str, FILES)],
        ["check", "config", str(DEPLOY / "prometheus" / "prometheus.local.yml")],
    ):
        done = subprocess.run([promtool, *command], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def alert_expectations() -> dict[str, list[int]]:
    """How many firing alerts promtool's tests expect, each time that they ask about an alert."""
    numbers: dict[str, list[int]] = {}
    for path in TESTS:
        for group in read_yaml(path)["tests"]:
            for asked in group.get("alert_rule_test", ()):
                numbers.setdefault(asked["alertname"], []).append(len(asked["exp_alerts"]))
            for asked in group.get("promql_expr_test", ()):
                for name in re.findall(r'alertname="(\w+)", alertstate="firing"', asked["expr"]):
                    numbers.setdefault(name, []).append(len(asked["exp_samples"]))
    return numbers


@each_alert
def test_every_alert_has_a_unit_test_in_which_it_fires_and_one_in_which_it_does_not(rule: Rule) -> None:
    numbers = alert_expectations()[rule["alert"]]
    assert max(numbers) > 0
    assert min(numbers) == 0


@pytest.mark.parametrize("rule", RECORDS, ids=lambda rule: rule["record"])
def test_every_recorded_series_has_a_unit_test_of_its_value(rule: Rule) -> None:
    """By itself, or through an alert that reads it."""
    asked = [
        test["expr"]
        for path in TESTS
        for group in read_yaml(path)["tests"]
        for test in group.get("promql_expr_test", ())
    ]
    fired = {name for name, numbers in alert_expectations().items() if max(numbers) > 0}
    through = [alert["expr"] for alert in ALERTS if alert["alert"] in fired]
    assert any(rule["record"] in expression for expression in (*asked, *through))


@each_rule
def test_rules_read_exported_or_recorded_series(rule: Rule) -> None:
    recorded = {other["record"] for other in RECORDS}
    assert metric_names(rule["expr"]) <= exported() | recorded | FOREIGN
    for selector in vector_selectors(rule["expr"]):
        by_name = {family.name: family for family in families()}
        family = by_name.get(str(selector.name).removesuffix("_total"))
        if family is None or not family.samples:
            continue
        # A matched value that is not exported would make a rule that never fires.
        for matcher in selector.matchers.matchers:
            values = {sample.labels.get(matcher.name) for sample in family.samples}
            pattern = matcher.value if str(matcher.op) in ("MatchOp.Re", "MatchOp.NotRe") else re.escape(matcher.value)
            found = [value for value in values if value is not None and re.fullmatch(pattern, value)]
            assert found, f"{rule['expr']}: no {matcher.name} is {matcher.value}"


def test_recorded_names_tell_level_metric_and_operation() -> None:
    for rule in RECORDS:
        assert re.fullmatch(r"(job|instance):fovea_[a-z0-9_]+:[a-z0-9_]+", rule["record"])
    assert len({rule["record"] for rule in RECORDS}) == len(RECORDS)
    for rule in ALERTS:
        recorded = {name for name in metric_names(rule["expr"]) if ":" in name}
        assert recorded <= {other["record"] for other in RECORDS}


@each_alert
def test_alerts_say_what_and_lead_to_the_runbook(rule: Rule) -> None:
    assert re.fullmatch(r"Fovea[A-Za-z]+", rule["alert"])
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert set(rule["annotations"]) == {"summary", "description", "runbook"}
    assert rule["annotations"]["description"].endswith(".")
    document, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert ROOT / document == RUNBOOK
    assert anchor == rule["alert"].lower()
    assert f"### {rule['alert']}\n" in RUNBOOK.read_text(encoding="utf-8")


def test_objective_is_a_bucket_of_the_histogram() -> None:
    from server.histogram import LATENCY_SECONDS

    bounds = set(re.findall(r'le="([^"]+)"', "".join(rule["expr"] for rule in RECORDS)))
    assert bounds == {"2.0"}
    assert {float(bound) for bound in bounds} <= set(LATENCY_SECONDS)


def test_manifest_holds_the_same_rules() -> None:
    code = "import sys; from deploy.rules.build import manifest; sys.stdout.write(manifest())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    path = DEPLOY / "kubernetes" / "components" / "prometheus-operator" / "prometheusrule.yaml"
    assert done.stdout == path.read_text(encoding="utf-8"), "run python -m deploy.rules.build"
    groups = read_yaml(path)["spec"]["groups"]
    assert json.dumps([rule for group in groups for rule in group["rules"]]) == json.dumps(rules())
