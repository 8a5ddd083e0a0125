"""The Triton kernels for steps of one row on a GPU: equal to the layers that they stand in for, eager and captured."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from runtime.model.layers import Place
from runtime.model.qwen2_5_vl_text import DecoderLayer
from tests.gpu.places import BFLOAT16, CUDA, relative_error
from tests.unit.runtime.model.triton_row_layers import ODD, filled_layer, step

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


@pytest.fixture(scope="module")
def kernels() -> Any:
    pytest.importorskip("triton")
    from runtime.model.triton_row import TritonRow

    return TritonRow(waits=torch.cuda.get_device_capability() >= (9, 0))


@torch.inference_mode()
def test_kernels_agree_with_the_layer(kernels: Any, layer: tuple[Any, DecoderLayer]) -> None:
    config, plain = layer
    hidden, attended, cos, sin = step(config, PLACE)
    ours = (*kernels.before(plain, hidden, cos, sin), kernels.after(plain, hidden, attended))
    theirs = (*plain.before(hidden, cos, sin), plain.after(hidden, attended))
    for one, other in zip(ours, theirs, strict=True):
        assert relative_error(one, other) < TOLERANCE


@torch.inference_mode()
def test_a_captured_chain_gives_what_it_gives_eagerly(kernels: Any, layer: tuple[Any, DecoderLayer]) -> None:
    """Each kernel starts before the one whose result it reads has ended, and must wait for it all the same."""
    config, plain = layer
    hidden, attended, cos, sin = step(config, PLACE)

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
