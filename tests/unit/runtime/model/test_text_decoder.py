"""The text decoder against transformers' forward: text, one image, three images, on the plain attention."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration

from runtime.model.attention import AttentionBatch, DecoderAttention
from runtime.model.loader import LoadedModel
from runtime.model.qwen2_5_vl_text import DecoderLayer
from runtime.model.sdpa import DenseSdpaAttention


def whole_prompt(length: int) -> AttentionBatch:
    return AttentionBatch(
        query_start_loc_cpu=np.array([0, length], np.int32),
        seq_lens_cpu=np.array([length], np.int32),
        block_tables_BN=torch.empty(1, 0, dtype=torch.int32),
        slot_mapping_T=torch.arange(length),
    )


def prompt_with_images(golden: Qwen2_5_VLForConditionalGeneration, grids: list[tuple[int, int]]) -> tuple[Tensor, ...]:
    """Token ids [T], pixel values and grids as transformers takes them; images of grids of tokens, between texts."""
    config = golden.config
    generator = torch.Generator().manual_seed(len(grids))

    def text(length: int) -> Tensor:
        return torch.randint(0, 256, (length,), generator=generator)

    pieces = [text(5)]
    for rows, columns in grids:
        start, end = torch.tensor([config.vision_start_token_id]), torch.tensor([config.vision_end_token_id])
        pieces += [start, torch.full((rows * columns,), config.image_token_id), end, text(4)]
    num_patches = sum(rows * columns * 4 for rows, columns in grids)
    pixel_values = torch.randn(num_patches, 3 * 2 * 14 * 14, generator=generator)
    grid_thw = torch.tensor([(1, rows * 2, columns * 2) for rows, columns in grids]).reshape(-1, 3)
    return torch.cat(pieces), pixel_values, grid_thw


@pytest.mark.parametrize("grids", [[], [(5, 7)], [(2, 3), (4, 4), (1, 2)]])
def test_logits_equal_transformers(
    model: LoadedModel, golden: Qwen2_5_VLForConditionalGeneration, grids: list[tuple[int, int]]
) -> None:
    token_ids, pixel_values, grid_thw = prompt_with_images(golden, grids)
    is_image = token_ids == golden.config.image_token_id
    inputs = {"input_ids": token_ids[None], "mm_token_type_ids": is_image.int()[None]}
    if grids:
        inputs |= {"pixel_values": pixel_values, "image_grid_thw": grid_thw}
        positions, _ = golden.model.get_rope_index(inputs["input_ids"], inputs["mm_token_type_ids"], grid_thw)
        positions = positions[:, 0]
    else:
        positions = torch.arange(len(token_ids)).expand(3, -1)
    expected = golden(**inputs).logits[0]

    assert model.text is not None
    embeds = model.text.embed(token_ids)
    if grids:
        embeds[is_image] = golden.model.visual(pixel_values, grid_thw).pooler_output
    attention = DenseSdpaAttention()
    attention.plan(whole_prompt(len(token_ids)))
    logits = model.text.logits(model.text(embeds, positions, attention))

    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wanted", [[8], [0, 3, 8], list(range(9))])
def test_wanted_rows_are_those_of_the_whole_step(model: LoadedModel, wanted: list[int]) -> None:
    assert model.text is not None
    embeds = model.text.embed(torch.randint(0, 256, (9,)))
    positions, rows = torch.arange(9).expand(3, -1), torch.tensor(wanted)
    attention = DenseSdpaAttention()
    attention.plan(whole_prompt(9))
    whole = model.text(embeds, positions, attention)
    torch.testing.assert_close(model.text(embeds, positions, attention, rows), whole[rows], rtol=1e-5, atol=1e-5)


class PlainKernels:
    """Kernels that are the layers themselves."""

    def __init__(self) -> None:
        self.num_steps = 0

    def warm_up(self, layer: DecoderLayer) -> None: ...

    def forward(
        self,
        layers: Sequence[DecoderLayer],
        hidden_TD: Tensor,
        cos: Tensor,
        sin: Tensor,
        attention: DecoderAttention,
        rows_S: Tensor | None = None,
    ) -> Tensor:
        self.num_steps += 1
        for layer in layers:
            hidden_TD = layer.after(hidden_TD, attention.forward(layer.index, *layer.before(hidden_TD, cos, sin)))
        return hidden_TD if rows_S is None else hidden_TD[rows_S]


@pytest.mark.parametrize("wanted", [None, [8], [0, 3, 8]])
def test_kernels_stand_in_for_the_layers_and_are_told_the_wanted_rows(
    model: LoadedModel, wanted: list[int] | None
) -> None:
    assert model.text is not None
    embeds = model.text.embed(torch.randint(0, 256, (9,)))
    positions, rows = torch.arange(9).expand(3, -1), None if wanted is None else torch.tensor(wanted)
    attention, kernels = DenseSdpaAttention(), PlainKernels()
    attention.plan(whole_prompt(9))
    expected = model.text(embeds, positions, attention, rows)
    model.text.use_kernels(row=None, rows=kernels)
    try:
        found = model.text(embeds, positions, attention, rows)
    finally:
        model.text.use_kernels(row=None, rows=None)
    assert kernels.num_steps == 1
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_sequences_of_one_step_do_not_see_each_other(model: LoadedModel) -> None:
    assert model.text is not None
    token_ids = torch.randint(0, 256, (12,), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]).expand(3, -1)
    attention = DenseSdpaAttention()

    attention.plan(
        AttentionBatch(
            query_start_loc_cpu=np.array([0, 5, 12], np.int32),
            seq_lens_cpu=np.array([5, 7], np.int32),
            block_tables_BN=torch.empty(2, 0, dtype=torch.int32),
            slot_mapping_T=torch.arange(12),
        )
    )
    together = model.text(model.text.embed(token_ids), positions, attention)
    attention.plan(whole_prompt(7))
    alone = model.text(model.text.embed(token_ids[5:]), positions[:, 5:], attention)

    torch.testing.assert_close(together[5:], alone, rtol=1e-5, atol=1e-5)


def test_positions_of_each_axis_matter(model: LoadedModel) -> None:
    assert model.text is not None
    embeds = model.text.embed(torch.arange(8))
    attention = DenseSdpaAttention()
    attention.plan(whole_prompt(8))
    base = torch.arange(8).expand(3, -1)
    expected = model.text(embeds, base, attention)

    for axis in range(3):
        moved = base.clone()
        moved[axis] *= 3
        assert not torch.allclose(model.text(embeds, moved, attention), expected, atol=1e-3)


def test_logits_are_float32_whatever_the_weights_are(model: LoadedModel) -> None:
    assert model.text is not None
    logits = model.text.logits(torch.zeros(2, model.text.config.hidden_size))

    assert logits.dtype == torch.float32
    assert logits.shape == (2, model.text.config.vocab_size)
