"""The Dockerfile's own commands, run in a clean directory: wheel, environment, health check, command, SIGTERM."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.check_image_steps import (
    DOCKERFILE,
    TARGETS,
    Image,
    StepError,
    check_modules,
    check_package,
    copy_context,
    instructions,
)
from tests.deploy.manifests import ROOT


@pytest.mark.parametrize(
    ("target", "steps"),
    [
        ("cpu", ["wheel", "venv", "install", "package", "healthy", "stopped"]),
        ("cuda", ["wheel", "venv", "install", "modules", "package", "healthy", "stopped"]),
    ],
)
def test_steps_of_the_image_work_in_a_clean_directory(target: str, steps: list[str], tiny_checkpoint: Path) -> None:
    """With the packages of this environment; without `--offline` the script installs them anew."""
    flags = ["--target", target, "--offline", "--model", str(tiny_checkpoint)]
    command = [sys.executable, "-m", "deploy.check_image_steps", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["target"] == target
    assert list(result["seconds"]) == steps


def test_context_holds_no_tests_and_no_caches(tmp_path: Path) -> None:
    copy_context(tmp_path)
    assert (tmp_path / "server" / "app.py").exists()
    assert not (tmp_path / "tests").exists()
    assert not list(tmp_path.rglob("__pycache__"))


def test_paths_of_the_image_become_paths_of_the_directory(tmp_path: Path) -> None:
    image = Image(tmp_path, target="cpu", is_offline=True)
    text = image.translate("/opt/fovea/bin/pip install --constraint /src/constraints.txt /wheels/*.whl /opt/foveal")
    assert text == (
        f"{tmp_path}/opt/fovea/bin/pip install --constraint {tmp_path}/src/constraints.txt "
        f"{tmp_path}/wheels/*.whl /opt/foveal"
    )


@pytest.mark.parametrize("target", TARGETS)
def test_every_command_of_the_stages_is_run(target: str) -> None:
    """What the script does not know would be an error there; only the base image's packages are left out."""
    stages = instructions(DOCKERFILE.read_text(encoding="utf-8"))
    commands = [rest for stage in ("wheel", f"{target}-environment") for word, rest in stages[stage] if word == "RUN"]
    expected = ["pip wheel", "-m venv", "pip install", *(["-m runtime.kernel_modules"] if target == "cuda" else [])]
    assert len(commands) == len(expected)
    assert all(part in command for part, command in zip(expected, commands, strict=True))


def test_modules_left_out_and_workspaces_left_behind_are_noticed(tmp_path: Path) -> None:
    image = Image(tmp_path, target="cuda", is_offline=True)
    package = tmp_path / "opt/fovea/lib/python3/site-packages/flashinfer"
    package.mkdir(parents=True)
    with pytest.raises(StepError, match="no compiled module"):
        check_modules(image)
    (package / "data/aot/a").mkdir(parents=True)
    (package / "data/aot/a/a.so").touch()
    with pytest.raises(StepError, match="left its workspace"):
        check_modules(image)
    (tmp_path / "tmp/flashinfer").rmdir()
    check_modules(image)


def test_weights_that_are_baked_in_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = Image(tmp_path, target="cpu", is_offline=True)
    package = tmp_path / "opt/fovea/lib/python3/site-packages/runtime"
    (package / "demo").mkdir(parents=True)
    (package / "demo/model.safetensors").touch()
    monkeypatch.setattr(image, "run", lambda step, command: str(package))
    check_package(image)
    (package / "model.safetensors").touch()
    with pytest.raises(StepError, match="baked in"):
        check_package(image)
