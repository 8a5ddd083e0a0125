"""Images encoded beside the steps: the same rows, once for all who want them, and nothing is kept for nobody."""

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime.checkpoint import read_model_config
from runtime.executor.embedding_store import EmbeddingStore
from runtime.executor.encode_ahead import AheadEncoder
from runtime.executor.encoder_runner import EncoderItem, EncoderProgram, EncoderRunner
from runtime.model.loader import load_model
from runtime.request import ImageInput, PlaceholderRange, Request, SamplingParams
from tests.unit.runtime.executor.test_encoder_runner import CLOSE, alone, picture, rows_of, runner_of

LONG_SECONDS = 30.0


@pytest.fixture(scope="module")
def program(tiny_checkpoint: Path) -> EncoderProgram:
    config = read_model_config(tiny_checkpoint)
    model = load_model(tiny_checkpoint, config, dtype=torch.float32, device=torch.device("cpu"))
    return EncoderProgram(model.vision, config.vision, torch.device("cpu"))


class BreakingRunner(EncoderRunner):
    """Fails until it is told not to."""

    is_broken = True

    def compute(self, items: Sequence[EncoderItem]) -> list[Tensor]:
        if self.is_broken:
            raise RuntimeError("no rows")
        return super().compute(items)


def ahead_of(
    program: EncoderProgram, *, max_held_tokens: int = 100, max_shared_tokens: int = 16
) -> tuple[AheadEncoder, EncoderRunner, EmbeddingStore]:
    runner, store = runner_of(program)
    ahead = AheadEncoder(runner, store, max_held_tokens=max_held_tokens, max_shared_tokens=max_shared_tokens)
    return ahead, runner, store


def begin(ahead: AheadEncoder, request_id: str, items: Sequence[EncoderItem]) -> bool:
    """A request with these pictures, all of them missing."""
    images = []
    for item in items:
        height, width = item.pixels.shape[:2]
        place = PlaceholderRange(0, height * width // 28**2)
        images.append(ImageInput(image_hash=item.image_hash, height=height, width=width, placeholder=place))
    request = Request(
        request_id=request_id,
        prompt_token_ids=[1],
        images=tuple(images),
        sampling=SamplingParams(max_tokens=1),
        arrival_time=0.0,
    )
    return ahead.begin(request, [item.pixels for item in items], range(len(items)))


def ready(ahead: AheadEncoder, count: int) -> list[str]:
    """The next requests that need not wait any more, so many."""
    found: list[str] = []
    for _ in range(100):
        found += ahead.take_ready(timeout_seconds=LONG_SECONDS)
        if len(found) >= count:
            return found
    raise AssertionError(f"only {found}")


def test_rows_equal_those_of_the_plain_twin(program: EncoderProgram) -> None:
    ahead, runner, store = ahead_of(program)
    items = [picture(4, 4), picture(2, 3), picture(3, 5), picture(1, 1), picture(5, 6)]
    for index, item in enumerate(items):
        assert begin(ahead, str(index), [item])
    assert sorted(ready(ahead, len(items))) == ["0", "1", "2", "3", "4"]
    assert len(store) == 0
    ahead.encode(items)
    for item in items:
        torch.testing.assert_close(rows_of(program, store, item), alone(program, item), **CLOSE)
    assert runner.num_images == len(items)
    assert ahead.num_held_tokens == 0


def test_a_picture_that_two_requests_want_is_encoded_once_and_kept_until_both_have_ended(
    program: EncoderProgram,
) -> None:
    ahead, runner, _ = ahead_of(program)
    item = picture(2, 3)
    assert begin(ahead, "a", [item])
    assert begin(ahead, "b", [item])
    assert sorted(ready(ahead, 2)) == ["a", "b"]
    assert runner.num_images == 1
    assert not begin(ahead, "c", [item]), "it is here"
    ahead.forget("a")
    ahead.forget("c")
    assert ahead.num_held_tokens == 6
    ahead.forget("b")
    assert ahead.num_held_tokens == 0


def test_a_request_waits_for_all_of_its_pictures(program: EncoderProgram) -> None:
    ahead, _, _ = ahead_of(program, max_shared_tokens=1)
    assert begin(ahead, "both", [picture(4, 4), picture(3, 5)])
    assert ready(ahead, 1) == ["both"]
    assert ahead.num_held_tokens == 31


def test_what_has_no_room_waits_until_rows_are_taken_and_what_never_has_is_left_to_the_step(
    program: EncoderProgram,
) -> None:
    ahead, runner, _ = ahead_of(program, max_held_tokens=20)
    assert not begin(ahead, "large", [picture(5, 6)])
    assert begin(ahead, "first", [picture(4, 4)])
    assert begin(ahead, "second", [picture(3, 5)])
    assert ready(ahead, 1) == ["first"]
    assert ahead.take_ready(timeout_seconds=0.0) == []
    assert runner.num_images == 1
    ahead.encode([picture(4, 4)])
    assert ready(ahead, 1) == ["second"]


def test_requests_that_keep_the_room_from_each_other_are_left_to_the_step(program: EncoderProgram) -> None:
    ahead, _, store = ahead_of(program, max_held_tokens=32)
    shared, one, other, last = (picture(4, 4, seed=seed) for seed in range(4))
    assert begin(ahead, "gone", [shared])
    assert ready(ahead, 1) == ["gone"]
    assert begin(ahead, "first", [one, other])
    assert begin(ahead, "second", [shared, last])
    ahead.forget("gone")
    # `shared` and `one` have all the room; `other` and `last` have none.
    assert ready(ahead, 1) == ["first"]
    assert ahead.num_held_tokens == 32
    ahead.encode([one, other])
    ahead.forget("first")
    assert ready(ahead, 1) == ["second"]
    ahead.encode([shared, last])
    ahead.forget("second")
    assert (ahead.num_held_tokens, len(store)) == (0, 4)


def test_an_aborted_request_leaves_nothing_and_its_picture_may_come_again(program: EncoderProgram) -> None:
    ahead, _, _ = ahead_of(program)
    for number in range(6):
        assert begin(ahead, str(number), [picture(4, 4, seed=number)])
    ahead.take_ready(timeout_seconds=0.0)
    for number in range(6):
        ahead.forget(str(number))
    assert begin(ahead, "again", [picture(4, 4, seed=5)])
    assert ready(ahead, 1) == ["again"]
    ahead.forget("again")
    for _ in range(2):  # what the thread was at
        assert ahead.take_ready(timeout_seconds=LONG_SECONDS) == []
    assert ahead.num_held_tokens == 0


def test_a_picture_whose_rows_were_taken_can_be_wanted_again(program: EncoderProgram) -> None:
    ahead, runner, store = ahead_of(program)
    item = picture(2, 3)
    assert begin(ahead, "a", [item])
    assert ready(ahead, 1) == ["a"]
    ahead.encode([item])
    store.drop(item.image_hash)
    assert begin(ahead, "b", [item])
    assert ready(ahead, 1) == ["b"]
    assert runner.num_images == 2


def test_a_picture_that_cannot_be_encoded_ahead_is_tried_again_by_its_step(program: EncoderProgram) -> None:
    plain, store = runner_of(program)
    runner = BreakingRunner(program, plain.graphs, store, max_eager_tokens=64)
    ahead = AheadEncoder(runner, store, max_held_tokens=100, max_shared_tokens=16)
    item = picture(2, 3)
    assert begin(ahead, "a", [item])
    assert ready(ahead, 1) == ["a"]
    assert ahead.num_held_tokens == 0
    ahead.encode([item])
    torch.testing.assert_close(rows_of(program, store, item), alone(program, item), **CLOSE)


def test_who_has_nothing_else_to_do_encodes_too(program: EncoderProgram) -> None:
    has_helped = threading.Event()

    class Waiting(EncoderRunner):
        def compute(self, items: Sequence[EncoderItem]) -> list[Tensor]:
            if threading.current_thread() is threading.main_thread():
                has_helped.set()
            assert has_helped.wait(LONG_SECONDS)
            return super().compute(items)

    plain, store = runner_of(program)
    runner = Waiting(program, plain.graphs, store, max_eager_tokens=64)
    ahead = AheadEncoder(runner, store, max_held_tokens=100, max_shared_tokens=1)
    for number in range(6):
        assert begin(ahead, str(number), [picture(4, 4, seed=number)])
    assert ahead.take_ready(timeout_seconds=0.0) == [], "the thread has begun"
    assert len(ready(ahead, 6)) == runner.num_images == 6
    assert has_helped.is_set()


def test_an_interrupt_of_the_caller_s_own_encode_is_not_taken_for_an_error(
    program: EncoderProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead, runner, _ = ahead_of(program)

    def interrupted(items: Sequence[EncoderItem]) -> list[Tensor]:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "compute", interrupted)
    assert begin(ahead, "r", [picture(4, 4, seed=1)])
    with pytest.raises(KeyboardInterrupt):
        ahead.take_ready(timeout_seconds=LONG_SECONDS)
    # Whoever goes on all the same leaves the picture to the step.
    assert ahead.take_ready(timeout_seconds=0) == ["r"]
    assert ahead.num_held_tokens == 0
