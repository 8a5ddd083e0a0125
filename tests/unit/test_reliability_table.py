import copy
import json
from typing import Any

import pytest

from benchmarks.reliability import failures_of
from benchmarks.reliability_table import PAGE, RESULT, counted, table, with_table


@pytest.fixture
def result() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8"))
    return copy.deepcopy(found)


def test_page_is_what_the_result_says(result: dict[str, Any]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page, result) == page


def test_what_was_not_tried_does_not_look_like_a_success(result: dict[str, Any]) -> None:
    assert counted({"right": 3, "sent": 4}) == "3 of 4"
    result["load"]["faults"] = {"step raises": {"right": 0, "sent": 0, "wrong": {}}}
    assert "| fault injected: step raises | not tried in this run |  |" in table(result)


def test_growth_is_told_in_mib_with_what_was_allowed(result: dict[str, Any]) -> None:
    result["load"]["memory"] = {
        "engine": {
            "pss_bytes_before": 100 << 20, "pss_bytes_after": 133 << 20, "descriptors_before": 3, "descriptors_after": 4
        }
    }  # fmt: skip
    failures = failures_of(result)
    assert "memory of engine: 100 -> 133 MiB, allowed 132 MiB" in failures
    assert "file descriptors of engine: 3 -> 4, allowed none more" in failures
