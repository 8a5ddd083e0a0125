"""The runbook: its table is made from results, and what it names exists."""

import asyncio
import inspect
import re

from benchmarks.capacity_table import HEAD, RUNBOOK, capacity_table, with_table
from runtime.startup import build_engine
from runtime.stats import MEMORY_COMPONENTS
from server.metrics_table import exported_name, families
from server.plan import plan_tables
from server.settings import Settings
from tests.deploy.manifests import DEPLOY, ROOT
from tests.deploy.test_rules import ALERTS
from tests.fake_engine import FakeEngineClient

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
    # Of `fovea bench`, of `fovea plan --tune`, of kubectl, helm and docker.
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
        "--ignore-not-found",
        "--build-arg",
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


def example() -> str:
    block = TEXT.partition("<!-- example: plan -->\n```\n")[2].partition("```\n<!-- end of example -->")[0]
    assert block
    return block


def headers(tables: str) -> list[list[str]]:
    """The first line of each table, as words."""
    return [section.splitlines()[0].split() for section in tables.strip().split("\n\n")]


def test_example_of_a_plan_has_the_form_of_one() -> None:
    client = FakeEngineClient()
    asyncio.run(client.start())
    assert client.info is not None
    assert headers(example()) == headers(plan_tables(client.info))
    facts = [line.split("  ")[0] for line in example().split("\n\n")[0].splitlines()[2:]]
    assert facts == [line.split("  ")[0] for line in plan_tables(client.info).split("\n\n")[0].splitlines()[2:]]


def test_example_of_a_plan_adds_up_and_so_does_what_is_said_of_it() -> None:
    rows = {name: int(value) for name, value in re.findall(r"(?m)^(\w+) +-?[\d.]+ +(-?\d+)$", example())}
    assert list(rows) == [*MEMORY_COMPONENTS, "requested", "unplanned"]
    assert sum(rows[name] for name in MEMORY_COMPONENTS) == rows["requested"]
    assert rows["unplanned"] <= 0
    cache = re.search(
        r"(\d+) blocks of (\d+) tokens, (\d+) bytes each, without the null block: (\d+) tokens", example()
    )
    assert cache is not None
    num_blocks, block_size, block_bytes, num_tokens = map(int, cache.groups())
    assert (num_blocks + 1) * block_bytes == rows["kv"]
    assert num_blocks * block_size == num_tokens
    (longest,) = re.findall(r"max_model_len +(\d+) tokens", example())
    told = re.sub(r"\s+", " ", TEXT)
    assert f"{num_blocks} blocks and the null block, of {block_bytes} bytes each" in told
    assert f"{num_tokens} tokens are {num_tokens // int(longest)} sequences of {longest}" in told
    assert f"no more than {Settings.model_fields['max_num_seqs'].default} may run" in told


def test_quoted_log_lines_and_phases_are_the_codes() -> None:
    sources = "".join(
        path.read_text(encoding="utf-8") for name in ("server", "runtime") for path in (ROOT / name).rglob("*.py")
    )
    phases = re.findall(r"(?m)^([a-z_]+) +\d+\.\d{3}$", example())
    of_a_start = re.findall(r'with phases\("(\w+)"\)', inspect.getsource(build_engine))
    assert phases == [*(phase for phase in of_a_start if phase != "recapture"), "total"]
    quoted = ("the engine died", "a request failed", "a step failed", "the device cannot be used any more")
    for words in quoted:
        assert words in sources, words
    for words in (*quoted, "no KV block fits", "max_num_seqs is 0"):
        assert f"`{words}" in re.sub(r"\s+", " ", TEXT), words


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
