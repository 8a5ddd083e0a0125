"""Compiles FlashInfer's modules that the decoder uses, ahead of time: `python -m runtime.kernel_modules`, in the image.

Needs nvcc, and no GPU: `FLASHINFER_CUDA_ARCH_LIST` says for which ones. The compiled modules go where FlashInfer looks
before it compiles (its package's `data/aot`), so that a pod with a read-only root compiles none of these again; others,
such as those of another head width, it compiles at first use into `FLASHINFER_WORKSPACE_BASE`. Knows no attention.
"""

import importlib
import itertools
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

DTYPES = (torch.bfloat16, torch.float16)
# The head width of the models that are served (Qwen2.5-VL).
HEAD_DIMS = (128,)
# One module of `fa2` serves prefill and decode; `fa3` is a choice of one GPU generation and compiles at first use.
BACKENDS = ("fa2",)
NO_POSITIONS, NO_WINDOW, NO_SOFT_CAP, NO_FP16_REDUCTION = 0, False, False, False


class Module(Protocol):
    """FlashInfer's `JitSpec`, as far as it is used here."""

    @property
    def name(self) -> str: ...
    @property
    def aot_path(self) -> Path: ...
    @property
    def jit_library_path(self) -> Path: ...
    def build(self, verbose: bool) -> None: ...


def modules(
    generate: Callable[..., Module],
    *,
    backends: Sequence[str] = BACKENDS,
    dtypes: Sequence[torch.dtype] = DTYPES,
    head_dims: Sequence[int] = HEAD_DIMS,
) -> list[Module]:
    """What the attention over paged KV asks FlashInfer for. `generate`: its `gen_batch_prefill_module`."""
    return [
        generate(
            backend, dtype, dtype, dtype, torch.int32, head_dim, head_dim,
            NO_POSITIONS, NO_WINDOW, NO_SOFT_CAP, NO_FP16_REDUCTION,
        )
        for backend, dtype, head_dim in itertools.product(backends, dtypes, head_dims)
    ]  # fmt: skip


def compile_ahead(specs: Iterable[Module]) -> list[Path]:
    """Compiles what is not there yet, and puts it where FlashInfer looks first. Returns the libraries."""
    libraries = []
    for spec in specs:
        if not spec.aot_path.exists():
            started = time.perf_counter()
            spec.build(verbose=False)
            spec.aot_path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(spec.jit_library_path, spec.aot_path)
            print(f"{time.perf_counter() - started:7.1f} s  {spec.name}", flush=True)
        libraries.append(spec.aot_path)
    return libraries


def main() -> int:
    try:
        jit: Any = importlib.import_module("flashinfer.jit")
    except ModuleNotFoundError as error:
        print(f"{error.name} is not installed: the extra [cuda] brings FlashInfer", file=sys.stderr)
        return 1
    compile_ahead(modules(jit.gen_batch_prefill_module))
    return 0


if __name__ == "__main__":
    sys.exit(main())
