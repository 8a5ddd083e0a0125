"""The decoder's Triton kernels on a GPU: equal to the layers that they stand in for, eager and captured."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from runtime.model.layers import Place
from runtime.model.qwen2_5_vl_text import DecoderLayer
from tests.gpu.places import BFLOAT16, CUDA, relative_error
from tests.unit.runtime.model.filled_layer import ODD, filled_layer, step

pytestmark = pytest.mark.gpu

PLACE: Place = {"dtype": BFLOAT16, "device": CUDA}
# The published 3B model's layer.
PUBLISHED = replace(
    ODD,
    hidden_size=2048,
    intermediate_size=11008,
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=128,
    mrope_section=(16, 24, 24),
)
# bfloat16 keeps 8 bits, and the layer rounds where the kernels do not.
TOLERANCE = 2e-2


@pytest.fixture(scope="module", params=[ODD, PUBLISHED], ids=["odd", "published"])
def layer(request: pytest.FixtureRequest) -> tuple[Any, DecoderLayer]:
    return request.param, filled_layer(request.param, PLACE)


# Kernels, and for how many rows.
CASES = [("row", 1), ("rows", 1), ("rows", 2), ("rows", 7), ("rows", 300)]


def build(name: str) -> Any:
    pytest.importorskip("triton")
    from runtime.model.triton_any_rows import TritonAnyRows
    from runtime.model.triton_one_row import TritonOneRow

    return TritonOneRow(waits=torch.cuda.get_device_capability() >= (9, 0)) if name == "row" else TritonAnyRows()


@pytest.mark.parametrize(("name", "num_rows"), CASES)
@torch.inference_mode()
def test_kernels_agree_with_the_layer(name: str, num_rows: int, layer: tuple[Any, DecoderLayer]) -> None:
    kernels = build(name)
    config, plain = layer
    hidden, attended, cos, sin = step(config, PLACE, num_rows)
    ours = (*kernels.before(plain, hidden, cos, sin), kernels.after(plain, hidden, attended))
    theirs = (*plain.before(hidden, cos, sin), plain.after(hidden, attended))
    for one, other in zip(ours, theirs, strict=True):
        assert relative_error(one, other) < TOLERANCE


@pytest.mark.parametrize(("name", "num_rows"), CASES)
@torch.inference_mode()
def test_a_captured_chain_gives_what_it_gives_eagerly(
    name: str, num_rows: int, layer: tuple[Any, DecoderLayer]
) -> None:
    """For one row each kernel starts before the one whose result it reads has ended, and must wait for it."""
    kernels = build(name)
    config, plain = layer
    hidden, attended, cos, sin = step(config, PLACE, num_rows)

    def chain() -> torch.Tensor:
        rows = hidden
        for _ in range(8):
            rows = kernels.after(plain, rows, attended)
            q_THE, _, _ = kernels.before(plain, rows, cos, sin)
            rows = kernels.after(plain, rows, q_THE.contiguous())
        return rows

    eager = chain().clone()
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for _ in range(20):
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, eager)


class Slots:
    """In the place of attention: tells where keys and values go, and gives queries back."""

    def __init__(self, cache: torch.Tensor, slots_T: torch.Tensor) -> None:
        self.cache, self.slots_T = cache, slots_T

    def place(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cache, self.slots_T

    def attend(self, layer: int, q_THD: torch.Tensor) -> torch.Tensor:
        return q_THD.contiguous()


@pytest.mark.parametrize(("name", "num_rows"), CASES)
@torch.inference_mode()
def test_keys_and_values_go_to_their_slots(name: str, num_rows: int, layer: tuple[Any, DecoderLayer]) -> None:
    config, plain = layer
    hidden, _, cos, sin = step(config, PLACE, num_rows)
    block_size, num_blocks = 16, 40
    shape = (num_blocks, 2, block_size, config.num_key_value_heads, config.head_dim)
    cache = torch.zeros(shape, dtype=BFLOAT16, device=CUDA)
    slots = torch.randperm(num_blocks * block_size, generator=torch.Generator().manual_seed(0))[:num_rows].to(CUDA)
    found = build(name).forward([plain], hidden, cos, sin, Slots(cache, slots))
    q_THE, k_TKE, v_TKE = plain.before(hidden, cos, sin)
    assert relative_error(found, plain.after(hidden, q_THE)) < TOLERANCE
    for kind, rows in enumerate((k_TKE, v_TKE)):
        assert relative_error(cache[slots // block_size, kind, slots % block_size], rows) < TOLERANCE
    assert int((cache[:, 0].abs().sum((-1, -2)) > 0).sum()) == num_rows
    wanted = torch.tensor([num_rows - 1, 0][:num_rows], device=CUDA)
    some = build(name).forward([plain], hidden, cos, sin, Slots(cache, slots), wanted)
    assert relative_error(some, plain.after(hidden, q_THE)[wanted]) < TOLERANCE
