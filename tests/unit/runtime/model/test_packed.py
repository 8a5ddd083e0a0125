"""Products through oneDNN against their plain twin, `F.linear`; towers with packed weights against plain ones."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from runtime.checkpoint import ModelConfig
from runtime.executor.device import CpuDevice
from runtime.model import loader, packed
from runtime.model.layers import Linear
from runtime.model.loader import LoadedModel, load_model
from runtime.model.packed import ROWS, PackedWeight, pieces_of
from runtime.model.qwen2_5_vl_vision import encoder_inputs, patchify
from runtime.model.sdpa import DenseSdpaAttention
from runtime.model.vision_layout import encoder_layout
from tests.unit.runtime.model.test_layers import FLOAT32, fill
from tests.unit.runtime.model.test_text_decoder import whole_prompt

pytestmark = pytest.mark.skipif(not packed.is_available(), reason="this torch has no oneDNN")


@pytest.fixture
def packed_model(tiny_checkpoint: Path, config: ModelConfig) -> LoadedModel:
    model = load_model(tiny_checkpoint, config, dtype=torch.float32, device=torch.device("cpu"))
    model.pack_products()
    return model


def test_rows_are_computed_in_few_numbers() -> None:
    for count in range(1, 4097):
        pieces = pieces_of(count)
        assert set(pieces) <= set(ROWS)
        assert sum(pieces[:-1]) < count <= sum(pieces) <= 2 * count
    assert pieces_of(93) == [96]
    assert pieces_of(264) == [256, 8]
    assert pieces_of(65) == [32, 32, 2]


def test_no_memory_grows_with_new_numbers_of_rows() -> None:
    """oneDNN keeps half a MB for the code of every number of rows that it meets."""
    weight = PackedWeight(torch.randn(384, 256), has_bias=True)
    bias = torch.zeros(384)
    x = torch.randn(600, 256)
    weight.product(x, bias)
    before = CpuDevice().used_bytes()
    for count in range(1, 600):
        weight.product(x[:count], bias)
    assert CpuDevice().used_bytes() - before < 16 * 2**20


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("num_rows", [1, 2, 16, 17, 93, 600])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(48, 96), (100, 60)])
def test_products_are_those_of_the_plain_weight(
    num_inputs: int, num_outputs: int, num_rows: int, has_bias: bool
) -> None:
    weight = torch.randn(num_inputs, num_outputs).t()
    bias = torch.randn(num_outputs) if has_bias else None
    x = torch.randn(num_rows, num_inputs)

    product = PackedWeight(weight, has_bias=has_bias).product(x, bias)

    torch.testing.assert_close(product, F.linear(x, weight, bias), rtol=1e-5, atol=1e-5)


def test_leading_dimensions_and_strides_are_kept() -> None:
    weight = torch.randn(24, 16)
    x = torch.randn(3, 32, 7).transpose(1, 2)[..., :16]

    product = PackedWeight(weight, has_bias=False).product(x, None)

    torch.testing.assert_close(product, F.linear(x, weight), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("keep", [True, False])
def test_packed_linear_gives_the_same(keep: bool) -> None:
    linear = Linear(16, 40, bias=True, **FLOAT32)
    fill(linear)
    rows = [torch.randn(count, 16) for count in (1, 5)]
    expected = [linear(x) for x in rows]

    linear.pack(keep=keep)

    assert (linear.weight.numel() > 0) == keep
    for x, wanted in zip(rows, expected, strict=True):
        torch.testing.assert_close(linear(x), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [1, 5, 40])
def test_packed_decoder_equals_the_plain_one(model: LoadedModel, packed_model: LoadedModel, length: int) -> None:
    token_ids, positions = torch.randint(0, 256, (length,)), torch.arange(length).expand(3, -1)
    logits = []
    for loaded in (model, packed_model):
        text = loaded.text
        assert text is not None
        attention = DenseSdpaAttention()
        attention.plan(whole_prompt(length))
        logits.append(text.logits(text(text.embed(token_ids), positions, attention)))
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [(28, 28), (140, 84)])
def test_packed_encoder_equals_the_plain_one(
    model: LoadedModel, packed_model: LoadedModel, size: tuple[int, int]
) -> None:
    config = model.vision.config
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8))
    patches = patchify(pixels, config.patch_size, config.spatial_merge_size)
    inputs = encoder_inputs(patches, encoder_layout([size], config), device=torch.device("cpu"))
    rows = [loaded.vision(inputs) for loaded in (model, packed_model)]
    torch.testing.assert_close(rows[1], rows[0], rtol=1e-4, atol=1e-4)


def test_packed_weights_are_counted(model: LoadedModel, packed_model: LoadedModel) -> None:
    assert model.text is not None
    grown = packed_model.weight_bytes - model.weight_bytes
    # Packed in place, the encoder takes as much as before; the decoder's products are there twice.
    assert model.text.product_bytes <= grown <= model.text.product_bytes * 1.05


def test_decoder_that_is_too_large_stays_plain(
    tiny_checkpoint: Path, config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(tiny_checkpoint, config, dtype=torch.float32, device=torch.device("cpu"))
    assert model.text is not None
    monkeypatch.setattr(loader, "MAX_SECOND_COPY_BYTES", model.text.product_bytes - 1)
    model.pack_products()
    assert model.text.packed_head is None
    assert not any(module.packed for module in model.text.modules() if isinstance(module, Linear))
    assert all(module.packed for module in model.vision.modules() if isinstance(module, Linear))
