"""The page as files: headers, entity tags, what is in the package, and `--no-web`. No browser here."""

import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Generator
from pathlib import Path

import pytest
from PIL import Image

from runtime.stats import BUCKET_STATES, GRAPH_BACKENDS, GRAPH_FAMILIES, MISS_REASONS
from server.page import FOLDER, INDEX, Page, matches
from tests.http_server import RunningServer, running_server
from tests.web.browser import programs

ROOT = Path(__file__).parents[2]
MAX_LINES = 400


@pytest.fixture(scope="module")
def server(tiny_checkpoint: Path) -> Generator[RunningServer, None, None]:
    with running_server(tiny_checkpoint) as running:
        yield running


def urls() -> list[str]:
    return ["/", *(f"/web/{path.name}" for path in sorted(FOLDER.iterdir()) if path.is_file() and path.name != INDEX)]


@pytest.mark.parametrize("url", urls())
def test_each_file_is_served_with_its_type_and_headers(server: RunningServer, url: str) -> None:
    response = server.get(url)
    assert response.status_code == 200
    assert response.content == (FOLDER / (INDEX if url == "/" else url.rpartition("/")[2])).read_bytes()
    kinds = {"": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    assert response.headers["content-type"].split(";")[0] == kinds[url.rpartition(".")[2] if "." in url else ""]
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert response.headers["x-frame-options"] == "DENY"
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["form-action"] == policy["base-uri"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in response.headers["content-security-policy"]
    head = server.http.head(url)
    assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", response.headers["etag"])


def test_files_are_not_sent_twice(server: RunningServer) -> None:
    first = server.get("/web/app.js")
    assert first.headers["cache-control"] == "no-cache"
    again = server.http.get("/web/app.js", headers={"if-none-match": f'"other", W/{first.headers["etag"]}'})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    assert server.http.get("/web/app.js", headers={"if-none-match": '"other"'}).status_code == 200
    assert server.get("/web/style.css").headers["etag"] != first.headers["etag"]
    assert matches("*", '"x"')


@pytest.mark.parametrize(
    "name", ["nothing.js", "index.html", "..%2fpage.py", "%2e%2e%2fpage.py", "index.html.bak", "a/b", ""]
)
def test_nothing_else_is_served(server: RunningServer, name: str) -> None:
    response = server.get(f"/web/{name}")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"


def test_without_the_page_its_routes_are_unknown(tiny_checkpoint: Path) -> None:
    with running_server(tiny_checkpoint, web=False) as server:
        for url in ("/", "/web/app.js", "/web/status"):
            response = server.get(url)
            assert response.status_code == 404
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert server.get("/v1/models").status_code == 200


def test_installation_without_the_page_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="--no-web"):
        Page(tmp_path)


def test_pages_markup_holds_no_script_style_or_foreign_address() -> None:
    markup = (FOLDER / INDEX).read_text(encoding="utf-8")
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:|<script(?![^>]*\ssrc=)", markup)
    for path in FOLDER.iterdir():
        addresses = set(re.findall(r"https?://[\w./]+", path.read_text(encoding="utf-8")))
        assert addresses <= {"http://www.w3.org/2000/svg"}, path.name


def test_every_module_is_announced_and_every_file_used() -> None:
    markup = (FOLDER / INDEX).read_text(encoding="utf-8")
    modules = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.js")}
    assert set(re.findall(r'(?:href|src)="web/([\w.]+)"', markup)) == {p.name for p in FOLDER.iterdir()} - {INDEX}
    imported = {name for text in modules.values() for name in re.findall(r'from "\./([\w.]+)"', text)}
    assert imported | {"app.js"} == set(modules)


def test_page_has_words_for_everything_that_graphs_can_say() -> None:
    text = (FOLDER / "graphs.js").read_text(encoding="utf-8")
    known = {
        "FAMILIES": GRAPH_FAMILIES,
        "ITEMS": GRAPH_FAMILIES,
        "BACKENDS": GRAPH_BACKENDS,
        "STATES": BUCKET_STATES,
        "REASONS": {reason for reasons in MISS_REASONS.values() for reason in reasons},
    }
    for name, values in known.items():
        (body,) = re.findall(rf"const {name} = {{(.*?)}};", text, re.DOTALL)
        assert set(re.findall(r"(\w+): \"", body)) == set(values), name


def test_readme_shows_the_page() -> None:
    (path,) = re.findall(r"!\[.*?\]\((docs/.*?\.png)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    with Image.open(ROOT / path) as shown:
        shown.load()
        assert shown.format == "PNG"
        assert shown.width >= 1000


def test_documents_name_the_screenshots_that_are_kept() -> None:
    kept = re.findall(
        r'keep_screenshot\("([\w-]+)"\)', (ROOT / "tests/web/test_page_real.py").read_text(encoding="utf-8")
    )
    told = re.findall(r"`([\w-]+)\.png`", (ROOT / "docs/page.md").read_text(encoding="utf-8"))
    assert kept
    assert told == kept


def test_files_are_short() -> None:
    for path in FOLDER.iterdir():
        assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES, path.name


def test_missing_browser_is_an_error_in_ci_and_a_reason_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="chromium-driver"):
        programs()
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match="chromium-driver"):
        programs()


def test_wheel_holds_the_page(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("server", "runtime"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", "."]
    subprocess.run([*build, str(source)], cwd=tmp_path, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("server/web/")}
    assert packed == {f"server/web/{path.name}" for path in FOLDER.iterdir() if path.is_file()}
