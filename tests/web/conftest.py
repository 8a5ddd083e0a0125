"""One browser for all of the page's tests, and a page that must be clean: no complaint, no foreign address."""

import re
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from PIL import Image

from tests.http_server import RunningServer, running_server
from tests.web.browser import DESKTOP, Browser, running_browser

ARTIFACTS = Path(__file__).parents[2] / "artifacts"
# The browser's own words for an answer that is no success, and for a poll of a server that a test has ended.
EXPECTED = re.compile(
    r"Failed to load resource: the server responded with a status of \d+"
    r"|^http://127\.0\.0\.1:\d+/web/status - Failed to load resource: net::ERR_"
)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Generator[Browser, None, None]:
    with running_browser(tmp_path_factory.mktemp("browser")) as running:
        yield running


@pytest.fixture
def page(browser: Browser) -> Generator[Browser, None, None]:
    """The browser, reset; at the end nothing must have been complained of, and nobody else been asked."""
    browser.resize(DESKTOP)
    browser.prefer("light")
    browser.open("about:blank")
    browser.console()
    browser.requested_urls()
    yield browser
    origin = browser.value("location.origin")
    urls = {url for url in browser.requested_urls() if url != "about:blank"}
    complaints = [line for line in browser.console() if not EXPECTED.search(line)]
    if origin.startswith("http"):
        browser.run("sessionStorage.clear();")
    browser.open("about:blank")
    assert complaints == []
    assert urls, "the page asked for nothing"
    assert all(url.startswith((f"{origin}/", f"blob:{origin}/")) for url in urls), urls


@pytest.fixture
def keep_screenshot(browser: Browser) -> Callable[[str], None]:
    """Keeps what is to be seen, by name, for people to look at: of the window's size, and not one colour."""

    def keep(name: str) -> None:
        path = ARTIFACTS / f"{name}.png"
        browser.screenshot(path)
        with Image.open(path) as shown:
            width, height, scale = browser.value("[innerWidth, innerHeight, devicePixelRatio]")
            assert shown.size == (width * scale, height * scale)
            assert len(shown.convert("RGB").getcolors(1 << 24) or ()) > 10

    return keep


@pytest.fixture(scope="module")
def server(tiny_checkpoint: Path) -> Generator[RunningServer, None, None]:
    """The application over an engine that replays."""
    with running_server(tiny_checkpoint) as running:
        yield running
