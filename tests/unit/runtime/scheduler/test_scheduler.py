"""What a step is made of, how requests end, and what is told of them."""

import pytest

from runtime.request import TokenLogprobs
from runtime.scheduler.output import SampledToken, StepResult
from tests.unit.runtime.scheduler.builders import EOS, parts, picture, request, run_until_done, scheduler, stats, step

# --- Batching and chunks


def test_a_prompt_is_computed_in_one_step_and_then_one_token_at_a_time() -> None:
    target = scheduler()
    target.add(request("r", 6, max_tokens=3))
    assert parts(step(target)[0]) == [("r", 0, 6)]
    assert parts(step(target)[0]) == [("r", 6, 1)]
    output, outputs = step(target, token=77)
    assert parts(output) == [("r", 7, 1)]
    assert (outputs[0].new_token_ids, outputs[0].finish_reason) == ([77], "length")
    assert not target.has_work


def test_a_new_request_joins_the_running_ones() -> None:
    target = scheduler()
    target.add(request("a", 6))
    step(target)
    target.add(request("b", range(200, 205)))
    assert parts(step(target)[0]) == [("a", 6, 1), ("b", 0, 5)]


def test_a_long_prompt_is_cut_into_chunks_and_samples_with_its_last() -> None:
    target = scheduler(max_num_batched_tokens=8)
    target.add(request("r", 20))
    seen = [step(target) for _ in range(3)]
    assert [parts(output) for output, _ in seen] == [[("r", 0, 8)], [("r", 8, 8)], [("r", 16, 4)]]
    assert [output.requests[0].is_sampling for output, _ in seen] == [False, False, True]
    assert [len(outputs) for _, outputs in seen] == [0, 0, 1]


def test_a_step_stays_within_its_tokens() -> None:
    target = scheduler(max_num_batched_tokens=10)
    for number in range(4):
        target.add(request(f"r{number}", range(100 * number, 100 * number + 7)))
    output = target.schedule()
    assert parts(output) == [("r0", 0, 7), ("r1", 0, 3)]
    assert output.num_scheduled_tokens == 10


def test_a_long_prefill_leaves_a_token_to_each_running_request() -> None:
    # "a" is cut at its image (there is no room beside that of "b"), so that "b" decodes while "a" still prefills.
    target = scheduler(max_num_batched_tokens=8, encoder_cache_tokens=4)
    target.add(request("a", 40, images=[picture("x", 0, 4), picture("y", 4, 4)]))
    target.add(request("b", range(200, 204)))
    assert parts(step(target)[0]) == [("a", 0, 4), ("b", 0, 4)]
    assert parts(step(target)[0]) == [("a", 4, 7), ("b", 4, 1)]


def test_no_more_than_max_num_seqs_run() -> None:
    target = scheduler(max_num_seqs=2)
    for number in range(3):
        target.add(request(f"r{number}", max_tokens=2))
    assert [part[0] for part in parts(step(target)[0])] == ["r0", "r1"]
    assert stats(target).num_waiting == 1
    step(target)
    assert [part[0] for part in parts(step(target)[0])] == ["r2"]


def test_requests_are_admitted_in_the_order_of_arrival_even_if_a_later_one_would_fit() -> None:
    target = scheduler(num_blocks=9, enable_prefix_caching=False)
    target.add(request("a", 16, max_tokens=2))
    target.add(request("large", 20, max_tokens=2))
    target.add(request("small", 3, max_tokens=2))
    assert parts(step(target)[0]) == [("a", 0, 16)]
    assert parts(step(target)[0]) == [("a", 16, 1)]
    assert parts(step(target)[0]) == [("large", 0, 20), ("small", 0, 3)]


def test_an_unchanged_block_table_is_passed_on_as_it_is() -> None:
    target = scheduler()
    target.add(request("r", 5))
    first, second = step(target)[0], step(target)[0]
    assert second.requests[0].block_ids is first.requests[0].block_ids
    assert len(first.requests[0].block_ids) == 2


# --- Ends


@pytest.mark.parametrize("token", [EOS, 7])
def test_an_end_or_stop_token_ends_the_request_and_is_not_returned(token: int) -> None:
    target = scheduler()
    target.add(request("r", stop_token_ids=(7,)))
    step(target)
    _, [last] = step(target, token=token)
    assert (last.new_token_ids, last.finish_reason) == ([], "stop")
    assert stats(target).num_generation_tokens == 2
    assert not target.has_work


def test_ignored_end_tokens_are_returned_and_stop_tokens_still_end() -> None:
    target = scheduler()
    target.add(request("r", ignore_eos=True, stop_token_ids=(7,)))
    assert step(target, token=EOS)[1][0].new_token_ids == [EOS]
    assert step(target, token=7)[1][0].finish_reason == "stop"


def test_a_stop_token_at_the_limit_is_a_stop() -> None:
    target = scheduler()
    target.add(request("r", max_tokens=1))
    assert step(target, token=EOS)[1][0].finish_reason == "stop"


def test_max_model_len_ends_with_length() -> None:
    target = scheduler(max_model_len=10)
    target.add(request("r", 8, max_tokens=100))
    assert run_until_done(target) == {"r": [50, 50]}


def test_logprobs_run_parallel_to_the_returned_tokens() -> None:
    target = scheduler()
    target.add(request("r"))
    logprobs = TokenLogprobs(-0.5, [(50, -0.5)])
    seen = []
    for token in (50, EOS):
        sampled = {"r": SampledToken(token_id=token, logprobs=logprobs)}
        seen += target.update(target.schedule(), StepResult(tokens=sampled, failed={}))
    assert [output.logprobs for output in seen] == [[logprobs], []]


def test_outputs_tell_the_times() -> None:
    target = scheduler()
    target.add(request("r"))
    _, [output] = step(target)
    assert (output.scheduled_time, output.first_token_time) == (12.5, 12.5)


def test_the_next_step_tells_who_finished() -> None:
    target = scheduler()
    target.add(request("a", max_tokens=1))
    target.add(request("b"))
    step(target)
    assert step(target)[0].finished_request_ids == ("a",)
    assert step(target)[0].finished_request_ids == ()


def test_an_id_used_again_is_not_told_as_finished() -> None:
    target = scheduler()
    target.add(request("a", max_tokens=1))
    step(target)
    target.add(request("a", max_tokens=1))
    assert step(target)[0].finished_request_ids == ()


# --- Aborts and failures


def test_an_abort_frees_at_once() -> None:
    target = scheduler(max_num_batched_tokens=8)
    target.add(request("a", 20, images=[picture("x", 2, 10)]))
    target.add(request("b"))
    step(target)
    target.abort("a")
    target.abort("b")
    target.check_integrity()
    assert stats(target).num_blocks_used == 0
    assert not target.has_work


def test_aborting_an_unknown_request_does_nothing() -> None:
    scheduler().abort("nobody")


def test_a_request_aborted_during_the_step_is_ignored() -> None:
    target = scheduler()
    target.add(request("a"))
    target.add(request("b"))
    output = target.schedule()
    target.abort("a")
    tokens = {name: SampledToken(token_id=50) for name in ("a", "b")}
    assert [o.request_id for o in target.update(output, StepResult(tokens=tokens, failed={}))] == ["b"]
    target.check_integrity()


def test_a_failed_request_ends_with_its_error_and_the_others_go_on() -> None:
    target = scheduler()
    target.add(request("a"))
    target.add(request("b"))
    outputs = {output.request_id: output for output in step(target, failed={"a": "no rows"})[1]}
    assert (outputs["a"].finish_reason, outputs["a"].error, outputs["a"].new_token_ids) == ("error", "no rows", [])
    assert outputs["b"].new_token_ids == [50]
    assert [part[0] for part in parts(step(target)[0])] == ["b"]


def test_a_request_without_its_token_fails_instead_of_waiting_for_ever() -> None:
    target = scheduler()
    target.add(request("a"))
    [output] = target.update(target.schedule(), StepResult(tokens={}, failed={}))
    assert output.error == "the executor sampled no token"
    assert not target.has_work


def test_nothing_of_a_failed_step_is_reused() -> None:
    target = scheduler()
    target.add(request("a", 9, images=[picture("x", 2, 4)]))
    step(target, failed={"a": "lost"})
    target.add(request("b", 9, images=[picture("x", 2, 4)]))
    output, _ = step(target)
    assert parts(output) == [("b", 0, 9)]
    assert [image.request_id for image in output.images] == ["b"]


def test_a_step_that_raised_ends_its_requests_and_its_evictions_are_told_again() -> None:
    target = scheduler(max_num_batched_tokens=8, encoder_cache_tokens=6)
    target.add(request("old", 6, images=[picture("x", 0, 4)], max_tokens=1))
    step(target)
    target.add(request("a", 8, images=[picture("y", 0, 4)]))
    target.add(request("later", range(300, 304)))
    output = target.schedule()
    assert len(output.evicted_images) == 1
    failed = target.fail_step(output, "the step failed")
    target.check_integrity()
    assert [(o.request_id, o.error) for o in failed] == [("a", "the step failed")]
    again = target.schedule()
    assert parts(again) == [("later", 0, 4)]
    assert set(again.evicted_images) == {picture("x", 0, 4).image_hash, picture("y", 0, 4).image_hash}
    assert set(again.finished_request_ids) == {"old", "a"}


def test_a_request_that_cannot_progress_fails_instead_of_spinning() -> None:
    # Blocks that vanish after admission (an elastic KV cache may do that) stand for whatever nobody thought of.
    target = scheduler(num_blocks=5)
    target.add(request("stuck", 12))
    target.add(request("small", 3, max_tokens=1))
    target._blocks.allocate(2)
    output = target.schedule()
    assert output.is_empty
    [failed] = target.update(output, StepResult(tokens={}, failed={}))
    assert failed.request_id == "stuck"
    assert failed.error is not None
    assert "2 of 4 KV blocks" in failed.error
    assert parts(target.schedule()) == [("small", 0, 3)]


def test_an_idle_scheduler_has_an_empty_step() -> None:
    target = scheduler()
    output, outputs = step(target)
    assert output.is_empty
    assert outputs == []


# --- Counters


def test_counters_add_up_over_requests() -> None:
    target = scheduler()
    target.add(request("a", 6, max_tokens=3))
    target.add(request("b", 9, max_tokens=2))
    run_until_done(target)
    snapshot = stats(target)
    assert (snapshot.num_prompt_tokens, snapshot.num_generation_tokens) == (15, 5)
    assert (snapshot.num_blocks, snapshot.num_blocks_used) == (64, 0)
    assert (snapshot.num_waiting, snapshot.num_running) == (0, 0)
