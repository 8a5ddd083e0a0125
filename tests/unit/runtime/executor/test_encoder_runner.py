"""The encoder runner on the tiny model: packed, padded, emulated and eager all give the same rows."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from runtime.checkpoint import ModelConfig, read_model_config
from runtime.executor.embedding_store import EmbeddingStore
from runtime.executor.encoder_runner import EncoderItem, EncoderProgram, EncoderRunner, StaticEncoderInputs
from runtime.executor.graph_backend import EmulatedBackend
from runtime.executor.graphs import Bucket, GraphSet
from runtime.model.loader import load_model
from runtime.model.qwen2_5_vl_vision import VisionEncoder

SIDE = 28
BUCKETS = tuple(Bucket(name=str(tokens), tokens=tokens, max_items=3) for tokens in (8, 16, 40))

# Sizes in tokens: whole windows are 4 x 4, so these leave partial ones on both sides.
SIZES = [(1, 1), (2, 3), (4, 4), (5, 6), (1, 9), (3, 5)]

# Sums in another order: rows per product differ with packing and padding.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module")
def model_config(tiny_checkpoint: Path) -> ModelConfig:
    return read_model_config(tiny_checkpoint)


@pytest.fixture(scope="module")
def program(tiny_checkpoint: Path, model_config: ModelConfig) -> EncoderProgram:
    model = load_model(tiny_checkpoint, model_config, dtype=torch.float32, device=torch.device("cpu"))
    return EncoderProgram(model.vision, model_config.vision, torch.device("cpu"))


def picture(height: int, width: int, seed: int = 0) -> EncoderItem:
    """Noise of `height` x `width` tokens."""
    generator = np.random.default_rng([seed, height, width])
    pixels = generator.integers(0, 256, (height * SIDE, width * SIDE, 3), dtype=np.uint8)
    return EncoderItem(image_hash=bytes([seed, height, width]), pixels=pixels)


PICTURES = [picture(height, width) for height, width in SIZES]


def runner_of(
    program: EncoderProgram, buckets: Sequence[Bucket] | None = BUCKETS, *, max_eager_tokens: int = 64
) -> tuple[EncoderRunner, EmbeddingStore]:
    """A runner with captured buckets, or without graphs."""
    graphs: GraphSet[StaticEncoderInputs] = GraphSet(
        "encoder", buckets or (), backend=EmulatedBackend() if buckets else None
    )
    with torch.inference_mode():
        graphs.capture(program)
        hidden = program.eager([PICTURES[0].pixels]).shape[1]
    store = EmbeddingStore(capacity_tokens=200, hidden=hidden, dtype=torch.float32, device=torch.device("cpu"))
    return EncoderRunner(program, graphs, store, max_eager_tokens=max_eager_tokens), store


def rows_of(program: EncoderProgram, store: EmbeddingStore, item: EncoderItem) -> Tensor:
    return store.rows(item.image_hash, 0, program.num_tokens(item.pixels))


def alone(program: EncoderProgram, item: EncoderItem) -> Tensor:
    """The plain twin: one image, eager, unpadded."""
    with torch.inference_mode():
        return program.eager([item.pixels])


@pytest.mark.parametrize("item", PICTURES, ids=[f"{h}x{w}" for h, w in SIZES])
def test_padded_replay_equals_unpadded_eager(program: EncoderProgram, item: EncoderItem) -> None:
    runner, store = runner_of(program)
    runner.encode([item])
    torch.testing.assert_close(rows_of(program, store, item), alone(program, item), **CLOSE)
    assert runner.graphs.counts.hits == 1


def test_packed_replays_equal_one_by_one(program: EncoderProgram) -> None:
    runner, store = runner_of(program)
    runner.encode(PICTURES)
    counts = runner.graphs.counts
    assert counts.hits == len(PICTURES)
    assert sum(counts.replays.values()) < len(PICTURES), "nothing was packed"
    for item in PICTURES:
        torch.testing.assert_close(rows_of(program, store, item), alone(program, item), **CLOSE)


def test_eager_packs_equal_one_by_one(program: EncoderProgram) -> None:
    runner, store = runner_of(program, None, max_eager_tokens=50)
    runner.encode(PICTURES)
    assert runner.num_batches < len(PICTURES)
    for item in PICTURES:
        torch.testing.assert_close(rows_of(program, store, item), alone(program, item), **CLOSE)


def test_replay_equals_eager_on_the_same_padded_input_to_the_bit(program: EncoderProgram) -> None:
    runner, _ = runner_of(program)
    bucket = BUCKETS[1]
    inputs = runner.graphs.inputs(bucket)
    with torch.inference_mode():
        program.fill(bucket, inputs, [PICTURES[1].pixels, PICTURES[0].pixels])
        replayed = runner.graphs.replay(bucket, tokens=7, items=2)
        assert torch.equal(replayed, program.forward(bucket, inputs))


def test_what_a_bucket_held_before_leaves_no_trace(program: EncoderProgram) -> None:
    runner, store = runner_of(program, BUCKETS[2:])
    small, large = PICTURES[1], PICTURES[3]
    runner.encode([small])
    first = rows_of(program, store, small)
    store.drop(small.image_hash)
    runner.encode([large])
    runner.encode([small])
    assert torch.equal(rows_of(program, store, small), first)


def test_a_picture_too_large_for_every_bucket_misses_and_has_the_right_rows(program: EncoderProgram) -> None:
    runner, store = runner_of(program)
    huge = picture(7, 8)
    runner.encode([huge, PICTURES[2]])
    counts = runner.graphs.counts
    assert counts.misses["too_large"] == 1
    assert sum(counts.misses.values()) == 1
    assert counts.hits == 1
    torch.testing.assert_close(rows_of(program, store, huge), alone(program, huge), **CLOSE)


def test_without_graphs_every_image_is_a_counted_miss(program: EncoderProgram) -> None:
    runner, _ = runner_of(program, None)
    runner.encode(PICTURES[:3])
    assert runner.graphs.counts.misses["disabled"] == 3
    assert runner.graphs.counts.hits == 0


class FailingProgram(EncoderProgram):
    """The real program, but for one bucket."""

    def __init__(self, program: EncoderProgram, bucket: str) -> None:
        self.__dict__.update(program.__dict__)
        self._bucket = bucket

    def forward(self, bucket: Bucket, inputs: StaticEncoderInputs) -> Tensor:
        if bucket.name == self._bucket:
            raise RuntimeError("no memory for this one")
        return super().forward(bucket, inputs)


def test_images_of_a_bucket_that_could_not_be_captured_run_eager(program: EncoderProgram) -> None:
    runner, store = runner_of(FailingProgram(program, "16"))
    runner.encode([PICTURES[2]])
    assert runner.graphs.counts.misses["capture_failed"] == 1
    torch.testing.assert_close(rows_of(program, store, PICTURES[2]), alone(program, PICTURES[2]), **CLOSE)
    runner.encode([PICTURES[0]])
    assert runner.graphs.counts.hits == 1


def test_padding_is_counted_in_tokens(program: EncoderProgram) -> None:
    runner, _ = runner_of(program)
    runner.encode([PICTURES[1]])
    assert runner.graphs.counts.padded_tokens == 8 - 6
    assert runner.graphs.counts.replays == {"8": 1, "16": 0, "40": 0}


def test_encoding_is_counted_and_timed(program: EncoderProgram) -> None:
    runner, _ = runner_of(program)
    runner.encode([PICTURES[1], PICTURES[2], PICTURES[1]])  # one comes twice
    assert runner.num_images == 2
    assert runner.num_tokens == 6 + 16
    assert runner.num_batches == sum(runner.graphs.counts.replays.values())
    assert runner.encode_seconds > 0


def test_profile_runs_the_largest_eager_forward_and_counts_nowhere(
    program: EncoderProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    eager = program.eager

    def recording(pixels: Sequence[np.ndarray]) -> Tensor:
        seen.append(sum(program.num_tokens(image) for image in pixels))
        return eager(pixels)

    runner, store = runner_of(program, None, max_eager_tokens=64)
    monkeypatch.setattr(program, "eager", recording)
    runner.profile(max_tokens_per_image=30)
    assert seen == [60]
    assert runner.num_images == 0
    assert runner.encode_seconds == 0
    assert sum(runner.graphs.counts.misses.values()) == 0
    assert len(store) == 0


def test_noise_has_the_tokens_asked_for(program: EncoderProgram) -> None:
    for tokens in (1, 7, 12, 64, 100):
        assert program.num_tokens(program.noise(tokens)) == tokens
    assert program.noise(12).shape == (3 * SIDE, 4 * SIDE, 3)


def test_graph_bytes_are_those_of_buffers_and_outputs(program: EncoderProgram, model_config: ModelConfig) -> None:
    runner, _ = runner_of(program)
    info = runner.graphs.info(reserved_bytes=0)
    for bucket in info.buckets:
        patches = bucket.tokens * 4
        least = patches * 3 * 14 * 14 + bucket.tokens * model_config.vision.out_hidden_size * 4
        assert least < bucket.graph_bytes < least + patches * 64 + 4096


class PoisonedEncoder(VisionEncoder):
    """An encoder whose attention over padding gives NaN, the field's known failure."""

    def __init__(self, encoder: VisionEncoder) -> None:
        self.__dict__.update(encoder.__dict__)

    def forward(self, inputs: object) -> Tensor:
        rows = super().forward(inputs)  # type: ignore[arg-type]
        rows[-1] = float("nan")
        return rows


def test_nan_in_the_padding_is_caught_by_the_self_test(program: EncoderProgram, model_config: ModelConfig) -> None:
    poisoned = EncoderProgram(PoisonedEncoder(program._encoder), model_config.vision, torch.device("cpu"))
    graphs: GraphSet[StaticEncoderInputs] = GraphSet("encoder", BUCKETS, backend=EmulatedBackend())
    with torch.inference_mode():
        graphs.capture(poisoned)
    assert {bucket.state for bucket in graphs.info(reserved_bytes=0).buckets} == {"self_test_failed"}


def test_beside_a_replay_of_another_thread_a_picture_runs_eager(program: EncoderProgram) -> None:
    runner, store = runner_of(program)
    item = PICTURES[2]
    with runner._replaying:
        (rows_TD,) = runner.compute([item])
    torch.testing.assert_close(rows_TD, alone(program, item), **CLOSE)
    assert (runner.graphs.counts.hits, runner.graphs.counts.misses["busy"], len(store)) == (0, 1, 0)
