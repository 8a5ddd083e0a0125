"""The offline API on the tiny checkpoint, and `fovea bench throughput` over it."""

import gc
import io
import json
import threading
import weakref
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from PIL import Image

from runtime.config import EngineConfig
from runtime.offline import OfflineEngine, OfflineRequest
from runtime.request import SamplingParams
from runtime.request_budget import request_bytes
from runtime.throughput import measure
from runtime.workload import Workload, mixed_requests, requests_of
from server.bench_throughput import PRESETS
from server.cli import main
from server.image_decode import DecodeOptions, decode
from server.settings import load_settings
from tests.picture_files import PICTURE_FILES
from tests.process_memory import memory_beside_this_process

SMALL: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 128,
    "max_pixels": 64 * 28 * 28,
    "encoder_graph_budgets": (16, 64),
    "num_threads": 1,
}


def config(model: Path | str, **knobs: Any) -> EngineConfig:
    return EngineConfig(model=str(model), memory_bytes=memory_beside_this_process(), **{**SMALL, **knobs})


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> OfflineEngine:
    num_threads = torch.get_num_threads()
    engine = OfflineEngine(config(tiny_checkpoint))
    torch.set_num_threads(num_threads)
    return engine


def noise(seed: int, width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def test_answers_come_in_order_and_alone_or_together_they_are_the_same(engine: OfflineEngine) -> None:
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what"}]}]
    requests = [engine.chat(messages, [noise(seed, 90, 60)], max_tokens=5 + seed, ignore_eos=True) for seed in range(5)]
    together = engine.generate(requests)
    alone = [engine.generate([request])[0] for request in requests]
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    assert [len(answer.token_ids) for answer in together] == [5, 6, 7, 8, 9]
    assert len({tuple(answer.token_ids[:5]) for answer in together}) > 1
    assert all(answer.finish_reason == "length" and answer.error is None for answer in together)
    for answer in together:
        assert answer.first_token_seconds is not None
        assert len(answer.gap_seconds) == len(answer.token_ids) - 1
    assert isinstance(engine.text(together[0]), str)


def test_pictures_are_resized_and_their_tokens_placed(engine: OfflineEngine) -> None:
    model = engine.model_config
    request = OfflineRequest(
        prompt_token_ids=[5, model.image_token_id, 6],
        images=[np.zeros((70, 120, 3), np.uint8)],
        sampling=SamplingParams(max_tokens=1),
    )
    (answer,) = engine.generate([request])
    assert answer.num_prompt_tokens == 2 + 2 * 4  # 56 x 112 pixels


@pytest.mark.parametrize("name", sorted(PICTURE_FILES))
@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_pictures_are_what_the_server_makes_of_their_files(engine: OfflineEngine, name: str) -> None:
    """Transparency shows white, 16-bit grey is scaled, and photographs are turned upright."""
    data = PICTURE_FILES[name]()
    options = DecodeOptions(max_source_pixels=10**7, factor=28, min_pixels=engine.config.min_pixels, max_pixels=50_176)
    with Image.open(io.BytesIO(data)) as image:
        request = OfflineRequest(
            prompt_token_ids=[5, engine.model_config.image_token_id],
            images=[image],
            sampling=SamplingParams(max_tokens=1),
        )
        planned = engine.planned_bytes(request)
        prepared = engine.prepare("one", request)
    assert prepared.request.images[0].image_hash == decode(data, options).image_hash
    assert planned == request_bytes(prepared.request, prepared.pixels)


def test_what_is_ready_ahead_of_its_turn_counts_in_the_memory_plan(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_threads = torch.get_num_threads()
    engine = OfflineEngine(config(tiny_checkpoint, max_num_seqs=8, request_memory_bytes=700_000))
    torch.set_num_threads(num_threads)
    assert engine.info.max_request_bytes == 700_000
    prepare, lock, held, peak = OfflineEngine.prepare, threading.Lock(), [0], [0]

    def count(num_bytes: int) -> None:
        with lock:
            held[0] += num_bytes
            peak[0] = max(peak[0], held[0])

    def counted(self: OfflineEngine, request_id: str, request: OfflineRequest) -> Any:
        prepared = prepare(self, request_id, request)
        for array in prepared.pixels:
            count(array.nbytes)
            weakref.finalize(array, count, -array.nbytes)
        return prepared

    monkeypatch.setattr(OfflineEngine, "prepare", counted)
    messages = [{"role": "user", "content": [{"type": "image"}]}]
    requests = (engine.chat(messages, [noise(seed, 224, 224)], max_tokens=4, ignore_eos=True) for seed in range(24))
    answers = engine.generate(requests)
    assert [len(answer.token_ids) for answer in answers] == [4] * 24
    gc.collect()
    assert held == [0]
    # Four pictures of 150 kB have room, two are more than those that run one after the other would hold.
    assert 300_000 < peak[0] <= 700_000


def test_a_request_that_can_never_be_served_is_answered_and_others_go_on(engine: OfflineEngine) -> None:
    long = OfflineRequest(prompt_token_ids=[5] * 400, sampling=SamplingParams(max_tokens=4))
    good = OfflineRequest(prompt_token_ids=[5] * 4, sampling=SamplingParams(max_tokens=4, ignore_eos=True))
    refused, answer = engine.generate([long, good])
    assert refused.finish_reason == "error"
    assert "max_model_len" in (refused.error or "")
    assert len(answer.token_ids) == 4


def test_images_and_markers_must_match(engine: OfflineEngine) -> None:
    request = OfflineRequest(prompt_token_ids=[5], images=[noise(0, 56, 56)], sampling=SamplingParams(max_tokens=1))
    with pytest.raises(ValueError, match="0 image tokens for 1 images"):
        engine.generate([request])
    with pytest.raises(ValueError, match="mm_encoder_only"):
        engine.encode([noise(0, 56, 56)])


def test_encoder_only_mode_gives_rows(tiny_checkpoint: Path) -> None:
    num_threads = torch.get_num_threads()
    engine = OfflineEngine(config(tiny_checkpoint, mm_encoder_only=True))
    torch.set_num_threads(num_threads)
    one, two = engine.encode([noise(1, 112, 56), noise(2, 56, 56)])
    assert (one.shape, two.shape) == ((8, 64), (4, 64))
    assert torch.isfinite(one).all()


def test_a_pinned_revision_is_started_without_asking_the_hub(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    commit = "a" * 40
    snapshots = tmp_path / "models--owner--model" / "snapshots"
    snapshots.mkdir(parents=True)
    (snapshots / commit).symlink_to(tiny_checkpoint)
    engine = OfflineEngine(config("owner/model", revision=commit, mm_encoder_only=True))
    assert engine.info.model == "owner/model"


def test_workload_is_seeded_and_every_picture_is_another(engine: OfflineEngine) -> None:
    workload = Workload(
        num_requests=3,
        num_warmups=1,
        concurrency=2,
        image_sizes=((56, 56), (84, 56)),
        num_text_tokens=7,
        num_output_tokens=4,
    )
    requests, again = (list(requests_of(workload, engine.model_config)) for _ in range(2))
    assert [request.prompt_token_ids for request in requests] == [request.prompt_token_ids for request in again]
    assert [np.asarray(request.images[0]).shape for request in requests] == [(56, 56, 3), (56, 84, 3)] * 2
    assert len({np.asarray(request.images[0]).tobytes() for request in requests}) == 4
    result = measure(engine, workload)
    assert (result["requests"], result["errors"], result["output_tokens"]) == (3, 0, 12)
    # Two of 6 tokens, one of 4, each between two marks, before seven tokens of text.
    assert result["prompt_tokens"] == 2 * (6 + 9) + (4 + 9)
    assert result["graphs"]["encoder"]["hits"] == 3
    assert result["steps"] > 0


def test_a_mix_has_every_kind_of_request_and_none_is_too_long(engine: OfflineEngine) -> None:
    mixed, again = (list(mixed_requests(120, model=engine.model_config, config=engine.config)) for _ in range(2))
    assert [request.prompt_token_ids for request in mixed] == [request.prompt_token_ids for request in again]
    assert {len(request.images) for request in mixed} == {0, 1, 2, 3}
    sizes = [np.asarray(image).shape[:2] for request in mixed for image in request.images]
    tokens = {height * width // 784 for height, width in sizes}
    assert min(tokens) < 10
    assert 60 < max(tokens) <= 64
    assert max(height / width for height, width in sizes) > 2
    assert {request.abort_after_tokens for request in mixed} == {None, 0, 1, 2, 3}
    answers = engine.generate(mixed)
    assert not [answer.error for answer in answers if answer.error]
    # Three pictures of up to 64 tokens each: not all would fit the model's 256 tokens in every prompt.
    assert max(answer.num_prompt_tokens for answer in answers) > 180


def test_requests_that_leave_are_aborted_and_hold_nothing(engine: OfflineEngine) -> None:
    def request(abort_after_tokens: int | None) -> OfflineRequest:
        sampling = SamplingParams(max_tokens=20, ignore_eos=True)
        return OfflineRequest(prompt_token_ids=[5, 6], sampling=sampling, abort_after_tokens=abort_after_tokens)

    answers = engine.generate([request(count) for count in (0, 3, None, 30)])
    assert [answer.finish_reason for answer in answers] == ["abort", "abort", "length", "length"]
    assert [len(answer.token_ids) for answer in answers] == [0, 3, 20, 20]
    assert answers[1].token_ids == answers[2].token_ids[:3]
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_blocks_used) == (0, 0, 0)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_settings_that_an_engine_takes(name: str) -> None:
    preset = PRESETS[name]
    config = load_settings(dict(preset.settings), environ={}).engine_config()
    assert config.max_num_seqs == preset.concurrency
    assert config.decoder_graphs == ("none" if name == "pair" else "full")


def test_bench_throughput_prints_a_table_and_a_line_of_json(
    tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(
        [
            "bench", "throughput", str(tiny_checkpoint), "--preset", "pair-graphs", "--requests", "2", "--warmup", "1",
            "--image", "56x56", "--output-tokens", "3", "--max-pixels", "12544", "--encoder-graph-budgets", "16",
            "--max-num-batched-tokens", "64", "--max-model-len", "128", "--num-threads", "1",
            "--memory-bytes", str(memory_beside_this_process()),
        ]
    )  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert code == 0
    assert (result["preset"], result["requests"], result["output_tokens"]) == ("pair-graphs", 2, 6)
    # As vLLM reports the size of its cache: what requests can hold, so without the block of padding.
    assert result["kv_tokens"] % 16 == 0
    assert result["kv_tokens"] > 0
    assert result["workload"]["image_sizes"] == [[56, 56]]
    assert result["graphs"]["decoder"]["misses"] == {}
    assert any(line.startswith("requests_per_second") for line in lines)


def test_bench_throughput_tells_a_start_that_fails(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", "throughput", str(tmp_path)]) == 1
    with pytest.raises(SystemExit):
        main(["bench", "throughput", str(tmp_path), "--compile", "perhaps"])
    assert "compile" in capsys.readouterr().err
