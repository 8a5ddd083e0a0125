"""Rows of several sequences, between NumPy and oneDNN, against their plain twin, on caches of equal contents."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime.checkpoint import ModelConfig
from runtime.model import packed
from runtime.model.batch_decoder import MAX_ROWS, BatchDecoder
from runtime.model.loader import LoadedModel, load_model
from runtime.model.row_attention import MAX_GATHERED_TOKENS, MAX_ROW_LENGTH
from runtime.model.row_decoder import RowDecoder
from tests.unit.runtime.model.test_row_decoder import Part, Twins

pytestmark = pytest.mark.skipif(not packed.is_available(), reason="this torch has no oneDNN")


@pytest.fixture
def decoder(tiny_checkpoint: Path, config: ModelConfig) -> BatchDecoder:
    model = load_model(tiny_checkpoint, config, dtype=torch.float32, device=torch.device("cpu"))
    model.pack_products()
    assert model.text is not None
    return BatchDecoder(RowDecoder(model.text))


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("num_sequences", [2, 3, 8, 13, MAX_ROWS])
def test_rows_of_several_sequences_equal_the_plain_decoder(
    num_sequences: int, block_size: int, model: LoadedModel, decoder: BatchDecoder
) -> None:
    assert model.text is not None
    first = [1 + 5 * index % 23 for index in range(num_sequences)]
    twins = Twins(model.text, [length + 4 for length in first], block_size, decoder)
    twins.run([(index, 0, length) for index, length in enumerate(first)])
    for step in range(4):
        twins.run([(index, length + step, length + step + 1) for index, length in enumerate(first)])
        assert twins.row_attention.can_attend_rows


def test_equal_lengths_need_no_mask(model: LoadedModel, decoder: BatchDecoder) -> None:
    assert model.text is not None
    twins = Twins(model.text, [6, 6], 4, decoder)
    twins.run([(0, 0, 5), (1, 0, 5)])
    twins.run([(1, 5, 6), (0, 5, 6)])


def test_padding_sequences_change_nothing(model: LoadedModel, decoder: BatchDecoder) -> None:
    assert model.text is not None
    twins = Twins(model.text, [9, 7, 12], 4, decoder)
    twins.run([(0, 0, 8), (1, 0, 6), (2, 0, 11)])
    twins.run([(0, 8, 9), (1, 6, 7), (2, 11, 12)], num_padding=1)
    assert twins.row_attention.can_attend_rows


def test_fewer_rows_after_more_are_not_touched_by_those(model: LoadedModel, decoder: BatchDecoder) -> None:
    assert model.text is not None
    twins = Twins(model.text, [9] * 16, 4, decoder)
    twins.run([(index, 0, 7) for index in range(16)])
    twins.run([(index, 7, 8) for index in range(16)])
    twins.run([(index, 8, 9) for index in (5, 2, 11)])


def test_steps_of_prompts_and_of_one_row_in_between(model: LoadedModel, decoder: BatchDecoder) -> None:
    assert model.text is not None
    twins = Twins(model.text, [12, 9], 4, decoder)
    served = []
    for step in (
        [(0, 0, 8)],
        [(0, 8, 9)],
        [(1, 0, 5), (0, 9, 10)],
        [(1, 5, 6), (0, 10, 11)],
        [(1, 6, 7)],
        [(0, 11, 12), (1, 7, 8)],
    ):
        twins.run(step)
        served.append((twins.row_attention.can_attend_row, twins.row_attention.can_attend_rows))
    assert served == [(False, False), (True, False), (False, False), (False, True), (True, False), (False, True)]


def test_what_is_too_long_or_too_much_goes_the_plain_way(model: LoadedModel, decoder: BatchDecoder) -> None:
    assert model.text is not None
    twins = Twins(model.text, [MAX_ROW_LENGTH + 1, 3], 16, decoder)
    twins.run([(0, 0, MAX_ROW_LENGTH - 1), (1, 0, 1)])
    twins.run([(0, MAX_ROW_LENGTH - 1, MAX_ROW_LENGTH), (1, 1, 2)])
    assert twins.row_attention.can_attend_rows
    twins.run([(0, MAX_ROW_LENGTH, MAX_ROW_LENGTH + 1), (1, 2, 3)])
    assert not twins.row_attention.can_attend_rows

    count = MAX_GATHERED_TOKENS // MAX_ROW_LENGTH + 1
    twins = Twins(model.text, [MAX_ROW_LENGTH] + [2] * (count - 1), 16, decoder)
    twins.run([(0, 0, MAX_ROW_LENGTH - 1), *((index, 0, 1) for index in range(1, count))])
    twins.run([(0, MAX_ROW_LENGTH - 1, MAX_ROW_LENGTH), *((index, 1, 2) for index in range(1, count))])
    assert not twins.row_attention.can_attend_rows


def test_more_rows_than_the_arrays_have_go_the_plain_way(model: LoadedModel, decoder: BatchDecoder) -> None:
    assert model.text is not None
    twins = Twins(model.text, [3] * (MAX_ROWS + 1), 4, decoder)
    twins.run([(index, 0, 2) for index in range(MAX_ROWS + 1)])
    twins.run([(index, 2, 3) for index in range(MAX_ROWS + 1)])


def test_planned_rows_may_be_attended_the_plain_way(model: LoadedModel) -> None:
    assert model.text is not None
    twins = Twins(model.text, [6, 4], 4)
    twins.run([(0, 0, 5), (1, 0, 3)])
    batch = twins.sequences.batch([(0, 5, 6), (1, 3, 4)])
    embeds = model.text.embed(torch.stack([twins.token_ids[0][5], twins.token_ids[1][3]]))
    positions = torch.cat([twins.positions[0][:, 5:], twins.positions[1][:, 3:]], dim=1)
    twins.plain.plan(batch)
    twins.row_attention.plan(batch)
    outputs = [model.text(embeds, positions, attention) for attention in (twins.plain, twins.row_attention)]
    assert torch.equal(outputs[0], outputs[1])


def test_what_a_forward_gave_outlives_the_next_one(model: LoadedModel, decoder: BatchDecoder) -> None:
    assert model.text is not None
    twins = Twins(model.text, [3, 3], 4, decoder)
    kept: list[tuple[Tensor, Tensor]] = []
    for token in range(3):
        twins.row_attention.plan(twins.sequences.batch([(0, token, token + 1), (1, token, token + 1)]))
        embeds = decoder.embed(torch.stack([ids[token] for ids in twins.token_ids]))
        positions = torch.stack([own[:, token] for own in twins.positions], dim=1)
        hidden = decoder.forward(embeds, positions, twins.row_attention)
        kept.append((hidden, hidden.clone()))
    assert all(torch.equal(given, copy) for given, copy in kept)


@pytest.mark.parametrize("step", [[(0, 0, 1), (1, 0, 1), (2, 0, 1)], [(0, 0, 20)], [(0, 0, 1), (1, 0, 9), (2, 0, 5)]])
def test_wanted_rows_alone_are_given(step: list[Part], model: LoadedModel, decoder: BatchDecoder) -> None:
    assert model.text is not None
    twins = Twins(model.text, [20, 9, 5], 4, decoder)
    twins.row_attention.plan(twins.sequences.batch(step))
    embeds = decoder.embed(torch.cat([twins.token_ids[index][start:end] for index, start, end in step]))
    positions = torch.cat([twins.positions[index][:, start:end] for index, start, end in step], dim=1)
    whole = decoder.forward(embeds, positions, twins.row_attention)
    for rows in ([2], [0, 2], [2, 0, 1]):
        wanted = decoder.forward(embeds, positions, twins.row_attention, torch.tensor(rows))
        twins.assert_near(wanted, whole[rows])


def test_short_prompts_beside_decoding_sequences_equal_the_plain_decoder(
    model: LoadedModel, decoder: BatchDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert model.text is not None
    twins = Twins(model.text, [30, 12, 9, 8], 4, decoder)
    monkeypatch.setattr(RowDecoder, "forward", None)  # nothing is left to the plain decoder
    twins.run([(0, 0, 28)])
    twins.run([(0, 28, 29), (1, 0, 11)])
    twins.run([(1, 11, 12), (2, 0, 9), (0, 29, 30), (3, 0, 3)])
    twins.run([(3, 3, 8)])


def test_arrays_are_counted(decoder: BatchDecoder, config: ModelConfig) -> None:
    row = 4 * (2 * config.text.hidden_size + config.text.num_attention_heads * config.text.head_dim)
    assert decoder.num_bytes >= MAX_ROWS * row
