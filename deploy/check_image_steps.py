"""Runs the Dockerfile's own commands in a clean directory, without a container: `python -m deploy.check_image_steps`.

What a build would do with the CPU target's instructions, as far as a plain user can do it: the build context under
.dockerignore's rules, the wheel, the environment from the constraints, the health check, the command, and SIGTERM. The
absolute paths of the image (/src, /wheels, /opt/fovea, /cache) become folders of the directory. Base images, users and
volumes are the linter's and the tests'.

Prints one line a step, and ends with one line of JSON. `--offline` takes the dependencies from this interpreter's own
environment instead of installing them anew (the wheel itself is built and installed all the same).
"""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCKERFILE = ROOT / "Dockerfile"
TARGET = "cpu"
# Folders of the image, and where they lie here.
FOLDERS = ("/src", "/wheels", "/opt/fovea", "/cache")

Instruction = tuple[str, str]


class StepError(RuntimeError):
    """A step of the image did not do what it must; says which, and how it ended."""


def instructions(text: str) -> dict[str, list[Instruction]]:
    """The instructions of each stage of a Dockerfile, continued lines joined."""
    joined = re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*\n", "", text))
    stages: dict[str, list[Instruction]] = {}
    stage: list[Instruction] = []
    for line in filter(None, map(str.strip, joined.splitlines())):
        word, rest = re.split(r"\s+", line, maxsplit=1)
        if word == "FROM":
            stage = stages.setdefault(re.split(r"\s+", rest)[-1], [])
        stage.append((word, re.sub(r"\s+", " ", rest)))
    return stages


def copy_context(destination: Path) -> list[str]:
    """Copies what .dockerignore lets into the build; returns the names at the top."""
    rules = [
        line for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line and line[0] != "#"
    ]  # fmt: skip
    assert rules[0] == "*", "everything is left out but what is named"
    names = [rule[1:] for rule in rules if rule.startswith("!")]
    for name in names:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, destination / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, destination / name)
    return names


class Image:
    """A directory in which the image's folders lie. Runs commands as the image's build and its container would."""

    def __init__(self, root: Path, *, is_offline: bool) -> None:
        self.root = root
        self.is_offline = is_offline
        self.steps: dict[str, float] = {}
        for folder in FOLDERS:
            (root / folder.strip("/")).mkdir(parents=True, exist_ok=True)

    def translate(self, text: str) -> str:
        """Absolute paths of the image as paths of the directory."""
        for folder in FOLDERS:
            text = re.sub(rf"(?<![\w./]){folder}(?=[/:\s\"')]|$)", str(self.root / folder.strip("/")), text)
        return text

    def run(self, step: str, command: str, environment: dict[str, str] | None = None) -> str:
        """Runs a shell command of the Dockerfile.

        Raises:
            StepError: it failed.
        """
        command = self.translate(re.sub(r"--mount=\S+ ", "", command))
        started = time.perf_counter()
        done = subprocess.run(
            ["sh", "-c", command], cwd=self.root / "src", env={**os.environ, **(environment or {})},
            capture_output=True, text=True, timeout=1800, check=False,
        )  # fmt: skip
        self.done(step, time.perf_counter() - started)
        if done.returncode != 0:
            raise StepError(f"{step} ended with {done.returncode}: {command}\n{done.stdout}{done.stderr}")
        return done.stdout

    def done(self, step: str, seconds: float) -> None:
        self.steps[step] = round(seconds, 2)
        print(f"{step:<12} {seconds:7.2f} s", flush=True)


def build(image: Image, stages: dict[str, list[Instruction]]) -> None:
    """The stages `wheel` and `cpu-environment`."""
    names = copy_context(image.root / "src")
    print(f"context      {', '.join(names)}")
    (pip_wheel,) = [rest for word, rest in stages["wheel"] if word == "RUN"]
    python = shlex.quote(sys.executable)
    # The bare names of the base image's Python are this one here.
    image.run("wheel", re.sub(r"\bpip wheel\b", f"{python} -m pip wheel", pip_wheel))
    for word, rest in stages[f"{TARGET}-environment"]:
        if word != "RUN":
            continue
        if "-m venv" in rest:
            flags = " --system-site-packages --without-pip" if image.is_offline else ""
            image.run("venv", re.sub(r"^python -m venv", f"{python} -m venv{flags}", rest))
            if image.is_offline:
                see_packages_of_this_interpreter(image)
        elif image.is_offline:
            target = f"{python} -m pip --python /opt/fovea/bin/python"
            image.run("install", f"{target} install --quiet --no-deps --no-index /wheels/*.whl")
        else:
            index = dict(re.findall(r"(\w+)=(\S+)", " ".join(rest for word, rest in stages[f"{TARGET}-environment"])))
            image.run("install", rest, {"TORCH_INDEX_URL": index["TORCH_INDEX_URL"]})


def see_packages_of_this_interpreter(image: Image) -> None:
    """Lets the new environment import what is installed here, below its own packages."""
    (packages,) = (image.root / "opt/fovea/lib").glob("python*/site-packages")
    here = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (packages / "here.pth").write_text("\n".join(here) + "\n", encoding="utf-8")


def serve(image: Image, stages: dict[str, list[Instruction]], model: str) -> None:
    """The stage `cpu`: its environment, its command, its health check, its signal.

    Raises:
        StepError: it does not become healthy, writes outside its volume, or does not end with 0.
    """
    own = stages[TARGET]
    environment = {
        name: image.translate(value)
        for word, rest in own
        if word == "ENV"
        for name, value in (pair.split("=", 1) for pair in shlex.split(rest))
    }
    environment["PATH"] = environment["PATH"].replace("${PATH}", os.environ["PATH"])
    environment["HOME"] = str(image.root)
    entry = json.loads(next(rest for word, rest in own if word == "ENTRYPOINT"))
    command = json.loads(next(rest for word, rest in own if word == "CMD"))
    health = json.loads(next(rest for word, rest in own if word == "HEALTHCHECK").partition("CMD ")[2])
    port = free_port()
    # A container has its own network; here the port must be free. Nothing else of the caller's settings comes in.
    settings = {"FOVEA_PORT": str(port), "FOVEA_MODEL": model, "FOVEA_MEMORY_BYTES": "1GiB"}
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("FOVEA_", "PYTHON"))}
    environment = {**clean, **environment, **settings}
    started = time.perf_counter()
    log = image.root / "log"
    with open(log, "wb") as output:
        process = subprocess.Popen([*entry, *command], cwd=image.root / "cache", env=environment, stderr=output)
    try:
        while subprocess.run(health, env=environment, capture_output=True, check=False).returncode != 0:
            if process.poll() is not None or time.perf_counter() - started > 300:
                raise StepError(f"it did not become healthy:\n{log.read_text(encoding='utf-8')[-3000:]}")
            time.sleep(0.25)
        image.done("healthy", time.perf_counter() - started)
        started = time.perf_counter()
        process.send_signal(signal.SIGTERM)
        if (code := process.wait(60)) != 0:
            raise StepError(f"it ended with {code} after SIGTERM:\n{log.read_text(encoding='utf-8')[-3000:]}")
        image.done("stopped", time.perf_counter() - started)
    finally:
        process.kill()
        process.wait()


def check_package(image: Image) -> None:
    """
    Raises:
        StepError: the installed package is not the one of the wheel.
    """
    where = image.run("package", "cd /cache && /opt/fovea/bin/python -c 'import server; print(server.__file__)'")
    if not where.startswith(str(image.root / "opt/fovea")):
        raise StepError(f"the package comes from {where}")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--offline", action="store_true", help="use the packages of this interpreter")
    parser.add_argument("--model", default="demo", help="what to serve [demo]")
    arguments = parser.parse_args()
    stages = instructions(DOCKERFILE.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(prefix="fovea-image-") as folder:
        image = Image(Path(folder), is_offline=arguments.offline)
        try:
            build(image, stages)
            check_package(image)
            serve(image, stages, arguments.model)
        except StepError as error:
            print(error, file=sys.stderr)
            return 1
    print(json.dumps({"target": TARGET, "offline": arguments.offline, "seconds": image.steps}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
