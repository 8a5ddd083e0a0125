import pytest

from runtime.request import Request
from runtime.scheduler.admission import RequestRejected, SchedulerLimits
from tests.unit.runtime.scheduler.builders import picture, request, run_until_done, scheduler


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request("r", 64), r"prompt has 64 tokens and one more is to be generated; max_model_len is 64"),
        (
            request("r", 70, images=[picture("a", 0, 20), picture("b", 30, 5)]),
            r"prompt has 70 tokens \(25 of them from 2 images\).*max_model_len is 64",
        ),
        (request("r", []), r"no tokens"),
        (request("r", 5, max_tokens=0), r"max_tokens is 0"),
        (request("r", 40, images=[picture("a", 0, 33)]), r"image 0 has 33 tokens; encoder_cache_tokens is 32"),
        (request("r", 40, images=[picture("a", 0, 21)]), r"image 0 has 21 tokens; max_encoder_tokens_per_step is 20"),
        (request("r", 10, images=[picture("a", 4, 4), picture("b", 7, 2)]), r"image 1 has tokens 7\.\.9.*begin at 8"),
        (request("r", 30, max_tokens=12), r"need 11 KV blocks of 4 tokens; the KV cache has 10.*kv_cache_memory_bytes"),
    ],
)
def test_a_request_that_can_never_fit_is_refused_with_value_limit_and_knob(bad: Request, message: str) -> None:
    target = scheduler(num_blocks=11, encoder_cache_tokens=32, max_encoder_tokens_per_step=20)
    with pytest.raises(RequestRejected, match=message):
        target.add(bad)
    assert not target.has_work


def test_an_image_beyond_the_prompt_is_refused() -> None:
    bad = Request(
        request_id="r",
        prompt_token_ids=[9, 9],
        images=(picture("a", 1, 2),),
        sampling=request("x").sampling,
        arrival_time=0.0,
    )
    with pytest.raises(RequestRejected, match="end within the prompt's 2 tokens"):
        scheduler().add(bad)


def test_an_id_in_use_is_refused() -> None:
    target = scheduler()
    target.add(request("r"))
    with pytest.raises(RequestRejected, match="in use"):
        target.add(request("r"))


def test_the_largest_request_that_fits_is_served_to_its_end() -> None:
    target = scheduler(num_blocks=11)
    target.add(request("r", 30, max_tokens=11))
    assert len(run_until_done(target)["r"]) == 11


def test_max_tokens_is_clipped_before_blocks_are_counted() -> None:
    target = scheduler(num_blocks=17)
    target.add(request("r", 60, max_tokens=1000))
    assert len(run_until_done(target)["r"]) == 4


@pytest.mark.parametrize(
    "knob", ["max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_encoder_tokens_per_step"]
)
def test_limits_must_be_positive(knob: str) -> None:
    good = {"max_num_seqs": 1, "max_num_batched_tokens": 8, "max_model_len": 8, "max_encoder_tokens_per_step": 8}
    with pytest.raises(ValueError, match=f"{knob} is 0"):
        SchedulerLimits(**{**good, knob: 0})


def test_a_step_must_have_a_token_for_every_sequence() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        SchedulerLimits(max_num_seqs=9, max_num_batched_tokens=8, max_model_len=8, max_encoder_tokens_per_step=8)
