"""The runner's own behaviours on a real tiny model: what fails, what is refused, what is forgotten.

That its tokens are right is shown by the golden tests.
"""

import gc
import logging
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from runtime.device_errors import EngineFatalError
from runtime.executor.encoder_runner import EncoderItem
from runtime.executor.model_runner import ImageEncoder
from runtime.request import ImageInput, PlaceholderRange, Request, RequestOutput, SamplingParams
from runtime.scheduler.output import SchedulerOutput
from tests.integration.in_process_engine import EngineFactory, InProcessEngine

SIDE = 28
HIDDEN = 64


@pytest.fixture(scope="module")
def factory(tiny_checkpoint: Path) -> EngineFactory:
    return EngineFactory(tiny_checkpoint)


def picture(seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (2 * SIDE, 2 * SIDE, 3), dtype=np.uint8)


def image_at(offset: int, seed: int) -> ImageInput:
    return ImageInput(
        image_hash=bytes([seed]) * 32, height=2 * SIDE, width=2 * SIDE, placeholder=PlaceholderRange(offset, 4)
    )


def make_request(name: str, *seeds: int, **sampling: object) -> Request:
    """A prompt of three tokens, then four placeholders and a token for each image seed."""
    token_ids, images = [5, 6, 7], []
    for seed in seeds:
        images.append(image_at(len(token_ids), seed))
        token_ids += [1, 1, 1, 1, 8]
    return Request(
        request_id=name,
        prompt_token_ids=token_ids,
        images=tuple(images),
        sampling=SamplingParams(**{"max_tokens": 6, "ignore_eos": True, **sampling}),  # type: ignore[arg-type]
        arrival_time=0.0,
    )


def outputs_of(engine: InProcessEngine) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.scheduler.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def tokens_of(engine: InProcessEngine, name: str) -> list[int]:
    return [token for output in outputs_of(engine)[name] for token in output.new_token_ids]


class FaultyEncoder:
    """Encodes through the real one, except pictures of one seed, for which it raises."""

    def __init__(self, encoder: ImageEncoder, seed: int) -> None:
        self._encoder = encoder
        self._bad = bytes([seed]) * 32

    def encode(self, items: Sequence[EncoderItem]) -> None:
        if any(item.image_hash == self._bad for item in items):
            raise RuntimeError("this picture is bad")
        self._encoder.encode(items)


def with_faulty_encoder(engine: InProcessEngine, seed: int) -> InProcessEngine:
    engine.runner._encoder = FaultyEncoder(engine.runner._encoder, seed)
    return engine


def test_image_that_cannot_be_encoded_fails_its_requests_alone(
    factory: EngineFactory, caplog: pytest.LogCaptureFixture
) -> None:
    expected = {}
    for name, seeds in {"good": (2,), "text": ()}.items():
        plain = factory.build()
        plain.add(make_request(name, *seeds), [picture(seed) for seed in seeds])
        expected[name] = tokens_of(plain, name)
    engine = with_faulty_encoder(factory.build(), seed=9)
    engine.add(make_request("bad", 1, 9), [picture(1), picture(9)])
    engine.add(make_request("good", 2), [picture(2)])
    engine.add(make_request("bad too", 9), [picture(9)])
    engine.add(make_request("text"))
    with caplog.at_level(logging.CRITICAL):
        outputs = outputs_of(engine)
    assert [output.error for output in outputs["bad"]] == [
        "image 1 could not be encoded: RuntimeError: this picture is bad"
    ]
    assert outputs["bad too"][-1].finish_reason == "error"
    assert {
        name: [token for output in outputs[name] for token in output.new_token_ids] for name in expected
    } == expected


def test_encoder_that_leaves_the_device_unusable_fails_no_request_but_the_engine(factory: EngineFactory) -> None:
    class BreakingEncoder:
        def encode(self, items: Sequence[EncoderItem]) -> None:
            raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    engine = factory.build()
    engine.runner._encoder = BreakingEncoder()
    engine.add(make_request("any", 1), [picture(1)])
    with pytest.raises(EngineFatalError, match="unspecified launch failure"):
        engine.step()


def test_request_after_a_failed_one_is_served(factory: EngineFactory, caplog: pytest.LogCaptureFixture) -> None:
    engine = with_faulty_encoder(factory.build(), seed=9)
    with caplog.at_level(logging.CRITICAL):
        engine.add(make_request("bad", 9), [picture(9)])
        assert outputs_of(engine)["bad"][-1].finish_reason == "error"
        engine.add(make_request("next", 9, 2), [picture(9), picture(2)])
        assert outputs_of(engine)["next"][-1].finish_reason == "error"
    engine.add(make_request("good", 2), [picture(2)])
    assert len(tokens_of(engine, "good")) == 6


def test_logits_that_are_no_numbers_fail_their_request_alone(factory: EngineFactory) -> None:
    class NanEncoder:
        def encode(self, items: Sequence[EncoderItem]) -> None:
            for item in items:
                engine.store.put(item.image_hash, torch.full((4, HIDDEN), float("nan")))

    engine = factory.build()
    engine.runner._encoder = NanEncoder()
    engine.add(make_request("text"))
    engine.add(make_request("image", 1), [picture(1)])
    outputs = outputs_of(engine)
    assert [output.error for output in outputs["image"]] == ["the model's logits are not numbers"]
    assert sum(len(output.new_token_ids) for output in outputs["text"]) == 6


@pytest.mark.parametrize(
    ("request_", "pixels", "message"),
    [
        (make_request("a", 1), [], "1 images, but pixels of 0"),
        (make_request("a", 1), [np.zeros((28, 56, 3), np.uint8)], "56 x 56 pixels, but its pixels are uint8"),
        (make_request("a", 1), [np.zeros((56, 56, 3), np.float32)], "pixels are float32"),
        (make_request("a", logit_bias={512: 1.0}), [], "token 512; the vocabulary has 512"),
    ],
)
def test_request_that_does_not_fit_is_refused_and_forgotten(
    request_: Request, pixels: list[NDArray[np.uint8]], message: str, factory: EngineFactory
) -> None:
    engine = factory.build()
    with pytest.raises(ValueError, match=message):
        engine.runner.add(request_, pixels)
    engine.add(make_request("a"))
    assert len(tokens_of(engine, "a")) == 6


def test_placeholder_of_another_length_than_the_image_is_refused(factory: EngineFactory) -> None:
    request = Request(
        request_id="a",
        prompt_token_ids=[1] * 8,
        images=(ImageInput(image_hash=b"x", height=56, width=56, placeholder=PlaceholderRange(1, 5)),),
        sampling=SamplingParams(max_tokens=1),
        arrival_time=0.0,
    )
    with pytest.raises(ValueError, match="has 5 tokens; its size makes 4"):
        factory.build().runner.add(request, [picture(1)])


def test_ended_request_is_forgotten_with_its_pixels(factory: EngineFactory) -> None:
    engine = factory.build()
    pixels = picture(1)
    freed = weakref.ref(pixels)
    engine.add(make_request("a", 1), [pixels])
    engine.add(make_request("b", max_tokens=20))
    del pixels
    while engine.step()[0].finish_reason is None:
        assert freed() is not None
    engine.runner.run(engine.scheduler.schedule())
    gc.collect()
    assert freed() is None


def test_aborted_request_is_forgotten(factory: EngineFactory) -> None:
    engine = factory.build()
    engine.add(make_request("a"))
    engine.add(make_request("b"))
    engine.step()
    engine.scheduler.abort("a")
    assert set(outputs_of(engine)) == {"b"}
    engine.runner.remove("a")
    engine.runner.remove("never seen")


def test_id_used_again_at_once_belongs_to_the_new_request(factory: EngineFactory) -> None:
    engine = factory.build()
    engine.add(make_request("other"))
    expected = tokens_of(engine, "other")
    engine.add(make_request("a", 1), [picture(1)])
    engine.step()
    engine.scheduler.abort("a")
    engine.add(make_request("a"))
    assert tokens_of(engine, "a") == expected


def test_unseeded_requests_differ_and_repeat_with_the_engines_seed(factory: EngineFactory) -> None:
    def sampled(seed: int) -> tuple[list[int], list[int]]:
        engine = factory.build(seed=seed)
        for name in ("a", "b"):
            engine.add(make_request(name, temperature=3.0, max_tokens=12))
        outputs = outputs_of(engine)
        first, second = ([t for o in outputs[name] for t in o.new_token_ids] for name in ("a", "b"))
        return first, second

    assert sampled(0) == sampled(0)
    assert sampled(0) != sampled(1)
    first, second = sampled(0)
    assert first != second


def test_penalties_reach_across_steps_and_preemptions(factory: EngineFactory) -> None:
    """With a penalty that forbids repetition no token comes twice, though few blocks force preemptions."""
    engine = factory.build(num_blocks=1 + 14, block_size=4, max_num_seqs=4, max_model_len=40)
    for name in "abcd":
        engine.add(make_request(name, frequency_penalty=2.0, presence_penalty=2.0, max_tokens=20, logit_bias={3: 5.0}))
    alone = factory.build(max_model_len=40)
    alone.add(make_request("a", frequency_penalty=2.0, presence_penalty=2.0, max_tokens=20, logit_bias={3: 5.0}))
    expected = tokens_of(alone, "a")
    outputs = outputs_of(engine)
    assert engine.stats.num_preemptions > 0
    for name in "abcd":
        assert [token for output in outputs[name] for token in output.new_token_ids] == expected


def test_step_that_only_tells_of_an_end_runs_nothing(factory: EngineFactory) -> None:
    engine = factory.build()
    result = engine.runner.run(SchedulerOutput(requests=(), finished_request_ids=("gone",)))
    assert (result.tokens, result.failed) == ({}, {})


def test_what_runs_before_the_graphs_are_there_counts_nowhere(factory: EngineFactory) -> None:
    engine = factory.build(enforce_eager=False, decoder_graph_sizes=(1, 2))
    engine.runner._decoder._graphs = None
    engine.add(make_request("a"))
    expected = tokens_of(engine, "a")
    before = engine.decoder_graphs.counts
    assert before.hits + sum(before.misses.values()) == 0
    engine.runner.use_graphs(engine.decoder_graphs)
    engine.add(make_request("b"))
    assert tokens_of(engine, "b") == expected
    assert engine.decoder_graphs.counts.hits == 5


def test_static_bytes_are_those_of_inputs_sampling_rows_masks_and_slots(factory: EngineFactory) -> None:
    engine = factory.build(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64)
    tokens = 64 * 8 + 3 * 64 * 8 + 64 * 8
    tables = 3 * 4 * 4 + 2 * 3 * 8
    sampling = 2 * 512 * 5
    slots = 2 * (64 * 4 * 4 + 4 * 4 + 2 * 8)
    masks = 2 * 512 // 8
    assert engine.runner.static_bytes == tokens + tables + sampling + masks + slots
