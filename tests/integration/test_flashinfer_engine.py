"""The engine on FlashInfer's path, over the stand-in of its wrapper: the tokens of the plain twin, graphs or not."""

from pathlib import Path

import pytest

from runtime.executor.kv_cache import KVCache
from runtime.model.flashinfer_attention import AttentionLimits, FlashInferAttention
from runtime.request import Request, SamplingParams
from tests.integration.golden_cases import CASES, prompt_of
from tests.integration.in_process_engine import EngineFactory, InProcessEngine
from tests.unit.runtime.model.fake_flashinfer import fake_flashinfer

CHOSEN = ("text", "short text", "long text", "three images", "thin image")
SETTINGS = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 8}


@pytest.fixture(scope="module")
def factory(tiny_checkpoint: Path) -> EngineFactory:
    return EngineFactory(tiny_checkpoint)


def answers(engine: InProcessEngine, factory: EngineFactory) -> dict[str, list[int]]:
    for name in CHOSEN:
        token_ids, images = prompt_of(CASES[name], factory.config)
        request = Request(
            request_id=name,
            prompt_token_ids=token_ids,
            images=images,
            sampling=SamplingParams(max_tokens=20, ignore_eos=True),
            arrival_time=0.0,
        )
        engine.add(request, CASES[name].images)
    return engine.finish()


@pytest.mark.parametrize("decoder_graphs", ["none", "decode", "full"])
def test_tokens_equal_the_plain_twins(factory: EngineFactory, decoder_graphs: str) -> None:
    expected = answers(factory.build(**SETTINGS), factory)
    flashinfer = fake_flashinfer()

    def make_attention(kv: KVCache, limits: AttentionLimits) -> FlashInferAttention:
        return FlashInferAttention(
            kv,
            num_layers=factory.config.text.num_hidden_layers,
            limits=limits,
            kernel="fa2",
            num_multiprocessors=132,
            flashinfer=flashinfer,
        )

    engine = factory.build(
        make_attention=make_attention,
        enforce_eager=decoder_graphs == "none",
        decoder_graphs=decoder_graphs,
        **SETTINGS,
    )
    assert answers(engine, factory) == expected
    counts = engine.decoder_graphs.counts
    assert (counts.hits > 0) == (decoder_graphs != "none")
    if decoder_graphs == "full":
        assert not any(counts.misses.values())


def test_most_decode_steps_need_no_plan_of_their_own(factory: EngineFactory) -> None:
    flashinfer = fake_flashinfer()
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper
    plans_at: list[int] = []

    class Counted(FlashInferAttention):
        def plan(self, batch: object) -> None:
            before = wrapper.num_plans
            super().plan(batch)  # type: ignore[arg-type]
            plans_at.append(wrapper.num_plans - before)

    engine = factory.build(
        make_attention=lambda kv, limits: Counted(
            kv,
            num_layers=factory.config.text.num_hidden_layers,
            limits=limits,
            kernel="fa2",
            num_multiprocessors=132,
            flashinfer=flashinfer,
        ),
        enforce_eager=False,
        decoder_graphs="decode",
        **{**SETTINGS, "max_num_seqs": 1},
    )
    plans_at.clear()
    token_ids, _ = prompt_of(CASES["text"], factory.config)
    # Greedy tokens without anything else never leave a CPU's memory, so that there is no wait to work in.
    sampling = SamplingParams(max_tokens=40, ignore_eos=True, num_logprobs=0)
    engine.add(Request(request_id="a", prompt_token_ids=token_ids, sampling=sampling, arrival_time=0.0))
    engine.finish()
    # The prefill, and the first decode step, which is another bucket's. Later pages were foreseen.
    assert sum(plans_at) == 2
    assert len(plans_at) == 40
