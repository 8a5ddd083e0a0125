"""Greedy tokens of the engine equal transformers' `generate()` on the same random checkpoint, in float32.

Whatever way a request takes (alone or in a batch, whole or in chunks, cached, preempted, in graphs), its tokens are the
same: every test compares with one set of references, computed once.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from runtime.checkpoint import ModelConfig, read_model_config
from runtime.config import CompileMode, EncodeAhead, EngineConfig, OneRowBackend
from runtime.request import Request, SamplingParams
from runtime.startup import build_engine
from tests.integration.golden_cases import CASES, NUM_TOKENS, SIDE, Generated, generate, prompt_of
from tests.integration.in_process_engine import EngineFactory, InProcessEngine


@pytest.fixture(scope="module")
def config(tiny_checkpoint: Path) -> ModelConfig:
    return read_model_config(tiny_checkpoint)


@pytest.fixture(scope="module")
def generated(tiny_checkpoint: Path, config: ModelConfig) -> dict[str, Generated]:
    return generate(tiny_checkpoint, config)


@pytest.fixture(scope="module")
def references(generated: dict[str, Generated]) -> dict[str, list[int]]:
    return {name: result.token_ids for name, result in generated.items()}


@pytest.fixture(scope="module")
def factory(tiny_checkpoint: Path) -> EngineFactory:
    return EngineFactory(tiny_checkpoint)


Add = Callable[..., str]


@pytest.fixture
def add(config: ModelConfig) -> Add:
    """Adds a case to an engine and gives the request's id, the case's name unless said."""

    def add_case(engine: InProcessEngine, name: str, *, request_id: str | None = None, **sampling: object) -> str:
        token_ids, images = prompt_of(CASES[name], config)
        params = SamplingParams(**{"max_tokens": NUM_TOKENS, "ignore_eos": True, **sampling})  # type: ignore[arg-type]
        request = Request(
            request_id=request_id or name,
            prompt_token_ids=token_ids,
            images=images,
            sampling=params,
            arrival_time=0.0,
        )
        engine.add(request, CASES[name].images)
        return request.request_id

    return add_case


def expect(references: dict[str, list[int]], names: Iterable[str]) -> dict[str, list[int]]:
    return {name: references[name] for name in names}


@pytest.fixture(autouse=True)
def no_error_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What fails and is then done in a plainer way gives the right tokens too: it must not happen here."""
    yield
    records = caplog.get_records("call")
    assert [record.getMessage() for record in records if record.levelno >= logging.ERROR] == []


def test_references_are_worth_comparing_with(references: dict[str, list[int]], generated: dict[str, Generated]) -> None:
    distinct = set().union(*references.values())
    assert len(distinct) >= 8
    assert all(len(set(tokens)) >= 8 for tokens in references.values())
    assert len({tuple(tokens) for tokens in references.values()}) == len(CASES)
    assert references["one image"] != references["other image"]
    # No near tie: rounding, which differs between machines and batch sizes, decides nothing (logits agree to 1e-5).
    assert min(result.margin for result in generated.values()) > 2e-3


@pytest.mark.parametrize("has_numpy_rows", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_request_alone_equals_transformers(
    name: str, has_numpy_rows: bool, factory: EngineFactory, references: dict[str, list[int]], add: Add
) -> None:
    engine = factory.build(has_numpy_rows=has_numpy_rows)
    add(engine, name)
    assert engine.finish() == expect(references, [name])


@pytest.mark.parametrize("has_numpy_rows", [True, False])
@pytest.mark.parametrize("max_num_seqs", [1, 3, 8])
def test_mixed_batch_equals_transformers(
    max_num_seqs: int, has_numpy_rows: bool, factory: EngineFactory, references: dict[str, list[int]], add: Add
) -> None:
    engine = factory.build(max_num_seqs=max_num_seqs, has_numpy_rows=has_numpy_rows)
    for name in CASES:
        add(engine, name)
    assert engine.finish() == references
    assert max(len(step.requests) for step in engine.steps) == max_num_seqs


def test_batch_of_eight_equal_requests(factory: EngineFactory, references: dict[str, list[int]], add: Add) -> None:
    engine = factory.build(max_num_seqs=8, enable_prefix_caching=False)
    for number in range(8):
        add(engine, "one image", request_id=str(number))
    assert engine.finish() == {str(number): references["one image"] for number in range(8)}


def test_requests_that_arrive_while_others_decode(
    factory: EngineFactory, references: dict[str, list[int]], add: Add
) -> None:
    engine = factory.build(max_num_seqs=4)
    waiting = list(CASES)
    tokens: dict[str, list[int]] = {}
    while waiting or engine.scheduler.has_work:
        if waiting:
            add(engine, waiting.pop(0))
        for output in engine.step() + engine.step():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    assert tokens == references
    assert any({part.num_scheduled_tokens == 1 for part in step.requests} == {True, False} for step in engine.steps), (
        "no step mixed prefill and decode"
    )


@pytest.mark.parametrize("max_num_batched_tokens", [8, 13, 37])
def test_chunks_that_cut_through_images(
    max_num_batched_tokens: int, factory: EngineFactory, references: dict[str, list[int]], add: Add
) -> None:
    engine = factory.build(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=4, enable_prefix_caching=False)
    names = ["three images", "text", "large image", "partial windows"]
    for name in names:
        add(engine, name)
    assert engine.finish() == expect(references, names)
    _, images = prompt_of(CASES["large image"], factory.config)
    ends = {
        part.num_computed_tokens + part.num_scheduled_tokens
        for step in engine.steps
        for part in step.requests
        if part.request_id == "large image"
    }
    place = images[0].placeholder
    assert any(place.offset < end < place.end for end in ends), "no chunk ended within the image"


def test_same_text_and_another_image_is_no_prefix_hit(
    factory: EngineFactory, references: dict[str, list[int]], add: Add
) -> None:
    engine = factory.build(block_size=4)
    add(engine, "one image")
    assert engine.finish() == expect(references, ["one image"])
    add(engine, "other image")
    assert engine.finish() == expect(references, ["other image"])
    # Only the block before the image may be shared: 5 words, and blocks have 4 tokens.
    assert engine.stats.prefix_cache_hit_tokens <= 4


def test_same_prompt_again_is_a_prefix_hit(factory: EngineFactory, references: dict[str, list[int]], add: Add) -> None:
    engine = factory.build(block_size=4)
    names = ["three images", "large image", "long text"]
    for name in names:
        add(engine, name)
    engine.finish()
    encoded_before = sum(len(step.images) for step in engine.steps)
    for name in names:
        add(engine, name, request_id=f"{name} again")
    again = engine.finish()
    assert again == {f"{name} again": references[name] for name in names}
    assert engine.stats.prefix_cache_hit_tokens >= 400
    assert sum(len(step.images) for step in engine.steps) == encoded_before == 4


def test_prefix_hit_that_ends_within_an_image(
    factory: EngineFactory, references: dict[str, list[int]], add: Add
) -> None:
    """A small step budget and an abort leave the blocks of half an image; the next request begins there."""
    engine = factory.build(block_size=4, max_num_batched_tokens=64)
    add(engine, "large image")
    engine.step()
    engine.scheduler.abort("large image")
    add(engine, "large image", request_id="next")
    assert engine.finish() == {"next": references["large image"]}
    assert 0 < engine.stats.prefix_cache_hit_tokens <= 64


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_preempted_requests_end_with_the_same_tokens(
    enable_prefix_caching: bool, factory: EngineFactory, references: dict[str, list[int]], add: Add
) -> None:
    engine = factory.build(
        num_blocks=1 + 52,
        block_size=4,
        max_num_seqs=6,
        max_model_len=200,
        enable_prefix_caching=enable_prefix_caching,
    )
    names = ["one image", "partial windows", "text", "other image", "thin image", "image first", "short text"]
    for name in names:
        add(engine, name)
    assert engine.finish() == expect(references, names)
    assert engine.stats.num_preemptions > 0


def test_small_encoder_cache_evicts_and_computes_again(
    factory: EngineFactory, references: dict[str, list[int]], add: Add
) -> None:
    engine = factory.build(encoder_cache_tokens=256, max_num_batched_tokens=64, max_pixels=256 * SIDE * SIDE)
    names = ["large image", "three images", "partial windows", "one image"]
    for name in names:
        add(engine, name)
    assert engine.finish() == expect(references, names)
    assert any(step.evicted_images for step in engine.steps)


def test_lost_embeddings_are_computed_again(
    factory: EngineFactory, references: dict[str, list[int]], add: Add, caplog: pytest.LogCaptureFixture
) -> None:
    engine = factory.build(max_num_batched_tokens=48)
    names = ["large image", "three images"]
    for name in names:
        add(engine, name)
    tokens: dict[str, list[int]] = {}
    while engine.scheduler.has_work:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        engine.store.keep_only(())
    assert tokens == expect(references, names)
    assert "computed again" in caplog.text


@pytest.mark.parametrize("decoder_graphs", ["none", "decode", "full"])
def test_emulated_graphs_equal_eager(
    decoder_graphs: str, factory: EngineFactory, references: dict[str, list[int]], add: Add
) -> None:
    engine = factory.build(
        enforce_eager=False,
        max_num_seqs=6,
        max_num_batched_tokens=256,
        encoder_graph_budgets=(32, 96),
        decoder_graphs=decoder_graphs,
        decoder_graph_sizes=(2, 4, 6),
    )
    for name in CASES:
        add(engine, name)
    assert engine.finish() == references
    encoder, decoder = engine.encoder_graphs.counts, engine.decoder_graphs.counts
    num_images = sum(len(case.images) for case in CASES.values())
    assert encoder.hits == num_images - 1
    assert encoder.misses["too_large"] == 1
    num_sequences = sum(len(step.requests) for step in engine.steps)
    assert decoder.hits + sum(decoder.misses.values()) == num_sequences
    if decoder_graphs == "none":
        assert decoder.misses["disabled"] == num_sequences
    else:
        assert decoder.hits > 0
        assert (decoder.misses["mixed_step"] > 0) == (decoder_graphs == "decode")
    if decoder_graphs == "full":
        assert decoder.hits == num_sequences


def test_graph_buckets_padded_and_exact_give_the_same(
    factory: EngineFactory, references: dict[str, list[int]], add: Add
) -> None:
    padded = factory.build(enforce_eager=False, max_num_seqs=8, decoder_graph_sizes=(8,))
    exact = factory.build(enforce_eager=False, max_num_seqs=8, decoder_graph_sizes=(1, 2, 3))
    names = ["text", "one image", "thin image"]
    for engine in (padded, exact):
        for name in names:
            add(engine, name)
        assert engine.finish() == expect(references, names)
    assert padded.decoder_graphs.counts.padded_tokens > 0
    assert exact.decoder_graphs.counts.padded_tokens == 0


@pytest.mark.parametrize("run_ahead", ["off", "on"])
@pytest.mark.parametrize("seed", range(4))
def test_everything_at_once_with_aborts(
    seed: int, run_ahead: str, factory: EngineFactory, references: dict[str, list[int]], add: Add
) -> None:
    """Few blocks, a small encoder cache, small chunks, graphs, arrivals and aborts in the middle of all."""
    rng = np.random.default_rng(seed)
    engine = factory.build(
        enforce_eager=False,
        num_blocks=1 + 110,
        block_size=int(rng.choice([3, 4, 8])),
        max_num_seqs=5,
        max_num_batched_tokens=int(rng.choice([24, 64, 200])),
        max_model_len=290,
        encoder_cache_tokens=260,
        max_pixels=256 * SIDE * SIDE,
        encoder_graph_budgets=(20, 64, 256),
        decoder_graphs=str(rng.choice(["decode", "full"])),
        enable_prefix_caching=bool(rng.integers(2)),
        run_ahead=run_ahead,
    )
    arrivals = [str(name) for name in rng.choice(list(CASES), 24)]
    alive: dict[str, str] = {}
    tokens: dict[str, list[int]] = {}
    num_compared = 0
    while arrivals or engine.scheduler.has_work:
        if arrivals and rng.random() < 0.4:
            name = arrivals.pop()
            alive[add(engine, name, request_id=f"{len(arrivals)} {name}")] = name
        if alive and rng.random() < 0.03:
            aborted = str(rng.choice(list(alive)))
            engine.scheduler.abort(aborted)
            del alive[aborted]
        for output in engine.step():
            assert output.error is None, output.error
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                assert tokens[output.request_id] == references[alive.pop(output.request_id)]
                num_compared += 1
    assert num_compared >= 12
    assert not alive


@pytest.mark.parametrize(
    ("compile_mode", "one_row_backend", "encode_ahead"), [("auto", "auto", "on"), ("off", "torch", "off")]
)
def test_engine_of_the_real_start_equals_transformers(
    compile_mode: CompileMode,
    one_row_backend: OneRowBackend,
    encode_ahead: EncodeAhead,
    tiny_checkpoint: Path,
    references: dict[str, list[int]],
    config: ModelConfig,
) -> None:
    settings = EngineConfig(
        model=str(tiny_checkpoint),
        max_model_len=1024,
        max_num_seqs=4,
        num_threads=1,
        compile=compile_mode,
        one_row_backend=one_row_backend,
        encode_ahead=encode_ahead,
    )
    engine = build_engine(settings)
    for name in CASES:
        token_ids, images = prompt_of(CASES[name], config)
        request = Request(
            request_id=name,
            prompt_token_ids=token_ids,
            images=images,
            sampling=SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True),
            arrival_time=0.0,
        )
        engine.add(request, CASES[name].images)
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    assert tokens == references
    graphs = engine.stats().graphs
    num_images = graphs["encoder"].hits + graphs["encoder"].misses["busy"]
    assert num_images == sum(len(case.images) for case in CASES.values())
    assert graphs["decoder"].hits > 0


def test_end_token_stops_a_request_and_is_not_given(
    factory: EngineFactory, references: dict[str, list[int]], add: Add
) -> None:
    engine = factory.build()
    expected = references["one image"]
    stop = next(token for token in expected[3:] if token not in expected[:3])
    add(engine, "one image", stop_token_ids=(stop,))
    assert engine.finish() == {"one image": expected[: expected.index(stop)]}


def test_logprobs_of_greedy_tokens_are_the_likeliest(factory: EngineFactory, add: Add) -> None:
    engine = factory.build()
    add(engine, "one image", num_logprobs=3)
    collected: list[tuple[int, object]] = []
    while engine.scheduler.has_work:
        for output in engine.step():
            assert output.logprobs is not None
            collected += zip(output.new_token_ids, output.logprobs, strict=True)
    assert len(collected) == NUM_TOKENS
    for token, logprobs in collected:
        assert logprobs.top[0] == (token, logprobs.logprob)  # type: ignore[attr-defined]
        assert len(logprobs.top) == 3  # type: ignore[attr-defined]


def test_seeded_request_samples_the_same_in_any_company(factory: EngineFactory, add: Add) -> None:
    def sampled(others: Sequence[str], **settings: object) -> list[int]:
        engine = factory.build(**settings)
        for name in others:
            add(engine, name, temperature=1.0)
        add(engine, "one image", request_id="seeded", temperature=0.8, top_p=0.9, seed=7)
        return engine.finish()["seeded"]

    alone = sampled([])
    assert sampled(["text", "three images"]) == alone
    assert sampled(["text", "thin image"], max_num_batched_tokens=16) == alone
    assert len(set(alone)) > 4
