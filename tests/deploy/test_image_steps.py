"""The Dockerfile's own commands, run in a clean directory: wheel, environment, health check, command, SIGTERM."""

import json
import subprocess
import sys
from pathlib import Path

from deploy.check_image_steps import DOCKERFILE, Image, copy_context, instructions
from tests.deploy.manifests import ROOT


def test_steps_of_the_image_work_in_a_clean_directory(tiny_checkpoint: Path) -> None:
    """With the packages of this environment; `python -m deploy.check_image_steps` alone installs them anew."""
    command = [sys.executable, "-m", "deploy.check_image_steps", "--offline", "--model", str(tiny_checkpoint)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert list(result["seconds"]) == ["wheel", "venv", "install", "package", "healthy", "stopped"]


def test_context_holds_no_tests_and_no_caches(tmp_path: Path) -> None:
    copy_context(tmp_path)
    assert (tmp_path / "server" / "app.py").exists()
    assert not (tmp_path / "tests").exists()
    assert not list(tmp_path.rglob("__pycache__"))


def test_paths_of_the_image_become_paths_of_the_directory(tmp_path: Path) -> None:
    image = Image(tmp_path, is_offline=True)
    text = image.translate("/opt/fovea/bin/pip install --constraint /src/constraints.txt /wheels/*.whl /opt/foveal")
    assert text == (
        f"{tmp_path}/opt/fovea/bin/pip install --constraint {tmp_path}/src/constraints.txt "
        f"{tmp_path}/wheels/*.whl /opt/foveal"
    )


def test_every_command_of_the_cpu_stages_is_run() -> None:
    stages = instructions(DOCKERFILE.read_text(encoding="utf-8"))
    commands = [rest for stage in ("wheel", "cpu-environment") for word, rest in stages[stage] if word == "RUN"]
    assert len(commands) == 3
    assert any("pip wheel" in command for command in commands)
    assert any("-m venv" in command for command in commands)
    assert any("pip install" in command for command in commands)
