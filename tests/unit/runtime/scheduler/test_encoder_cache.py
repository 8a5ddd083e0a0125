import pytest

from runtime.scheduler.encoder_cache import EncoderCache

A, B, C = b"a", b"b", b"c"


def test_a_referenced_image_takes_its_room() -> None:
    cache = EncoderCache(10)
    cache.allocate(A, 6)
    assert (cache.room, cache.tokens_used) == (4, 6)
    assert cache.is_referenced(A)


def test_an_unreferenced_image_is_kept_and_its_room_can_be_had() -> None:
    cache = EncoderCache(10)
    cache.allocate(A, 6)
    cache.release(A)
    assert (cache.room, cache.tokens_used) == (10, 6)
    assert cache.has(A)
    assert not cache.is_referenced(A)


def test_the_longest_unused_image_is_evicted_first() -> None:
    cache = EncoderCache(10)
    for image_hash in (A, B):
        cache.allocate(image_hash, 5)
        cache.release(image_hash)
    cache.reference(A)
    cache.release(A)
    cache.allocate(C, 3)
    assert cache.take_evicted() == (B,)
    assert cache.has(A)


def test_no_more_is_evicted_than_needed() -> None:
    cache = EncoderCache(10)
    for image_hash in (A, B):
        cache.allocate(image_hash, 4)
        cache.release(image_hash)
    cache.allocate(C, 2)
    assert cache.take_evicted() == ()


def test_an_image_counts_once_however_often_it_is_referenced() -> None:
    cache = EncoderCache(10)
    cache.allocate(A, 6)
    cache.reference(A)
    cache.release(A)
    assert cache.room == 4
    cache.release(A)
    assert cache.room == 10


def test_evictions_are_told_once() -> None:
    cache = EncoderCache(4)
    cache.allocate(A, 4)
    cache.release(A)
    cache.allocate(B, 4)
    assert cache.take_evicted() == (A,)
    assert cache.take_evicted() == ()


def test_distrust_evicts_only_what_nobody_references() -> None:
    cache = EncoderCache(10)
    cache.allocate(A, 4)
    cache.allocate(B, 4)
    cache.release(B)
    for image_hash in (A, B, C):
        cache.distrust(image_hash)
    assert cache.take_evicted() == (B,)
    cache.check_integrity({A: 1})


def test_an_image_that_is_here_again_is_not_evicted_again() -> None:
    cache = EncoderCache(10)
    cache.allocate(A, 4)
    cache.evict_again((A, B))
    assert cache.take_evicted() == (B,)


def test_a_negative_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="encoder_cache_tokens"):
        EncoderCache(-1)


def test_a_capacity_of_nothing_serves_text() -> None:
    cache = EncoderCache(0)
    assert cache.room == 0
    cache.check_integrity({})
