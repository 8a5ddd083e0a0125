"""When pictures are encoded, kept and read."""

from tests.unit.runtime.scheduler.builders import parts, picture, request, scheduler, stats, step


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


def test_a_held_request_lets_others_pass_and_takes_its_turn_when_it_is_resumed() -> None:
    target = scheduler()
    target.add(request("held", 10, images=[picture("x", 2, 6)], max_tokens=1))
    target.hold("held")
    assert (target.has_work, target.has_held, target.has_ready) == (True, True, False)
    assert step(target)[0].is_empty
    assert stats(target).num_waiting == 1
    target.add(request("text", 6, max_tokens=1))
    assert parts(step(target)[0]) == [("text", 0, 6)]
    target.resume("held")
    assert parts(step(target)[0]) == [("held", 0, 10)]
    assert not target.has_work


def test_a_held_request_can_be_aborted() -> None:
    target = scheduler()
    target.add(request("held", 10, images=[picture("x", 2, 6)]))
    target.hold("held")
    target.abort("held")
    assert (target.has_work, target.has_held) == (False, False)


def test_missing_pictures_are_those_that_neither_the_encoder_cache_nor_cached_blocks_make_needless() -> None:
    target = scheduler(encoder_cache_tokens=8)
    images = [picture("x", 0, 6), picture("y", 10, 6)]
    target.add(request("first", 20, images=images[:1], max_tokens=1))
    assert target.missing_images("first") == [0]
    step(target)
    # The cache holds x, and blocks of it are named; then z takes its place in the cache, but not in the blocks.
    target.add(request("both", 20, images=images, max_tokens=1))
    assert target.missing_images("both") == [1]
    target.abort("both")
    target.add(request("other", 10, images=[picture("z", 2, 6)], max_tokens=1))
    step(target)
    target.add(request("again", 20, images=images[:1], max_tokens=1))
    target.add(request("elsewhere", 20, images=[picture("x", 3, 6)], max_tokens=1))
    assert (target.missing_images("again"), target.missing_images("elsewhere")) == ([], [0])
