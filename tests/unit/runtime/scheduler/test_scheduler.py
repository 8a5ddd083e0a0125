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


# --- Prefix caching


def test_a_repeated_prompt_computes_only_what_follows_its_whole_blocks() -> None:
    target = scheduler()
    target.add(request("a", 11, max_tokens=1))
    run_until_done(target)
    target.add(request("b", 11, max_tokens=1))
    output, [result] = step(target)
    assert parts(output) == [("b", 8, 3)]
    assert result.num_cached_tokens == 8
    assert (stats(target).prefix_cache_query_tokens, stats(target).prefix_cache_hit_tokens) == (22, 8)


def test_a_wholly_cached_prompt_still_computes_its_last_block() -> None:
    target = scheduler()
    for name in ("a", "b"):
        target.add(request(name, 8, max_tokens=1))
        output, _ = step(target)
    assert parts(output) == [("b", 4, 4)]


def test_a_running_request_shares_its_blocks() -> None:
    target = scheduler()
    target.add(request("a", 10))
    first, _ = step(target)
    target.add(request("b", 10))
    second, _ = step(target)
    assert second.requests[1].block_ids[:2] == first.requests[0].block_ids[:2]
    assert second.requests[1].block_ids[2] != first.requests[0].block_ids[2]


def test_blocks_of_a_step_are_not_shared_before_it_is_done() -> None:
    target = scheduler()
    target.add(request("a", 10))
    target.add(request("b", 10))
    assert parts(step(target)[0]) == [("a", 0, 10), ("b", 0, 10)]


def test_output_blocks_are_cached_for_the_next_turn() -> None:
    target = scheduler()
    target.add(request("a", range(6), max_tokens=7))
    run_until_done(target, token=60)
    target.add(request("b", [*range(6), *[60] * 7, 5, 6], max_tokens=1))
    # 12 of the 13 tokens were computed: three whole blocks.
    assert parts(step(target)[0]) == [("b", 12, 3)]


def test_the_same_text_with_another_picture_does_not_hit() -> None:
    target = scheduler()
    target.add(request("a", 16, images=[picture("cat", 5, 6)], max_tokens=1))
    run_until_done(target)
    target.add(request("b", 16, images=[picture("dog", 5, 6)], max_tokens=1))
    assert parts(step(target)[0]) == [("b", 4, 12)]
    target.add(request("c", 16, images=[picture("cat", 5, 6)], max_tokens=1))
    assert parts(step(target)[0]) == [("c", 12, 4)]


def test_the_same_picture_at_another_place_does_not_hit() -> None:
    target = scheduler()
    target.add(request("a", [9] * 16, images=[picture("cat", 4, 6)], max_tokens=1))
    run_until_done(target)
    target.add(request("b", [9] * 16, images=[picture("cat", 5, 6)], max_tokens=1))
    assert parts(step(target)[0]) == [("b", 4, 12)]


def test_another_salt_does_not_hit() -> None:
    target = scheduler()
    target.add(request("a", 16, cache_salt="one", max_tokens=1))
    run_until_done(target)
    target.add(request("b", 16, cache_salt="two", max_tokens=1))
    assert parts(step(target)[0]) == [("b", 0, 16)]


def test_without_prefix_caching_every_prompt_is_computed() -> None:
    target = scheduler(enable_prefix_caching=False)
    for name in ("a", "b"):
        target.add(request(name, 16, max_tokens=1))
        output, [result] = step(target)
    assert parts(output) == [("b", 0, 16)]
    assert result.num_cached_tokens == 0
    assert stats(target).prefix_cache_query_tokens == 0


def test_cached_blocks_give_way_to_a_new_request() -> None:
    target = scheduler(num_blocks=5)
    target.add(request("a", 15, max_tokens=1))
    run_until_done(target)
    target.add(request("b", range(500, 515), max_tokens=1))
    assert parts(step(target)[0]) == [("b", 0, 15)]
    target.add(request("a", 15, max_tokens=1))
    assert parts(step(target)[0]) == [("a", 0, 15)]


def test_a_hit_that_covers_a_picture_does_not_encode_it() -> None:
    target = scheduler(encoder_cache_tokens=6)
    target.add(request("a", 16, images=[picture("cat", 1, 6)], max_tokens=1))
    step(target)
    target.add(request("b", 4, images=[picture("dog", 0, 3)], max_tokens=1))
    assert step(target)[0].evicted_images == (picture("cat", 1, 6).image_hash,)
    target.add(request("c", 16, images=[picture("cat", 1, 6)], max_tokens=1))
    output, _ = step(target)
    assert (parts(output), output.images) == ([("c", 12, 4)], ())


# --- Preemption


def test_the_newest_request_is_preempted_and_resumes_with_its_output() -> None:
    target = scheduler(num_blocks=7, enable_prefix_caching=False)
    target.add(request("a", 11, max_tokens=6))
    target.add(request("b", range(200, 211), max_tokens=6))
    step(target)
    step(target)
    # The next token of both needs a fourth block, and there are none: "b" gives up its three.
    output, _ = step(target)
    assert parts(output) == [("a", 12, 1)]
    assert stats(target).num_preemptions == 1
    assert (stats(target).num_waiting, stats(target).num_running) == (1, 1)
    assert len(run_until_done(target)["b"]) == 4
    assert stats(target).num_blocks_used == 0


def test_a_preempted_request_computes_prompt_and_output_again_before_the_next_token() -> None:
    target = scheduler(num_blocks=7, enable_prefix_caching=False)
    target.add(request("a", 11, max_tokens=4))
    target.add(request("b", range(200, 211), max_tokens=6))
    seen = [parts(step(target)[0]) for _ in range(5)]
    assert seen[-1] == [("b", 0, 13)]
    assert step(target)[0].requests[0].num_computed_tokens == 13


def test_a_preempted_request_stands_before_those_that_never_ran() -> None:
    target = scheduler(num_blocks=7, max_num_seqs=2, enable_prefix_caching=False)
    target.add(request("a", 11, max_tokens=4))
    target.add(request("b", range(200, 211), max_tokens=6))
    target.add(request("c", range(300, 303), max_tokens=6))
    for _ in range(4):
        step(target)
    assert [part[0] for part in parts(step(target)[0])] == ["b", "c"]


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    target = scheduler(num_blocks=7, enable_prefix_caching=False)
    target.add(request("a", 11, max_tokens=4))
    target.add(request("b", range(200, 211), max_tokens=6))
    step(target)
    step(target)
    target.add(request("c", 2))
    assert parts(step(target)[0]) == [("a", 12, 1)]


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    target = scheduler(num_blocks=7)
    target.add(request("a", 11, max_tokens=2))
    target.add(request("b", range(200, 211), max_tokens=6))
    step(target)
    target._preempt(target._running.pop())
    step(target)
    assert parts(step(target)[0]) == [("b", 12, 1)]
    assert stats(target).prefix_cache_query_tokens == 22


def test_a_preempted_request_lets_go_of_its_pictures() -> None:
    target = scheduler(max_num_batched_tokens=8)
    target.add(request("a", 30, images=[picture("x", 2, 20)]))
    step(target)
    target._preempt(target._running.pop())
    target.check_integrity()
    output, _ = step(target)
    assert (parts(output), output.images) == ([("a", 8, 8)], ())


def test_a_request_waits_until_all_that_is_known_of_it_fits() -> None:
    target = scheduler(num_blocks=9, max_num_batched_tokens=12)
    target.add(request("a", 16, max_tokens=1))
    target.add(request("b", range(200, 220), max_tokens=2))
    step(target)
    # Four blocks are free and the next chunk of "b" would take two, but its prompt needs five.
    assert parts(step(target)[0]) == [("a", 12, 4)]
    assert parts(step(target)[0]) == [("b", 0, 12)]


# --- Pictures


def test_a_picture_is_encoded_in_the_step_of_its_first_token() -> None:
    target = scheduler(max_num_batched_tokens=8)
    target.add(request("r", 20, images=[picture("x", 10, 6)]))
    seen = [step(target)[0] for _ in range(3)]
    assert [[(image.image_index, image.num_tokens) for image in output.images] for output in seen] == [[], [(0, 6)], []]


def test_the_same_picture_in_two_requests_of_a_step_is_encoded_once() -> None:
    target = scheduler()
    target.add(request("a", 10, images=[picture("x", 2, 6)]))
    target.add(request("b", 12, images=[picture("x", 3, 6)]))
    output, _ = step(target)
    assert [image.request_id for image in output.images] == ["a"]
    assert (stats(target).encoder_cache_queries, stats(target).encoder_cache_hits) == (2, 1)


def test_the_same_picture_twice_in_a_prompt_is_encoded_once() -> None:
    target = scheduler(encoder_cache_tokens=6)
    target.add(request("a", 16, images=[picture("x", 2, 6), picture("x", 9, 6)]))
    output, _ = step(target)
    assert (parts(output), len(output.images)) == ([("a", 0, 16)], 1)


def test_a_kept_picture_is_not_encoded_again() -> None:
    target = scheduler(enable_prefix_caching=False)
    target.add(request("a", 10, images=[picture("x", 2, 6)], max_tokens=1))
    step(target)
    target.add(request("b", 10, images=[picture("x", 3, 6)], max_tokens=1))
    assert step(target)[0].images == ()


def test_the_chunk_ends_before_a_picture_without_room() -> None:
    target = scheduler(encoder_cache_tokens=10)
    target.add(request("r", 20, images=[picture("x", 0, 6), picture("y", 8, 6)]))
    assert parts(step(target)[0]) == [("r", 0, 8)]
    output, _ = step(target)
    assert parts(output) == [("r", 8, 12)]
    assert output.evicted_images == (picture("x", 0, 6).image_hash,)


def test_the_chunk_ends_before_a_picture_beyond_the_encoders_tokens_of_a_step() -> None:
    target = scheduler(max_encoder_tokens_per_step=10)
    target.add(request("r", 20, images=[picture("x", 0, 6), picture("y", 8, 6)]))
    assert [parts(step(target)[0]) for _ in range(2)] == [[("r", 0, 8)], [("r", 8, 12)]]


def test_pictures_share_a_step_up_to_a_limit_and_a_larger_one_has_its_own() -> None:
    target = scheduler(max_shared_encoder_tokens=8, enable_prefix_caching=False)
    for name, size in (("a", 3), ("b", 5), ("c", 1), ("d", 9)):
        target.add(request(name, size + 1, images=[picture(name, 0, size)], max_tokens=1))
    encoded = [[image.request_id for image in step(target)[0].images] for _ in range(3)]
    assert encoded == [["a", "b"], ["c"], ["d"]]


def test_a_picture_that_has_to_wait_holds_back_no_text_and_no_decoding() -> None:
    target = scheduler(max_shared_encoder_tokens=4, enable_prefix_caching=False)
    target.add(request("a", 5, images=[picture("x", 0, 4)], max_tokens=3))
    target.add(request("b", 8, images=[picture("y", 2, 4)], max_tokens=3))
    assert parts(step(target)[0]) == [("a", 0, 5), ("b", 0, 2)]
    assert parts(step(target)[0]) == [("a", 5, 1), ("b", 2, 6)]


def test_a_kept_picture_needs_no_encoder_tokens() -> None:
    target = scheduler(max_encoder_tokens_per_step=6, enable_prefix_caching=False)
    target.add(request("a", 8, images=[picture("x", 0, 6)], max_tokens=1))
    step(target)
    target.add(request("b", 20, images=[picture("x", 0, 6), picture("y", 8, 6)]))
    assert parts(step(target)[0]) == [("b", 0, 20)]


def test_making_room_does_not_evict_a_picture_of_the_same_chunk() -> None:
    target = scheduler(encoder_cache_tokens=10, enable_prefix_caching=False)
    for name in ("x", "y"):
        target.add(request(name, 6, images=[picture(name, 0, 4)], max_tokens=1))
        step(target)
    # "x" is the longest unused, but needed; "y" must go for "z".
    target.add(request("r", 12, images=[picture("z", 0, 4), picture("x", 6, 4)]))
    output, _ = step(target)
    assert output.evicted_images == (picture("y", 0, 1).image_hash,)
    assert [image.image_index for image in output.images] == [0]


def test_small_pictures_do_not_keep_a_large_one_out() -> None:
    target = scheduler(max_num_batched_tokens=16, encoder_cache_tokens=22)
    target.add(request("holder", 22, images=[picture("h", 0, 20)]))
    target.add(request("large", range(300, 322), images=[picture("l", 1, 20)]))
    target.add(request("small", range(400, 406), images=[picture("s", 1, 2)]))
    assert parts(step(target)[0]) == [("holder", 0, 16)]
    # There would be room for "small" beside "holder", but "large" comes first and lacks some.
    assert parts(step(target)[0]) == [("holder", 16, 6), ("large", 0, 1), ("small", 0, 1)]
    output, _ = step(target)
    assert [image.request_id for image in output.images] == ["large", "small"]


def test_a_picture_with_a_place_beyond_a_prefix_hit_is_referenced_until_it_is_read() -> None:
    target = scheduler(max_num_batched_tokens=8)
    target.add(request("a", 24, images=[picture("x", 2, 18)]))
    step(target)
    target.abort("a")
    # 8 tokens hit, which end within the picture: its rows are read from there on.
    target.add(request("b", 24, images=[picture("x", 2, 18)]))
    output, _ = step(target)
    assert (parts(output), output.images) == ([("b", 8, 8)], ())
    target.check_integrity()
    assert stats(target).encoder_cache_tokens_used == 18


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
