"""Packing: every image once, capacities kept, and never more padding than the simple ways."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.executor.graphs import Bucket
from runtime.executor.packing import MAX_EXACT_IMAGES, Pack, pack_eager, pack_images


def ladder(*tokens: int, max_items: int = 4) -> list[Bucket]:
    return [Bucket(name=str(size), tokens=size, max_items=max_items) for size in tokens]


ladders = st.builds(
    lambda tokens, max_items: ladder(*sorted(tokens), max_items=max_items),
    st.sets(st.integers(4, 300), min_size=1, max_size=6),
    st.integers(1, 8),
)
sizes_lists = st.lists(st.integers(1, 330), max_size=20)


def padding(packs: Sequence[Pack]) -> int:
    return sum(pack.padded_tokens for pack in packs)


def one_by_one_padding(sizes: Sequence[int], buckets: Sequence[Bucket]) -> int:
    fits = [[b.tokens - size for b in buckets if b.tokens >= size] for size in sizes]
    return sum(min(paddings) for paddings in fits if paddings)


def first_fit_decreasing_padding(sizes: Sequence[int], buckets: Sequence[Bucket]) -> int:
    largest, max_items = max(b.tokens for b in buckets), buckets[0].max_items
    bins: list[list[int]] = []
    for size in sorted((s for s in sizes if s <= largest), reverse=True):
        room = next((b for b in bins if sum(b) + size <= largest and len(b) < max_items), None)
        if room is None:
            bins.append([size])
        else:
            room.append(size)
    return sum(min(b.tokens for b in buckets if b.tokens >= sum(content)) - sum(content) for content in bins)


def brute_force_padding(sizes: Sequence[int], buckets: Sequence[Bucket]) -> int:
    """Over all partitions, the plain way."""
    largest, max_items = max(b.tokens for b in buckets), buckets[0].max_items

    def place(i: int, bins: list[list[int]]) -> int:
        if i == len(sizes):
            return sum(min(b.tokens for b in buckets if b.tokens >= sum(x)) - sum(x) for x in bins)
        options = [place(i + 1, [*bins, [sizes[i]]])]
        for j, content in enumerate(bins):
            if len(content) < max_items and sum(content) + sizes[i] <= largest:
                options.append(place(i + 1, [*bins[:j], [*content, sizes[i]], *bins[j + 1 :]]))
        return min(options)

    return place(0, [])


@given(sizes_lists, ladders)
def test_every_image_is_packed_exactly_once_within_capacity(sizes: list[int], buckets: list[Bucket]) -> None:
    packs = pack_images(sizes, buckets)
    assert sorted(i for pack in packs for i in pack.images) == list(range(len(sizes)))
    for pack in packs:
        assert pack.tokens == sum(sizes[i] for i in pack.images)
        assert list(pack.images) == sorted(pack.images)
        if pack.bucket is None:
            assert len(pack.images) == 1
            assert pack.tokens > max(bucket.tokens for bucket in buckets)
        else:
            assert pack.tokens <= pack.bucket.tokens
            assert len(pack.images) <= pack.bucket.max_items


@given(sizes_lists, ladders)
def test_padding_is_never_worse_than_the_simple_ways(sizes: list[int], buckets: list[Bucket]) -> None:
    packed = padding(pack_images(sizes, buckets))
    assert packed <= one_by_one_padding(sizes, buckets)
    assert packed <= first_fit_decreasing_padding(sizes, buckets)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=MAX_EXACT_IMAGES), st.sets(st.integers(60, 200), min_size=1))
def test_small_sets_are_packed_with_the_least_padding_there_is(sizes: list[int], tokens: set[int]) -> None:
    buckets = ladder(*sorted(tokens), max_items=3)
    assert padding(pack_images(sizes, buckets)) == brute_force_padding(sizes, buckets)


@given(sizes_lists, ladders)
def test_packing_is_deterministic(sizes: list[int], buckets: list[Bucket]) -> None:
    assert pack_images(sizes, buckets) == pack_images(sizes, list(reversed(buckets)))


def test_padding_counts_before_replays() -> None:
    # One replay of 256 would pad 96; two replays pad nothing.
    packs = pack_images([96, 64], ladder(64, 96, 256))
    assert [(pack.images, pack.padded_tokens) for pack in packs] == [((0,), 0), ((1,), 0)]


def test_equal_paddings_prefer_fewer_replays() -> None:
    packs = pack_images([64, 64, 64, 64], ladder(64, 128, 256))
    assert [pack.images for pack in packs] == [(0, 1, 2, 3)]


def test_many_images_fill_buckets_to_the_brim() -> None:
    packs = pack_images([10, 20, 30, 40, 50] * 8, ladder(60, 100, max_items=8))
    assert padding(packs) == 0


def test_buckets_may_differ_in_items() -> None:
    buckets = [Bucket(name="a", tokens=16, max_items=1), Bucket(name="b", tokens=32, max_items=4)]
    packs = pack_images([4, 4, 4], buckets)
    assert [(pack.images, pack.bucket and pack.bucket.name) for pack in packs] == [((0, 1, 2), "b")]


def test_without_buckets_every_image_runs_alone() -> None:
    assert [pack.images for pack in pack_images([5, 7], [])] == [(0,), (1,)]


def test_nothing_packs_into_nothing() -> None:
    assert pack_images([], ladder(64)) == []
    assert pack_eager([], max_tokens=64) == []


@given(sizes_lists, st.integers(1, 400))
def test_eager_packs_keep_order_and_stay_within_the_profiled_worst_case(sizes: list[int], max_tokens: int) -> None:
    packs = pack_eager(sizes, max_tokens=max_tokens)
    assert [i for pack in packs for i in pack.images] == list(range(len(sizes)))
    assert all(pack.tokens <= max_tokens or len(pack.images) == 1 for pack in packs)
    assert padding(packs) == 0
