"""Blocks of equal content are computed once: what hits, and what must not."""

from tests.unit.runtime.scheduler.builders import parts, picture, request, run_until_done, scheduler, stats, step


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
