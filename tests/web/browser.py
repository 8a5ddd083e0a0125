"""Drives headless Chromium through chromedriver, in the WebDriver protocol's own words (W3C), over httpx.

The few commands that the page's tests need are a few lines each: no client library, nothing that downloads a browser.
Knows nothing of the page.
"""

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.bench_startup import free_port
from tests.http_server import wait_until

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
KEYS = {"Tab": "\ue004", "Enter": "\ue007", "Escape": "\ue00c", "Shift": "\ue008", "Space": " "}
DESKTOP = (1280, 860)
PHONE = (390, 844)

# Chromium must not look for anything outside: updates, field trials, its own services.
ARGUMENTS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    *("--disable-default-apps", "--no-default-browser-check", "--no-proxy-server", "--hide-scrollbars"),
    *("--lang=en-US", "--force-color-profile=srgb", "--font-render-hinting=none"),
)


def programs() -> tuple[str, str]:
    """Paths of Chromium and chromedriver. Where they are not installed tests are skipped, but in CI they fail."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        reason = "Chromium is not installed (Debian: apt-get install chromium chromium-driver)"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return chromium, driver


class Browser:
    """One window. Elements are named by CSS selectors; `wait` polls a JavaScript expression."""

    def __init__(self, client: httpx.Client, session: str) -> None:
        self._client = client
        self._path = f"/session/{session}"

    def command(self, method: str, path: str, body: Any = None) -> Any:
        content = None if method == "GET" else json.dumps(body or {})
        response = self._client.request(method, self._path + path, content=content)
        value = response.json()["value"]
        assert response.status_code == 200, value
        return value

    def open(self, url: str) -> None:
        self.command("POST", "/url", {"url": url})

    def run(self, code: str, *arguments: Any) -> Any:
        """What a JavaScript function body returns; a promise is awaited."""
        return self.command("POST", "/execute/sync", {"script": code, "args": list(arguments)})

    def value(self, expression: str) -> Any:
        return self.run(f"return {expression};")

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0])?.innerText ?? '';", selector))

    def wait(self, expression: str, seconds: float = 20) -> None:
        """Until the expression is truthy; a failure shows what the page says."""
        end = time.monotonic() + seconds
        while not self.value(expression):
            assert time.monotonic() < end, f"{expression} never came true: {self.text('body')!r}\n{self.console()}"
            time.sleep(0.03)

    def element(self, selector: str) -> str:
        return str(self.command("POST", "/element", {"using": "css selector", "value": selector})[ELEMENT])

    def click(self, selector: str) -> None:
        self.command("POST", f"/element/{self.element(selector)}/click")

    def type(self, selector: str, text: str) -> None:
        """Types into an element; into an input for files, `text` is their paths, a line each."""
        self.command("POST", f"/element/{self.element(selector)}/value", {"text": text})

    def press(self, *keys: str, held: str | None = None) -> None:
        """Presses keys where the focus is, by name (`KEYS`) or as characters."""
        actions: list[dict[str, str]] = [{"type": "keyDown", "value": KEYS[held]}] if held else []
        for key in keys:
            for character in KEYS.get(key, key):
                actions += [{"type": "keyDown", "value": character}, {"type": "keyUp", "value": character}]
        if held:
            actions.append({"type": "keyUp", "value": KEYS[held]})
        self.command("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def devtools(self, method: str, **parameters: Any) -> Any:
        """A command of the DevTools protocol."""
        return self.command("POST", "/goog/cdp/execute", {"cmd": method, "params": parameters})

    def resize(self, size: tuple[int, int], *, scale: float = 1, is_mobile: bool = False) -> None:
        """The viewport, in CSS pixels, and how many device pixels each is."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride",
            width=size[0],
            height=size[1],
            deviceScaleFactor=scale,
            mobile=is_mobile,
        )
        self.devtools("Emulation.setTouchEmulationEnabled", enabled=is_mobile)

    def prefer(self, scheme: str) -> None:
        """`light` or `dark`; and nothing moves, so that a screenshot shows an end, not a way."""
        features = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
        self.devtools("Emulation.setEmulatedMedia", features=[{"name": n, "value": v} for n, v in features.items()])

    def screenshot(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self.command("GET", "/screenshot")))

    def console(self) -> list[str]:
        """What the browser complained of since the last call: errors, violated policies, failed loads."""
        return [entry["message"] for entry in self.command("POST", "/se/log", {"type": "browser"})]

    def requested_urls(self) -> list[str]:
        """Every URL that the page asked for since the last call, whatever became of it."""
        messages = [
            json.loads(entry["message"])["message"]
            for entry in self.command("POST", "/se/log", {"type": "performance"})
        ]
        return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]


@contextmanager
def chromedriver(driver: str) -> Generator[httpx.Client, None, None]:
    port = free_port()
    process = subprocess.Popen([driver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
            wait_until(lambda: _answers(client))
            yield client
    finally:
        process.terminate()
        process.wait(20)


def _answers(client: httpx.Client) -> bool:
    try:
        return bool(client.get("/status").json()["value"]["ready"])
    except httpx.TransportError:
        return False


@contextmanager
def running_browser(profile: Path) -> Generator[Browser, None, None]:
    """A browser with a new profile in an empty folder."""
    chromium, driver = programs()
    capabilities = {
        "browserName": "chrome",
        "goog:chromeOptions": {"binary": chromium, "args": [*ARGUMENTS, f"--user-data-dir={profile}"]},
        "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
    }
    with chromedriver(driver) as client:
        response = client.post("/session", json={"capabilities": {"alwaysMatch": capabilities}})
        assert response.status_code == 200, response.text
        browser = Browser(client, response.json()["value"]["sessionId"])
        try:
            browser.resize(DESKTOP)
            browser.open("about:blank")
            yield browser
        finally:
            browser.command("DELETE", "")


def tokens_of(checkpoint: Path, text: str) -> list[int]:
    """Tokens that read as a text, for engines that replay."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    return list(tokenizer.encode(text, add_special_tokens=False).ids)
