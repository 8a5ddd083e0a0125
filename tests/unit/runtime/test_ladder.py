"""Which budgets pay: arithmetic on made-up measurements."""

import pytest

from runtime.config import MIB
from runtime.ladder import (
    EAGER_HANDICAP,
    Measured,
    Rung,
    candidates,
    default_sample,
    outlook,
    steps_of,
    tuned_ladder,
)

GIB = 1 << 30


def measured(
    *tokens: int, ms_per_token: float = 0.01, fixed_ms: float = 0.5, mib: float = 1, eager_ms: float = 10
) -> Measured:
    """Replays take a fixed time and so much a token; an eager forward takes `eager_ms` more than its tokens do."""
    return Measured(
        rungs=tuple(
            Rung(tokens=one, graph_bytes=int(mib * MIB), replay_seconds=(fixed_ms + ms_per_token * one) / 1000)
            for one in tokens
        ),
        eager=tuple((one, (eager_ms + ms_per_token * one) / 1000) for one in (1, 1000)),
        max_items=2,
    )


def test_sizes_that_come_are_the_budgets_and_nothing_between_them() -> None:
    steps = steps_of((64, 256), max_items=1)
    best = tuned_ladder(steps, measured(32, 64, 96, 128, 192, 256), memory_bytes=10 * GIB)
    assert best.budgets == (64, 256)
    assert best.padded_share == 0
    assert best.eager_share == 0
    assert set(best.replays) == {64, 256}
    assert sum(best.replays.values()) == len(steps)


def test_a_rung_must_save_a_larger_share_of_time_than_of_memory() -> None:
    steps = steps_of((200, 250), max_items=1)
    # Without the rung of 200 half of the pictures are padded by a quarter: some 8 % of the time.
    assert tuned_ladder(steps, measured(200, 250, mib=100), memory_bytes=10 * GIB).budgets == (200, 250)
    assert tuned_ladder(steps, measured(200, 250, mib=1000), memory_bytes=10 * GIB).budgets == (250,)


def test_a_gain_that_nobody_would_notice_is_no_gain() -> None:
    steps = steps_of((249, 250), max_items=1)
    assert tuned_ladder(steps, measured(249, 250, mib=0), memory_bytes=10 * GIB).budgets == (250,)


def test_pictures_that_are_quicker_eager_get_no_budget() -> None:
    steps = steps_of((64, 512), max_items=1)
    slow = measured(64, 512)
    slow = Measured(rungs=(slow.rungs[0], Rung(tokens=512, graph_bytes=MIB, replay_seconds=1.0)), eager=slow.eager,
                    max_items=1)  # fmt: skip
    best = tuned_ladder(steps, slow, memory_bytes=GIB)
    assert best.budgets == (64,)
    assert 0.3 < best.eager_share < 0.7


def test_the_outlook_adds_up_what_packing_does() -> None:
    found = outlook((64, 128), [(64, 60), (100,), (300,)], measured(64, 128))
    # 64 + 60 share a replay of 128, as 100 takes one; 300 fits none.
    assert found.replays == {64: 0, 128: 2}
    assert found.padded_share == pytest.approx((4 + 28) / 256)
    assert found.eager_share == pytest.approx(1 / 4)
    seconds = (2 * (0.5 + 1.28) + EAGER_HANDICAP * (10 + 3.0)) / 1000
    assert found.seconds_per_image == pytest.approx(seconds / 4)


def test_noise_makes_no_larger_replay_quicker_and_memory_follows_the_largest() -> None:
    noisy = Measured(
        rungs=(
            Rung(tokens=64, graph_bytes=2 * MIB, replay_seconds=0.003),
            Rung(tokens=128, graph_bytes=3 * MIB, replay_seconds=0.002),
            Rung(tokens=256, graph_bytes=100 * MIB, replay_seconds=0.004),
        ),
        eager=((10, 0.01), (30, 0.03)),
        max_items=4,
    )
    assert noisy.replay_seconds(128) == 0.003
    assert [noisy.eager_seconds(tokens) for tokens in (10, 20, 60)] == [0.01, pytest.approx(0.02), pytest.approx(0.06)]
    assert noisy.graph_bytes((64, 128, 256)) == 105 * MIB
    # Without the largest the next one holds the working memory that they share.
    assert noisy.graph_bytes((64, 128)) == 52 * MIB


def test_candidates_are_the_ladder_in_use_and_what_the_sample_asks_for() -> None:
    assert candidates((300, 300, 300), (64, 1024), max_tokens=1024) == (64, 304, 600, 1024)
    assert max(candidates(default_sample(4, 256), (64, 96, 256), max_tokens=256)) == 256
    sample = default_sample(4, 256)
    assert (sample[0], sample[-1], len(sample)) == (4, 256, 33)
    assert sample[16] == 32  # as many below as above, in proportion
    assert default_sample(9, 9) == (9,) * 33


def test_steps_are_seeded_and_of_every_number_of_images() -> None:
    steps = steps_of((5, 6, 7), max_items=3)
    assert steps == steps_of((5, 6, 7), max_items=3)
    assert {len(step) for step in steps} == {1, 2, 3}


def test_steps_have_no_more_images_than_the_scheduler_lets_share_one() -> None:
    drawn = steps_of((16, 40, 100), max_items=3)
    steps = steps_of((16, 40, 100), max_items=3, max_shared_tokens=64)
    assert [one for step in steps for one in step] == [one for step in drawn for one in step]
    assert all(len(step) == 1 or sum(step) <= 64 for step in steps)
    assert {(100,), (16, 40), (16, 16)} <= set(steps)
    assert steps_of((5, 6), max_items=3, max_shared_tokens=64) == steps_of((5, 6), max_items=3)
