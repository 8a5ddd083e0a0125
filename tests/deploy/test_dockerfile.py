"""The container file: linted, and in agreement with the application, the package and the manifests."""

import json
import re
import subprocess

import pytest

from server.service import REVISION_VARIABLE
from server.settings import load_settings
from tests.deploy.manifests import BASE, ROOT, answers, objects_of, pod_of, tool

DOCKERFILE = ROOT / "Dockerfile"
TARGETS = ("cpu", "cuda")
CACHES = ("HF_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE")

Instruction = tuple[str, str]
targets = pytest.mark.parametrize("target", TARGETS)


def parse(text: str) -> tuple[dict[str, str], dict[str, list[Instruction]]]:
    """Global build arguments, and the instructions of each named stage, continued lines joined."""
    joined = re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*\n", "", text))
    arguments: dict[str, str] = {}
    stages: dict[str, list[Instruction]] = {}
    stage: list[Instruction] | None = None
    for line in filter(None, (line.strip() for line in joined.splitlines())):
        word, rest = re.split(r"\s+", line, maxsplit=1)
        if word == "FROM":
            image, _, name = re.split(r"\s+", rest)
            stage = stages.setdefault(name, [("FROM", image)])
        elif stage is None:
            assert word == "ARG", line
            key, value = rest.split("=", 1)
            arguments[key] = value
        else:
            stage.append((word, re.sub(r"\s+", " ", rest)))
    return arguments, stages


ARGUMENTS, STAGES = parse(DOCKERFILE.read_text(encoding="utf-8"))


def lineage(stage: str) -> list[Instruction]:
    """Instructions of a stage after those of the stages that it is built on."""
    parent = STAGES[stage][0][1]
    return [*(lineage(parent) if parent in STAGES else ()), *STAGES[stage]]


def values(stage: str, word: str) -> list[str]:
    return [rest for name, rest in lineage(stage) if name == word]


def environment(stage: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for line in values(stage, "ENV") for pair in line.split())


def test_hadolint_finds_nothing() -> None:
    done = subprocess.run(
        [tool("hadolint"), "--failure-threshold", "style", str(DOCKERFILE)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_base_images_are_pinned() -> None:
    assert set(TARGETS) <= set(STAGES)
    for name, stage in STAGES.items():
        image = stage[0][1]
        if image not in STAGES:
            image = ARGUMENTS[image.removeprefix("${").removesuffix("}")]
            repository, _, tag = image.partition(":")
            assert repository, name
            assert re.search(r"\d+\.\d+\.\d+", tag), f"{name} is built on {image}, which is not pinned to a release"


@targets
def test_runs_as_a_number_that_is_not_root(target: str) -> None:
    user, group = values(target, "USER")[-1].split(":")
    security = pod_of(objects_of(BASE))["securityContext"]
    assert (int(user), int(group)) == (security["runAsUser"], security["runAsGroup"])
    assert int(user) > 0
    words = [word for word, _ in STAGES[target]]
    assert "RUN" not in words[words.index("USER") :], "a step after USER"


@targets
def test_health_check_asks_for_what_the_application_serves(target: str) -> None:
    health = values(target, "HEALTHCHECK")[-1]
    command = json.loads(health.partition("CMD ")[2])
    assert command[:2] == ["python", "-c"]
    compile(command[2], "HEALTHCHECK", "exec")
    path = re.findall(r"'(/[a-z/]+)'", command[2])
    assert path == ["/health"]
    assert answers("/health")["/health"].status_code == 200
    port = str(load_settings({}, environ={}).port)
    assert f"'FOVEA_PORT', '{port}'" in command[2]
    assert values(target, "EXPOSE") == [port]


@targets
def test_starts_the_command_of_the_package(target: str) -> None:
    assert json.loads(values(target, "ENTRYPOINT")[-1]) == ["fovea"]
    assert json.loads(values(target, "CMD")[-1]) == ["serve", "--host", "0.0.0.0"]
    assert 'fovea = "server.cli:main"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert "/opt/fovea/bin" in environment(target)["PATH"]


@targets
def test_caches_lie_on_the_volume(target: str) -> None:
    volume = values(target, "VOLUME")[-1]
    assert all(environment(target)[name].startswith(f"{volume}/") for name in CACHES)
    mounts = pod_of(objects_of(BASE))["containers"][0]["volumeMounts"]
    assert volume in {mount["mountPath"] for mount in mounts}


@targets
def test_labels_name_title_licence_and_version(target: str) -> None:
    names = set(re.findall(r"org\.opencontainers\.image\.(\w+)=", " ".join(values(target, "LABEL"))))
    assert names >= {"title", "description", "licenses", "version", "revision"}
    version = re.search(r'(?m)^version = "(.+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert version is not None
    assert f"VERSION={version[1]}" in values(target, "ARG")


def alike(instructions: list[Instruction]) -> list[Instruction]:
    """Instructions without what the targets' own nature makes different: names of stages and bases, the word for the
    device, the time for a start, the Python of the base, and where torch comes from."""
    text = "\n".join(f"{word} {rest}" for word, rest in instructions if word not in ("FROM", "ARG"))
    for pattern, replacement in (
        (r"\b(cpu|cuda)-environment\b", "environment"),
        (r"\((CPU|CUDA)\)", "(device)"),
        (r"--start-period=\d+s", "--start-period"),
        (r"\bpython3\.12 -m venv", "python -m venv"),
        (r' --extra-index-url "\$\{TORCH_INDEX_URL\}"', ""),
        (r'wheel="\$\(echo /wheels/\*\.whl\)" && ', ""),
        (r'"\$\{wheel\}\[cuda\]"', "/wheels/*.whl"),
    ):
        text = re.sub(pattern, replacement, text)
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in text.splitlines())]


def test_targets_are_installed_by_the_same_lines() -> None:
    cpu, cuda = alike(STAGES["cpu-environment"]), alike(STAGES["cuda-environment"])
    assert any("pip install" in rest for _, rest in cpu)
    assert cuda[: len(cpu)] == cpu
    # After them, in the CUDA image alone.
    assert ["-m runtime.kernel_modules" in rest for _, rest in cuda[len(cpu) :]] == [True]


def test_targets_run_by_the_same_lines() -> None:
    assert alike(STAGES["cpu"]) == alike(STAGES["cuda"])
    assert environment("cpu") == environment("cuda"), "what the build needs stays in the build"
    starts = [re.findall(r"--start-period=(\d+)s", values(target, "HEALTHCHECK")[-1]) for target in TARGETS]
    assert [int(seconds) for (seconds,) in starts] == [120, 600]


def test_cpu_image_has_no_compiler_and_no_cuda() -> None:
    assert STAGES["cpu"][0][1] == "${PYTHON_IMAGE}"
    assert "slim" in ARGUMENTS["PYTHON_IMAGE"]
    for stage in ("wheel", "cpu-environment", "cpu"):
        assert not any("apt-get" in rest for rest in values(stage, "RUN")), "a compiler could come with it"
    assert any("/whl/cpu" in rest for rest in values("cpu-environment", "ARG"))


def test_cuda_image_carries_compiled_modules_and_a_compiler() -> None:
    compiling = [rest for rest in values("cuda-environment", "RUN") if "-m runtime.kernel_modules" in rest]
    assert len(compiling) == 1
    assert (ROOT / "runtime" / "kernel_modules.py").exists()
    # Into the package, not into the volume: a volume hides what the image has there.
    assert "FLASHINFER_WORKSPACE_BASE=/tmp/" in compiling[0]
    assert any(rest.startswith("FLASHINFER_CUDA_ARCH_LIST=") for rest in values("cuda-environment", "ARG"))
    order = [(word, rest) for word, rest in STAGES["cuda-environment"] if word == "RUN"]
    assert order[-1][1] == compiling[0], "compiled before the package is installed"
    # nvcc and a host compiler; with Python's headers, `--compile` builds its launchers too.
    assert "devel" in ARGUMENTS["CUDA_IMAGE"]
    packages = " ".join(rest for word, rest in lineage("cuda") if word == "RUN" and "apt-get install" in rest)
    assert "python3.12-dev" in packages.split()


@targets
def test_image_says_from_which_commit_it_was_built(target: str) -> None:
    assert environment(target)[REVISION_VARIABLE] == "${REVISION}"
    assert "REVISION=unknown" in values(target, "ARG")


@targets
def test_dependencies_are_constrained(target: str) -> None:
    installs = [rest for rest in values(f"{target}-environment", "RUN") if "pip install" in rest]
    assert installs
    assert all("--constraint /src/constraints.txt" in rest for rest in installs)
    assert not any("--no-deps" in rest for rest in installs)


def test_build_context_holds_what_the_wheel_needs_and_nothing_else() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").split("\n")
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    kept = {rule[1:] for rule in rules if rule.startswith("!")}
    assert kept == {"pyproject.toml", "constraints.txt", "README.md", "LICENSE", "server", "runtime"}
    assert all((ROOT / name).exists() for name in kept)
