"""Runs the Dockerfile's own commands in a clean directory, without a container: `python -m deploy.check_image_steps`.

What a build would do with a target's instructions, as far as a plain user can do it: the build context under
.dockerignore's rules, the wheel, the environment from the constraints, the compiled modules, the health check, the
command, and SIGTERM. The absolute paths of the image (/src, /wheels, /opt/fovea, /cache) become folders of the
directory. Base images, their packages, users and volumes are the linter's and the tests'.

Prints one line a step, and ends with one line of JSON. `--offline` takes the dependencies from this interpreter's own
environment instead of installing them anew (the wheel itself is built and installed all the same); of the target `cuda`
it then has FlashInfer's compilation done by a stand-in, which needs neither FlashInfer nor nvcc.
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
TARGETS = ("cpu", "cuda")
# Folders of the image, and where they lie here.
FOLDERS = ("/src", "/wheels", "/opt/fovea", "/cache", "/tmp/flashinfer")
# Where a container with a read-only root can write.
WRITABLE = ("cache", "tmp")

# `flashinfer.jit` for the compilation's command line: it wants the GPUs' names, and builds where it is told to.
STAND_IN = """
import os, pathlib, re

class Spec:
    def __init__(self, name):
        self.name = name
        self.aot_path = pathlib.Path(__file__).parent / "data" / "aot" / name / (name + ".so")
        self.jit_library_path = pathlib.Path(os.environ["FLASHINFER_WORKSPACE_BASE"]) / (name + ".so")

    def build(self, verbose):
        architectures = os.environ["FLASHINFER_CUDA_ARCH_LIST"].split()
        assert architectures and all(re.fullmatch(r"[0-9]+[.][0-9]+[af]?", one) for one in architectures)
        self.jit_library_path.write_bytes(b"compiled")

def gen_batch_prefill_module(backend, dtype, *rest):
    return Spec(backend + "_" + str(dtype).removeprefix("torch."))
"""

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

    def __init__(self, root: Path, *, target: str, is_offline: bool) -> None:
        self.root = root
        self.target = target
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
    """The stage `wheel` and the target's `-environment`."""
    names = copy_context(image.root / "src")
    print(f"context      {', '.join(names)}")
    (pip_wheel,) = [rest for word, rest in stages["wheel"] if word == "RUN"]
    python = shlex.quote(sys.executable)
    # The bare names of the base image's Python are this one here.
    image.run("wheel", re.sub(r"\bpip wheel\b", f"{python} -m pip wheel", pip_wheel))
    own = stages[f"{image.target}-environment"]
    arguments = dict(shlex.split(rest)[0].split("=", 1) for word, rest in own if word == "ARG")
    for word, rest in own:
        if word != "RUN":
            continue
        if "-m venv" in rest:
            flags = " --system-site-packages --without-pip" if image.is_offline else ""
            image.run("venv", re.sub(r"^python\S* -m venv", f"{python} -m venv{flags}", rest))
            if image.is_offline:
                see_packages_of_this_interpreter(image)
        elif "pip install" in rest:
            if image.is_offline:
                pip = f"{python} -m pip --python /opt/fovea/bin/python install --quiet --no-deps --no-index"
                rest = rest.replace("/opt/fovea/bin/pip install", pip)
            image.run("install", rest, arguments)
        else:
            assert "-m runtime.kernel_modules" in rest, f"an unknown step: {rest}"
            if image.is_offline:
                package = site_packages(image) / "flashinfer"
                package.mkdir()
                (package / "__init__.py").touch()
                (package / "jit.py").write_text(STAND_IN, encoding="utf-8")
            image.run("modules", rest, arguments)
            check_modules(image)


def check_modules(image: Image) -> None:
    """
    Raises:
        StepError: FlashInfer's compiled modules are not in its package, or what they were built from was left behind.
    """
    compiled = list(site_packages(image).glob("flashinfer/data/aot/**/*.so"))
    if not compiled:
        raise StepError("no compiled module lies in FlashInfer's package")
    if (image.root / "tmp/flashinfer").exists():
        raise StepError("the compilation left its workspace behind")


def site_packages(image: Image) -> Path:
    (folder,) = (image.root / "opt/fovea/lib").glob("python*/site-packages")
    return folder


def see_packages_of_this_interpreter(image: Image) -> None:
    """Lets the new environment import what is installed here, below its own packages."""
    here = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site_packages(image) / "here.pth").write_text("\n".join(here) + "\n", encoding="utf-8")


def serve(image: Image, stages: dict[str, list[Instruction]], model: str) -> None:
    """The target's own stage: its environment, its command, its health check, its signal.

    Raises:
        StepError: it does not become healthy, writes where a read-only container cannot, or does not end with 0.
    """
    own = stages[image.target]
    environment = {
        name: image.translate(value)
        for word, rest in own
        if word == "ENV"
        for name, value in (pair.split("=", 1) for pair in shlex.split(rest))
    }
    environment["PATH"] = environment["PATH"].replace("${PATH}", os.environ["PATH"])
    environment["HOME"] = str(image.root / "tmp")
    (image.root / "tmp").mkdir(exist_ok=True)
    entry = json.loads(next(rest for word, rest in own if word == "ENTRYPOINT"))
    command = json.loads(next(rest for word, rest in own if word == "CMD"))
    health = json.loads(next(rest for word, rest in own if word == "HEALTHCHECK").partition("CMD ")[2])
    port = free_port()
    # A container has its own network; here the port must be free. Nothing else of the caller's settings comes in.
    settings = {"FOVEA_PORT": str(port), "FOVEA_MODEL": model, "FOVEA_MEMORY_BYTES": "1GiB"}
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("FOVEA_", "PYTHON"))}
    environment = {**clean, **environment, **settings}
    before = set(image.root.rglob("*"))
    started = time.perf_counter()
    log = image.root / "tmp" / "log"
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
    written = {path.relative_to(image.root) for path in set(image.root.rglob("*")) - before}
    if outside := sorted(str(path) for path in written if path.parts[0] not in WRITABLE):
        raise StepError(f"it wrote outside of {', '.join(WRITABLE)}: {', '.join(outside[:5])}")


def check_package(image: Image) -> None:
    """
    Raises:
        StepError: the installed package is not the one of the wheel, or has weights beyond the demo model's.
    """
    where = image.run("package", "cd /cache && /opt/fovea/bin/python -c 'import server; print(server.__file__)'")
    if not where.startswith(str(image.root / "opt/fovea")):
        raise StepError(f"the package comes from {where}")
    weights = [path.relative_to(site_packages(image)) for path in site_packages(image).rglob("*.safetensors")]
    if any(path.parent != Path("runtime/demo") for path in weights):
        raise StepError(f"weights are baked in: {weights}")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", choices=TARGETS, default="cpu", help="which image [cpu]")
    parser.add_argument("--offline", action="store_true", help="use the packages of this interpreter")
    parser.add_argument("--model", default="demo", help="what to serve [demo]")
    arguments = parser.parse_args()
    stages = instructions(DOCKERFILE.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(prefix="fovea-image-") as folder:
        image = Image(Path(folder), target=arguments.target, is_offline=arguments.offline)
        try:
            build(image, stages)
            check_package(image)
            serve(image, stages, arguments.model)
        except StepError as error:
            print(error, file=sys.stderr)
            return 1
    print(json.dumps({"target": image.target, "offline": arguments.offline, "seconds": image.steps}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
