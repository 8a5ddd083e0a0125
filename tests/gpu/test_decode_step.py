"""Whole engines on a GPU: kernels and graphs agree with their plain twins, and a decode step waits once."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.config import GIB, EngineConfig
from runtime.offline import OfflineEngine, OfflineRequest
from runtime.request import Request, SamplingParams

pytestmark = pytest.mark.gpu

SETTINGS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "load_format": "random",
    "max_model_len": 512,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "kv_cache_memory_bytes": GIB // 4,
    "encoder_graph_budgets": (64, 256),
    "strict_graphs": True,
}


def requests(engine: OfflineEngine) -> list[OfflineRequest]:
    generator = np.random.default_rng(0)
    model = engine.model_config
    sampling = SamplingParams(max_tokens=24, ignore_eos=True)
    found = [
        OfflineRequest(prompt_token_ids=generator.integers(0, 400, length).tolist(), sampling=sampling)
        for length in (3, 40, 130)
    ]
    for side in (112, 224):
        picture = generator.integers(0, 256, (side, side, 3), dtype=np.uint8)
        prompt = [model.vision_start_token_id, model.image_token_id, model.vision_end_token_id, 5, 6, 7]
        found.append(OfflineRequest(prompt_token_ids=prompt, images=[picture], sampling=sampling))
    return found


@pytest.mark.parametrize("compile_mode", ["off", "on"])
def test_graphs_give_the_tokens_of_the_same_buckets_run_eager(small_model_directory: Path, compile_mode: Any) -> None:
    tokens = {}
    for graph_backend in ("emulated", "auto"):
        engine = OfflineEngine(
            EngineConfig(
                model=str(small_model_directory),
                decoder_graphs="full",
                graph_backend=graph_backend,
                compile=compile_mode,
                **SETTINGS,
            )
        )
        # One at a time: which requests share a step depends on time otherwise.
        tokens[graph_backend] = [answer.token_ids for answer in engine.generate(requests(engine), concurrency=1)]
        misses = {family: counts.misses for family, counts in engine.stats().graphs.items()}
        assert not any(any(reasons.values()) for reasons in misses.values()), misses
        del engine
        torch.cuda.empty_cache()
    assert tokens["auto"] == tokens["emulated"]
    assert len({tuple(ids) for ids in tokens["auto"]}) > 1


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=200, ignore_eos=True),
        SamplingParams(
            max_tokens=200, ignore_eos=True, temperature=0.8, top_p=0.9, top_k=20, min_p=0.01, seed=1,
            presence_penalty=0.3, repetition_penalty=1.1, logit_bias={5: 1.0}, num_logprobs=5,
        ),
    ],
    ids=["greedy", "everything"],
)  # fmt: skip
def test_decode_step_has_no_hidden_wait(small_model_directory: Path, sampling: SamplingParams) -> None:
    offline = OfflineEngine(EngineConfig(model=str(small_model_directory), decoder_graphs="decode", **SETTINGS))
    engine: Any = offline._engine
    for index in range(3):
        engine.add(
            Request(request_id=str(index), prompt_token_ids=[5, 6, 7 + index], sampling=sampling, arrival_time=0.0), []
        )
    for _ in range(8):
        engine.step()
    torch.cuda.synchronize()
    # The documented copy waits for an event, which this mode does not count; anything else raises.
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(40):
            assert engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert engine.stats().num_failed_steps == 0
