"""Sampling through the whole engine, against the distribution that transformers computes for the same prompt."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from runtime.checkpoint import read_processor_config
from runtime.request import Request, SamplingParams, TokenLogprobs
from tests.integration.golden_cases import CASES, SIDE, prompt_of
from tests.integration.in_process_engine import EngineFactory, InProcessEngine
from tests.unit.runtime.executor.test_sampler import params, reference_distribution

NUM_DRAWS = 2000
# Tokens expected less often than this share one bin of the chi-square statistic.
MIN_EXPECTED = 8
# Between the shares drawn and expected up to any token: exceeded once in 10,000 times.
MAX_DISTANCE = 2.23 / math.sqrt(NUM_DRAWS)

Logits = Callable[[str, Sequence[int]], NDArray[np.float32]]


@pytest.fixture(scope="module")
def factory(tiny_checkpoint: Path) -> EngineFactory:
    return EngineFactory(tiny_checkpoint)


@pytest.fixture(scope="module")
def reference_logits(tiny_checkpoint: Path, factory: EngineFactory) -> Logits:
    """Logits [len(output) + 1, V] of transformers behind a case's prompt, and behind each token of an output."""
    from transformers import Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    limits = read_processor_config(tiny_checkpoint)
    processor = Qwen2VLImageProcessorPil(min_pixels=SIDE * SIDE, max_pixels=limits.max_pixels)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(tiny_checkpoint, dtype=torch.float32).eval()

    def logits(name: str, output: Sequence[int]) -> NDArray[np.float32]:
        token_ids, _ = prompt_of(CASES[name], factory.config)
        ids = torch.tensor([[*token_ids, *output]])
        inputs = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": (ids == factory.config.image_token_id).int(),
        }
        if CASES[name].images:
            inputs |= dict(processor([Image.fromarray(image) for image in CASES[name].images], return_tensors="pt"))
        with torch.inference_mode():
            found: NDArray[np.float32] = model(**inputs).logits[0, len(token_ids) - 1 :].numpy()
        return found

    return logits


def add(engine: InProcessEngine, factory: EngineFactory, name: str, request_id: str, sampling: SamplingParams) -> None:
    token_ids, images = prompt_of(CASES[name], factory.config)
    request = Request(
        request_id=request_id, prompt_token_ids=token_ids, images=images, sampling=sampling, arrival_time=0.0
    )
    engine.add(request, CASES[name].images)


def logprobs_of(engine: InProcessEngine) -> tuple[list[int], list[TokenLogprobs]]:
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    while engine.scheduler.has_work:
        for output in engine.step():
            token_ids += output.new_token_ids
            logprobs += output.logprobs or []
    return token_ids, logprobs


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        # Cool, so that many tokens are likely enough to be counted.
        ("text", params(temperature=0.4)),
        ("one image", params(temperature=0.5, top_p=0.8)),
        ("short text", params(temperature=0.4, top_k=12)),
        ("one image", params(temperature=0.4, min_p=0.05)),
        ("text", params(temperature=0.4, repetition_penalty=1.4, logit_bias={7: 0.5, 8: -100.0})),
        ("three images", params(temperature=0.5, top_k=40, top_p=0.9)),
    ],
)
def test_first_tokens_follow_the_models_distribution(
    factory: EngineFactory, reference_logits: Logits, name: str, sampling: SamplingParams
) -> None:
    engine = factory.build(max_num_seqs=64, num_blocks=2048)
    fields = {field: getattr(sampling, field) for field in sampling.__struct_fields__}
    for seed in range(NUM_DRAWS):
        drawn = SamplingParams(**{**fields, "max_tokens": 1, "seed": seed, "ignore_eos": True})
        add(engine, factory, name, f"{seed}", drawn)
    tokens = np.array([output[0] for output in engine.finish().values()])
    assert len(tokens) == NUM_DRAWS
    prompt, _ = prompt_of(CASES[name], factory.config)
    expected = reference_distribution(reference_logits(name, [])[0], sampling, prompt, []) * NUM_DRAWS
    counts = np.bincount(tokens, minlength=len(expected))
    # Rounding may move a token over the edge of what is cut off, but none that is far from it.
    assert counts[expected == 0].sum() <= NUM_DRAWS * 0.002
    # Kolmogorov-Smirnov over the ids: sees what is spread over many tokens, each of them a little off.
    assert np.abs((counts - expected).cumsum()).max() / NUM_DRAWS < MAX_DISTANCE
    likely = expected >= MIN_EXPECTED
    observed = np.append(counts[likely], counts[~likely].sum())
    wanted = np.append(expected[likely], max(expected[~likely].sum(), 1e-9))
    if wanted[-1] < MIN_EXPECTED:
        observed, wanted = observed[:-1], wanted[:-1]
    freedom = len(wanted) - 1
    assert freedom >= 8
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    # Six standard deviations above the mean of chi-square.
    assert statistic < freedom + 6 * math.sqrt(2 * freedom) + 10


@pytest.mark.parametrize("name", ["text", "one image", "three images"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.3, "top_p": 0.8, "seed": 4, "frequency_penalty": 0.5}])
def test_logprobs_are_the_reference_models(
    factory: EngineFactory, reference_logits: Logits, name: str, sampling: dict[str, float]
) -> None:
    engine = factory.build(max_num_batched_tokens=64)
    add(engine, factory, name, "a", params(max_tokens=12, num_logprobs=20, ignore_eos=True, **sampling))
    token_ids, logprobs = logprobs_of(engine)
    assert len(token_ids) == len(logprobs) == 12
    expected = torch.from_numpy(reference_logits(name, token_ids[:-1])).log_softmax(-1)
    for step, (token_id, found) in enumerate(zip(token_ids, logprobs, strict=True)):
        assert found.logprob == pytest.approx(float(expected[step, token_id]), abs=1e-4)
        assert len(found.top) == 20
        ids = [top_id for top_id, _ in found.top]
        assert [value for _, value in found.top] == pytest.approx(expected[step, ids].tolist(), abs=1e-4)
        assert found.top[-1][1] >= float(expected[step].topk(21).values[-1]) - 1e-4
        assert [value for _, value in found.top] == sorted((value for _, value in found.top), reverse=True)


@pytest.mark.parametrize("count", [0, 1, 20])
def test_as_many_likeliest_tokens_as_asked_for(factory: EngineFactory, count: int) -> None:
    engine = factory.build()
    add(engine, factory, "text", "a", params(max_tokens=3, num_logprobs=count, ignore_eos=True))
    assert [len(found.top) for found in logprobs_of(engine)[1]] == [count] * 3


def test_seeded_request_is_the_same_alone_in_company_in_pieces_and_preempted(factory: EngineFactory) -> None:
    sampling = params(max_tokens=24, temperature=1.1, top_p=0.95, presence_penalty=0.4, seed=11, ignore_eos=True)

    def seeded(others: Sequence[str], **settings: object) -> tuple[list[int], int]:
        engine = factory.build(**settings)
        for index, other in enumerate(others):
            temperature = float(index % 2)
            add(engine, factory, other, f"o{index}", params(max_tokens=30, temperature=temperature, ignore_eos=True))
        add(engine, factory, "one image", "seeded", sampling)
        for index, other in enumerate(others):
            add(engine, factory, other, f"p{index}", params(max_tokens=9, temperature=1.0, min_p=0.1, num_logprobs=3))
        return engine.finish()["seeded"], engine.stats.num_preemptions

    alone, _ = seeded([])
    assert len(set(alone)) > 8
    assert seeded(["text", "thin image", "short text"])[0] == alone
    assert seeded(["text", "large image"], max_num_batched_tokens=32)[0] == alone
    assert seeded(["text", "one image"], enforce_eager=False)[0] == alone
    tight = seeded(
        ["text", "short text", "text"], block_size=4, num_blocks=36, max_model_len=120, enable_prefix_caching=False
    )
    assert tight[1] > 0
    assert tight[0] == alone


def test_biased_token_is_all_there_is_or_never_comes(factory: EngineFactory) -> None:
    engine = factory.build()
    add(engine, factory, "text", "only", params(max_tokens=5, temperature=1.0, logit_bias={42: 100.0}, ignore_eos=True))
    never = dict.fromkeys(range(0, 512, 2), -100.0)
    add(engine, factory, "text", "never", params(max_tokens=30, temperature=1.0, logit_bias=never, ignore_eos=True))
    tokens = engine.finish()
    assert tokens["only"] == [42] * 5
    assert all(token % 2 for token in tokens["never"])


def test_end_is_a_token_like_others_when_it_is_ignored(factory: EngineFactory) -> None:
    bias = {factory.config.eos_token_ids[0]: 100.0}
    engine = factory.build()
    add(engine, factory, "text", "ignores", params(max_tokens=6, logit_bias=bias, ignore_eos=True))
    add(engine, factory, "text", "ends", params(max_tokens=6, logit_bias=bias))
    tokens = engine.finish()
    assert tokens["ignores"] == [factory.config.eos_token_ids[0]] * 6
    assert tokens.get("ends", []) == []
