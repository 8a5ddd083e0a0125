"""Guards of the project's structure: who imports whom, how long files are, what they are called."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("server", "runtime")
MAX_LINES = 600

# The runtime's public face, as its docstring says, and what the server may start the engine with.
PUBLIC_RUNTIME = (
    "runtime.checkpoint",
    "runtime.config",
    "runtime.request",
    "runtime.stats",
    "runtime.client",
    "runtime.processing",
    "runtime.process_client",
    "runtime.log",
    "runtime.percentiles",
)
# From where to where imports are forbidden, within the runtime.
FORBIDDEN = {
    "runtime": ("server", "fastapi", "uvicorn", "starlette", "pydantic", "prometheus_client", "transformers"),
    "runtime.scheduler": ("torch", "runtime.executor", "runtime.model", "runtime.engine", "runtime.startup"),
    "runtime.model": ("runtime.executor", "runtime.scheduler", "runtime.engine", "runtime.startup"),
    "runtime.executor": ("runtime.engine", "runtime.startup"),
    "runtime.processing": ("torch", "runtime.executor", "runtime.model", "runtime.scheduler", "runtime.engine"),
    "server": ("torch", "transformers"),
}
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "base", "misc"}


def modules() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def all_python() -> list[Path]:
    folders = [ROOT / name for name in (*PACKAGES, "tests", "benchmarks", "training", "deploy", "examples")]
    found = (path for folder in folders if folder.is_dir() for path in folder.rglob("*.py"))
    # What `make test-clients` installs is others'.
    return sorted(path for path in found if "node_modules" not in path.parts)


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> set[str]:
    """Every module that a file names in an import, wherever in the file it stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_go_one_way(package: str) -> None:
    for path in modules():
        if not is_within(name_of(path), package):
            continue
        for imported in imports_of(path):
            for forbidden in FORBIDDEN[package]:
                assert not is_within(imported, forbidden), f"{name_of(path)} imports {imported}"


def test_server_knows_only_the_public_face_of_the_runtime() -> None:
    for path in (ROOT / "server").rglob("*.py"):
        for imported in imports_of(path):
            if is_within(imported, "runtime") and imported != "runtime":
                assert any(is_within(imported, public) for public in PUBLIC_RUNTIME), f"{path.name} imports {imported}"


def test_server_process_imports_neither_torch_nor_transformers() -> None:
    heavy = ("torch", "transformers", "torchvision", "scipy", "pandas")
    code = f"import sys, server.app, server.cli, server.serve; print([m for m in {heavy} if m in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert ended.stdout.strip() == "[]"


def test_command_line_imports_lean() -> None:
    code = "import sys, server.cli; print('fastapi' in sys.modules, 'uvicorn' in sys.modules, 'numpy' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert ended.stdout.strip() == "False False False"


def test_files_are_short() -> None:
    for path in all_python():
        num_lines = len(path.read_text(encoding="utf-8").splitlines())
        assert num_lines <= MAX_LINES, f"{path.relative_to(ROOT)} has {num_lines} lines; the limit is {MAX_LINES}"


def test_files_are_called_what_they_hold() -> None:
    for path in all_python():
        assert path.stem not in FORBIDDEN_NAMES, path
        assert not path.stem.endswith(("_utils", "_helpers")), path


def test_package_files_hold_no_code() -> None:
    for path in modules():
        if path.name == "__init__.py":
            body = ast.parse(path.read_text(encoding="utf-8")).body
            assert all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in body), path


def test_modules_say_what_they_know() -> None:
    for path in modules():
        if path.name == "__init__.py":
            continue
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        assert docstring, f"{name_of(path)} has no docstring"
        assert len(docstring) >= 20, f"{name_of(path)}: {docstring!r}"


def test_no_notes_to_ourselves_are_left() -> None:
    marks = tuple(mark[::-1] for mark in ("ODOT", "EMXIF", "rorrEdetnemelpmItoN"))
    for path in all_python():
        text = path.read_text(encoding="utf-8")
        assert not any(mark in text for mark in marks), path


def test_test_modules_have_names_of_their_own() -> None:
    stems = [path.stem for path in (ROOT / "tests").rglob("test_*.py")]
    doubled = {stem for stem in stems if stems.count(stem) > 1}
    folders = {path.parent for path in (ROOT / "tests").rglob("test_*.py") if path.stem in doubled}
    assert all((folder / "__init__.py").exists() for folder in folders), doubled
