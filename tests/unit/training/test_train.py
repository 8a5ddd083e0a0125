"""The training loop on a tiny network and few pictures."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from training import export
from training.data import Batches, BatchSpec, loader
from training.network import NetworkConfig
from training.optimizer import learning_rate, orthogonal
from training.supply import Supply
from training.train import TOKENIZER, Recipe, Trainer, default_workers, table

_RECIPE = Recipe(peak=4e-3, warmup=3, batch=BatchSpec(patches=256, pair_share=0.2), uses=1)


def _trainer() -> Trainer:
    vocab_size = Tokenizer.from_file(str(TOKENIZER)).get_vocab_size()
    config = NetworkConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        mrope_section=(4, 6, 6),
        vision_hidden_size=64,
        vision_intermediate_size=96,
        vision_depth=2,
        vision_num_heads=2,
        fullatt_block_indexes=(1,),
    )
    return Trainer(_RECIPE, config, "cpu")


def _supply(first: int) -> Supply:
    batches = Batches(TOKENIZER.read_text(), _RECIPE.seed, first, 100, _RECIPE.batch)
    return Supply(iter(loader(batches, 0, is_pinned=False)), 1, "cpu")


def _losses(trainer: Trainer, supply: Supply, steps: int) -> Iterator[float]:
    for _ in range(steps):
        trainer.tally.zero_()
        batch, form, is_new = supply.next()
        assert is_new
        trainer.train_step(batch, form)
        yield float(trainer.tally[:, 0].sum() / trainer.tally[:, 1].sum())


def test_a_few_steps_lower_the_loss() -> None:
    losses = list(_losses(_trainer(), _supply(0), 24))
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])


def test_a_resumed_run_continues_exactly(tmp_path: Path) -> None:
    whole = _trainer()
    list(_losses(whole, _supply(0), 6))

    first = _trainer()
    list(_losses(first, _supply(0), 3))
    first.save(tmp_path)
    second = _trainer()
    second.load(tmp_path)
    assert second.step == 3
    list(_losses(second, _supply(3), 3))
    for mine, theirs in zip(second.parameters, whole.parameters, strict=True):
        assert torch.equal(mine, theirs)


def test_a_state_comes_in_files_of_at_most_15_mib(tmp_path: Path) -> None:
    trainer = Trainer(_RECIPE, NetworkConfig(), "cpu")
    trainer.save(tmp_path)
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) <= 8
    assert max(sizes) <= 15 * 2**20


def test_a_short_supply_gives_kept_batches_again() -> None:
    batches = Batches(TOKENIZER.read_text(), "kept", 0, 30, BatchSpec(patches=64))
    supply = Supply(iter(loader(batches, 0, is_pinned=False)), 3, "cpu")
    news = [supply.next()[2] for _ in range(40)]
    assert sum(news) <= 30
    assert all(news[:21])


def test_batches_depend_on_their_number_alone() -> None:
    spec = BatchSpec(patches=256)
    text = TOKENIZER.read_text()
    third = list(iter(Batches(text, "seed", 0, 4, spec)))[3]
    alone = next(iter(Batches(text, "seed", 3, 1, spec)))
    assert third.keys() == alone.keys()
    for name, tensor in third.items():
        assert torch.equal(tensor, alone[name])


def test_orthogonal_brings_singular_values_near_one() -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonal(torch.randn(2, 24, 16)).float())
    assert values.min() > 0.6
    assert values.max() < 1.3


@pytest.mark.parametrize(
    ("step", "share", "expected"), [(0, 0.0, 0.1), (50, 0.2, 1.0), (50, 0.75, 0.5), (50, 1.0, 0.01)]
)
def test_learning_rate_warms_up_and_falls(step: int, share: float, expected: float) -> None:
    assert learning_rate(step, share, peak=1.0, warmup=10, decay=0.5) == pytest.approx(expected)


def test_table_gives_shares_by_category() -> None:
    tally = torch.zeros(10, 4)
    tally[0] = torch.tensor([3.0, 6.0, 1.0, 4.0])
    assert table(tally) == {"colour": {"loss": 0.5, "right": 25.0, "turns": 4}}


def test_export_of_no_state_says_so_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["training.export", str(tmp_path / "state")])
    with pytest.raises(SystemExit) as ended:
        export.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("name the folder that `training.train --out` wrote")


def test_workers_are_no_more_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, workers in ((2, 2), (64, 15), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        assert default_workers() == workers
