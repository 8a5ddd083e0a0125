"""The runbook: its table is made from results, and what it names exists."""

import re

from benchmarks.capacity_table import HEAD, RUNBOOK, capacity_table, with_table
from runtime.stats import MEMORY_COMPONENTS
from server.metrics_table import exported_name, families
from server.settings import Settings
from tests.deploy.manifests import DEPLOY, ROOT
from tests.deploy.test_rules import ALERTS

TEXT = RUNBOOK.read_text(encoding="utf-8")


def test_capacity_is_what_the_results_say() -> None:
    assert with_table(TEXT) == TEXT, "run python -m benchmarks.capacity_table"


def test_only_what_was_measured_on_a_gpu_has_a_row() -> None:
    result = {
        "gpu": "NVIDIA X", "preset": "pair", "requests_per_second": 12.34, "output_tokens_per_second": 195.2,
        "ttft_ms": {"p50": 41.2}, "itl_ms": {"p50": 3.21}, "kv_tokens": 268304, "ready_seconds": 30.2,
        "commit": "a" * 40, "device": "cuda:0",
    }  # fmt: skip
    assert "No GPU has been measured" in capacity_table([{**result, "device": "cpu"}])
    lines = capacity_table([result]).splitlines()
    assert len(lines) == 3
    assert "| NVIDIA X | pair | 12.3 | 195 | 41 ms | 3.2 ms | 268304 tokens | 30 s | `aaaaaaaaaaaa` |" in lines
    assert lines[0].count("|") == len(HEAD) + 1


def test_flags_and_variables_are_settings() -> None:
    own = {f"--{name.replace('_', '-')}" for name in Settings.model_fields}
    own |= {f"--no-{flag[2:]}" for flag in own}
    # Of `fovea bench`, of `fovea plan --tune`, of kubectl and of helm.
    foreign = {
        "--tune",
        "--sizes",
        "--save",
        "--config",
        "--url",
        "--image",
        "--concurrency",
        "--kustomize",
        "--previous",
        "--install",
        "--version",
        "--values",
    }
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", TEXT)) <= own | foreign
    variables = {f"FOVEA_{name.upper()}" for name in Settings.model_fields}
    assert set(re.findall(r"\bFOVEA_\w+", TEXT)) <= variables


def test_metrics_are_exported() -> None:
    exported = {exported_name(family) for family in families()}
    assert set(re.findall(r"\bfovea_[a-z_]+", TEXT)) <= exported


def test_every_row_of_the_plan_is_explained() -> None:
    plan = TEXT.partition("### Reading the plan")[2].partition("###")[0]
    for name in (*MEMORY_COMPONENTS, "requested", "unplanned"):
        assert f"`{name}`" in plan, name


def test_every_alert_has_an_entry_and_every_entry_an_alert() -> None:
    entries = re.findall(r"(?m)^### (Fovea\w+)$", TEXT)
    assert sorted(entries) == sorted(rule["alert"] for rule in ALERTS)
    for entry in entries:
        body = TEXT.partition(f"### {entry}\n")[2].partition("\n#")[0]
        assert body.startswith("*"), f"{entry} does not say what it means"
        assert re.search(r"First|As above|By itself|With `", body), f"{entry} has no first move"


def test_files_exist() -> None:
    for path in re.findall(r"`((?:deploy|overlays|components)/[\w./-]+)`", TEXT):
        place = ROOT / path if path.startswith("deploy/") else DEPLOY / "kubernetes" / path
        assert place.exists(), path
    for link in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (RUNBOOK.parent / link).exists(), link
