"""Rows in NumPy against their plain twin, `TextDecoder` over `PagedSdpaAttention`, on caches of equal contents."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from runtime.model.batch_decoder import BatchDecoder
from runtime.model.loader import LoadedModel
from runtime.model.qwen2_5_vl_text import TextDecoder
from runtime.model.row_attention import MAX_ROW_LENGTH, RowAttention
from runtime.model.row_decoder import RowDecoder
from runtime.model.sdpa import PagedSdpaAttention
from tests.unit.runtime.model.test_sdpa import Cache, Sequences

Part = tuple[int, int, int]  # sequence, first and last token


class Twins:
    """The decoder in both ways, each with a cache of its own; `run` demands that they agree."""

    def __init__(
        self, text: TextDecoder, lengths: Sequence[int], block_size: int, rows: RowDecoder | BatchDecoder | None = None
    ) -> None:
        config = text.config
        self.text, self.rows = text, rows or RowDecoder(text)
        self.sequences = Sequences(lengths, block_size)
        self.caches = [
            Cache(
                self.sequences.num_blocks,
                block_size,
                num_layers=config.num_hidden_layers,
                kv_heads=config.num_key_value_heads,
                width=config.head_dim,
            )
            for _ in range(2)
        ]
        self.plain = PagedSdpaAttention(self.caches[0], num_layers=config.num_hidden_layers)
        self.row_attention = RowAttention(self.caches[1], num_layers=config.num_hidden_layers)
        self.token_ids = [torch.randint(0, 256, (length,)) for length in lengths]
        # Three axes of positions that differ, as behind a picture.
        self.positions = [torch.stack([torch.arange(n) + 7, torch.arange(n) * 2, torch.arange(n)]) for n in lengths]

    def run(self, step: Sequence[Part], *, num_padding: int = 0) -> None:
        batch = self.sequences.batch(step, num_padding=num_padding)
        padding = torch.zeros(num_padding, dtype=torch.int64)
        ids = torch.cat([*(self.token_ids[index][start:end] for index, start, end in step), padding])
        parts = [self.positions[index][:, start:end] for index, start, end in step]
        positions = torch.cat([*parts, padding.expand(3, -1)], dim=1)
        self.plain.plan(batch)
        expected = self.text(self.text.embed(ids), positions, self.plain)
        self.row_attention.plan(batch)
        hidden = self.rows.forward(self.rows.embed(ids), positions, self.row_attention)
        self.assert_near(hidden, expected)
        self.assert_near(self.rows.logits(hidden), self.text.logits(expected))
        self.assert_near(self.caches[1].blocks, self.caches[0].blocks)

    @staticmethod
    def assert_near(value: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_row_after_row_equals_the_plain_decoder(model: LoadedModel, block_size: int) -> None:
    assert model.text is not None
    twins = Twins(model.text, [21], block_size)
    twins.run([(0, 0, 9)])
    for token in range(9, 21):
        twins.run([(0, token, token + 1)])
        assert twins.row_attention.can_attend_row


def test_rows_between_steps_of_several_sequences(model: LoadedModel) -> None:
    assert model.text is not None
    twins = Twins(model.text, [12, 7], 4)
    for step in (
        [(0, 0, 8)],
        [(0, 8, 9)],
        [(1, 0, 5), (0, 9, 10)],
        [(1, 5, 6), (0, 10, 11)],
        [(1, 6, 7)],
        [(0, 11, 12)],
    ):
        twins.run(step)
        assert twins.row_attention.can_attend_row == (len(step) == 1 and step[0][2] - step[0][1] == 1)


def test_first_token_alone(model: LoadedModel) -> None:
    assert model.text is not None
    Twins(model.text, [1], 4).run([(0, 0, 1)])


def test_longest_rows_and_those_beyond(model: LoadedModel) -> None:
    assert model.text is not None
    twins = Twins(model.text, [MAX_ROW_LENGTH + 2], 16)
    twins.run([(0, 0, MAX_ROW_LENGTH - 1)])
    served = []
    for token in range(MAX_ROW_LENGTH - 1, MAX_ROW_LENGTH + 2):
        twins.run([(0, token, token + 1)])
        served.append(twins.row_attention.can_attend_row)
    assert served == [True, False, False]


def test_planned_row_may_be_attended_the_plain_way(model: LoadedModel) -> None:
    assert model.text is not None
    twins = Twins(model.text, [6], 4)
    twins.run([(0, 0, 5)])
    batch, positions = twins.sequences.batch([(0, 5, 6)]), twins.positions[0][:, 5:]
    embeds = model.text.embed(twins.token_ids[0][5:])
    twins.plain.plan(batch)
    twins.row_attention.plan(batch)
    outputs = [model.text(embeds, positions, attention) for attention in (twins.plain, twins.row_attention)]
    assert torch.equal(outputs[0], outputs[1])


def test_what_a_forward_gave_outlives_the_next_one(model: LoadedModel) -> None:
    assert model.text is not None
    twins = Twins(model.text, [3], 4)
    kept: list[tuple[Tensor, Tensor]] = []
    for token in range(3):
        twins.row_attention.plan(twins.sequences.batch([(0, token, token + 1)]))
        embeds = twins.rows.embed(twins.token_ids[0][token : token + 1])
        hidden = twins.rows.forward(embeds, twins.positions[0][:, token : token + 1], twins.row_attention)
        kept.append((hidden, hidden.clone()))
    assert all(torch.equal(given, copy) for given, copy in kept)


def test_gates_far_below_zero_close_without_a_warning(model: LoadedModel, recwarn: pytest.WarningsRecorder) -> None:
    assert model.text is not None
    twins = Twins(model.text, [2], 4)
    embeds = model.text.embed(twins.token_ids[0][:1])
    saved = [layer.mlp.gate_up.weight.data.clone() for layer in model.text.layers]
    try:
        for layer in model.text.layers:
            layer.mlp.gate_up.weight.data.mul_(1e4)
        batch, positions = twins.sequences.batch([(0, 0, 1)]), twins.positions[0][:, :1]
        twins.plain.plan(batch)
        twins.row_attention.plan(batch)
        expected = model.text(embeds, positions, twins.plain)
        hidden = twins.rows.forward(embeds, positions, twins.row_attention)
    finally:
        for layer, weight in zip(model.text.layers, saved, strict=True):
            layer.mlp.gate_up.weight.data.copy_(weight)
    twins.assert_near(hidden, expected)
    assert not recwarn.list
