from dataclasses import dataclass, field
from pathlib import Path

import torch

from runtime.kernel_modules import compile_ahead, modules


@dataclass
class FakeModule:
    """A module whose compilation is a file."""

    folder: Path
    name: str
    builds: list[str] = field(default_factory=list)

    @property
    def aot_path(self) -> Path:
        return self.folder / "aot" / self.name / f"{self.name}.so"

    @property
    def jit_library_path(self) -> Path:
        return self.folder / "jit" / f"{self.name}.so"

    def build(self, verbose: bool) -> None:
        self.builds.append(self.name)
        self.jit_library_path.parent.mkdir(exist_ok=True)
        self.jit_library_path.write_bytes(b"compiled")


def test_modules_are_those_of_the_attention(tmp_path: Path) -> None:
    asked = []

    def generate(*arguments: object) -> FakeModule:
        asked.append(arguments)
        return FakeModule(tmp_path, str(len(asked)))

    assert len(modules(generate)) == 2
    # Query, KV and output of one type, pages numbered in int32, and none of the extras.
    assert asked == [
        ("fa2", dtype, dtype, dtype, torch.int32, 128, 128, 0, False, False, False)
        for dtype in (torch.bfloat16, torch.float16)
    ]


def test_compiled_modules_lie_where_flashinfer_looks_first_and_are_made_once(tmp_path: Path) -> None:
    specs = [FakeModule(tmp_path, "a"), FakeModule(tmp_path, "b")]
    for _ in range(2):
        libraries = compile_ahead(specs)
        assert libraries == [spec.aot_path for spec in specs]
        assert all(path.read_bytes() == b"compiled" for path in libraries)
    assert [spec.builds for spec in specs] == [["a"], ["b"]]
