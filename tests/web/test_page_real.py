"""The page in a browser, on the command as an operator runs it: real engine, small random checkpoint."""

from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from tests.http_server import picture
from tests.integration.test_http_engine import Fovea, serving
from tests.web.browser import PHONE, Browser
from tests.web.page_acts import answer, ask, drop, ended, fact, has_in_tray, number, opened, scrolls_sideways

RECORD_GROWTH = """
window.lengths = [];
new MutationObserver(() => window.lengths.push(document.querySelector('.answer .text')?.textContent.length ?? 0))
  .observe(document.querySelector('#turns'), { childList: true, characterData: true, subtree: true });
document.querySelector('#max-tokens').value = 24;
"""


@pytest.fixture(scope="module")
def fovea(tiny_checkpoint: Path) -> Generator[Fovea, None, None]:
    with serving(tiny_checkpoint) as running:
        yield running


def replays(page: Browser, family: str) -> float:
    cells = f"[...document.querySelectorAll('[data-family={family}] .replays')]"
    return float(page.value(f"{cells}.reduce((sum, cell) => sum + Number(cell.innerText.replace(',', '')), 0)"))


def test_picture_is_asked_about_while_the_engine_shows_its_work(
    fovea: Fovea, page: Browser, keep_screenshot: Callable[[str], None]
) -> None:
    opened(page, str(fovea.client.base_url))
    assert page.text("#model") == "tiny"
    before = {name: number(page.text(f"[data-graph={name}]")) for name in ("encoder-hits", "decoder-hits")}
    before_replays = {family: replays(page, family) for family in ("encoder", "decoder")}
    page.run(RECORD_GROWTH)

    drop(page, picture(112, 84), picture(56, 56, "blue"))
    has_in_tray(page, 2)
    ask(page, "What is in the pictures?")
    ended(page)

    # The text came in many pieces, each longer than the one before.
    lengths = page.value("window.lengths")
    assert lengths == sorted(lengths)
    assert len(set(lengths)) > 5
    assert len(answer(page)) == lengths[-1]
    assert fact(page, "ttft").endswith((" ms", " s"))
    assert fact(page, "image") == "16"
    assert fact(page, "completion") == "24"
    assert number(fact(page, "prompt")) > 16
    assert fact(page, "ending") == "token limit reached"

    for name, value in before.items():
        page.wait(f"Number(document.querySelector('[data-graph={name}]').innerText.replace(',', '')) > {value}")
    for family, value in before_replays.items():
        assert replays(page, family) > value
        assert number(page.text(f"[data-graph={family}-reserved]")) >= 0
    keep_screenshot("desktop")

    # The next question is about the same pictures, whose tokens are there already.
    ask(page, "And the other one?")
    ended(page, 2)
    assert fact(page, "image", 1) == "16"
    assert number(fact(page, "cached", 1)) > 0
    assert number(fact(page, "prompt", 1)) > number(fact(page, "prompt"))

    page.prefer("dark")
    keep_screenshot("desktop-dark")
    page.resize(PHONE, scale=2, is_mobile=True)
    assert not scrolls_sideways(page)
    keep_screenshot("phone")
    page.click("[data-show=engine]")
    assert not scrolls_sideways(page)
    keep_screenshot("phone-engine")


def test_ledger_sums_to_what_was_requested(fovea: Fovea, page: Browser) -> None:
    opened(page, str(fovea.client.base_url))
    rows = page.value(
        "Object.fromEntries([...document.querySelectorAll('[data-ledger]')]"
        ".map((cell) => [cell.dataset.ledger, cell.innerText]))"
    )
    requested = number(rows.pop("requested"))
    assert requested == 1024
    assert round(sum(number(text) for text in rows.values()), 2) == requested
    exported = {key[1][0]: value for key, value in fovea.metrics().items() if key[0] == "fovea_memory_bytes"}
    assert set(rows) == set(exported)
    assert all(abs(number(rows[name]) - value / (1 << 20)) < 0.01 for name, value in exported.items())
    bar = page.value("[...document.querySelectorAll('.bar > i')].map((part) => part.dataset.component)")
    assert set(bar) == {name for name, value in exported.items() if value > 0}


def test_startup_phases_are_those_of_the_metrics(fovea: Fovea, page: Browser) -> None:
    opened(page, str(fovea.client.base_url))
    shown = page.value("[...document.querySelectorAll('[data-phase].number')].map((cell) => cell.dataset.phase)")
    exported = [key[1][0] for key in fovea.metrics() if key[0] == "fovea_startup_phase_seconds"]
    assert set(shown) == set(exported)
    assert len(shown) >= 5


def test_buckets_are_those_of_the_metrics(fovea: Fovea, page: Browser) -> None:
    opened(page, str(fovea.client.base_url))
    shown = page.value("[...document.querySelectorAll('[data-bucket]')].map((cell) => cell.dataset.bucket)")
    # The metric's labels are bucket and graph.
    exported = ["-".join(reversed(key[1])) for key in fovea.metrics() if key[0] == "fovea_graph_replays_total"]
    assert sorted(shown) == sorted(exported)
