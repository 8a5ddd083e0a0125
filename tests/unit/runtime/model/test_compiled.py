"""Compiled layers: equal to eager ones, and compiled twice in all, whatever the layers and the rows."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from runtime.checkpoint import read_model_config
from runtime.model import qwen2_5_vl_text, qwen2_5_vl_vision
from runtime.model.attention import AttentionBatch
from runtime.model.compiled import compiled
from runtime.model.loader import LoadedModel, load_model
from runtime.model.qwen2_5_vl_vision import encoder_inputs
from runtime.model.sdpa import DenseSdpaAttention
from runtime.model.vision_layout import encoder_layout

CPU = torch.device("cpu")
SIDE = 28


@pytest.fixture
def model(tiny_checkpoint: Path) -> Iterator[LoadedModel]:
    torch._dynamo.reset()
    counters.clear()
    yield load_model(tiny_checkpoint, read_model_config(tiny_checkpoint), dtype=torch.float32, device=CPU)
    torch._dynamo.reset()


def text_forward(model: LoadedModel, num_tokens: int) -> Tensor:
    assert model.text is not None
    attention = DenseSdpaAttention()
    attention.plan(
        AttentionBatch(
            query_start_loc_cpu=np.array([0, num_tokens], np.int32),
            seq_lens_cpu=np.array([num_tokens], np.int32),
            block_tables_BN=torch.zeros(1, 1, dtype=torch.int32),
            slot_mapping_T=torch.arange(num_tokens),
        )
    )
    embeds = torch.randn(num_tokens, model.text.config.hidden_size, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        return model.text.forward(embeds, torch.arange(num_tokens).expand(3, -1), attention)


def vision_forward(model: LoadedModel, sizes: list[tuple[int, int]], capacity: int) -> Tensor:
    config = model.vision.config
    layout = encoder_layout(sizes, config, capacity_tokens=capacity, max_items=4)
    generator = torch.Generator().manual_seed(2)
    patches = torch.randint(0, 256, (capacity * 4, 3 * 14 * 14), generator=generator, dtype=torch.uint8)
    with torch.inference_mode():
        return model.vision.forward(encoder_inputs(patches, layout, device=CPU))


def test_one_row_and_any_number_of_rows_are_all_that_the_decoder_compiles(model: LoadedModel) -> None:
    assert model.text is not None
    lengths = (40, 8, 1, 2, 131, 1, 3)
    expected = [text_forward(model, length) for length in lengths]
    model.text.between = compiled(qwen2_5_vl_text.between, backend="eager")
    for length, reference in zip(lengths, expected, strict=True):
        torch.testing.assert_close(text_forward(model, length), reference, rtol=1e-4, atol=1e-4)
    assert counters["stats"]["unique_graphs"] == 2


def test_all_budgets_of_the_encoder_share_one_compilation(model: LoadedModel) -> None:
    shapes = [([(2 * SIDE, 3 * SIDE)], 16), ([(SIDE, SIDE), (4 * SIDE, 4 * SIDE)], 24), ([(SIDE, SIDE)], 7)]
    expected = [vision_forward(model, *shape) for shape in shapes]
    model.vision.between = compiled(qwen2_5_vl_vision.between, backend="eager")
    for shape, reference in zip(shapes, expected, strict=True):
        torch.testing.assert_close(vision_forward(model, *shape), reference, rtol=1e-4, atol=1e-4)
    assert counters["stats"]["unique_graphs"] == 1


def test_compile_layers_puts_inductor_in_place(model: LoadedModel) -> None:
    assert model.text is not None
    model.compile_layers()
    assert model.text.between is not qwen2_5_vl_text.between
    assert model.vision.between is not qwen2_5_vl_vision.between
