"""Packs images into encoder buckets. Pure functions of numbers: no tensors, no pixels, no graphs.

The objective is the padding, because a replay's time grows with its bucket's tokens; between equal paddings, fewer
replays. Small sets are solved exactly, larger ones by the best of a few quick heuristics.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.executor.graphs import Bucket

# Up to this many images every partition is tried: some hundreds of groups, under a millisecond.
MAX_EXACT_IMAGES = 6

Group = tuple[int, ...]  # token counts of the images of one replay, largest first


@dataclass(frozen=True, kw_only=True)
class Pack:
    """Images that run together. `images` are indices into the sizes given, ascending; without a `bucket` they run
    eager: a single image larger than every bucket."""

    images: tuple[int, ...]
    tokens: int
    bucket: Bucket | None

    @property
    def padded_tokens(self) -> int:
        return self.bucket.tokens - self.tokens if self.bucket else 0


def pack_images(sizes: Sequence[int], buckets: Sequence[Bucket]) -> list[Pack]:
    """Parts the images into packs with the least padding, each in the smallest bucket that holds it.

    Every image is in exactly one pack. The padding is never more than one by one's, nor than first-fit decreasing's.

    Args:
        sizes: output tokens of each image, at least 1.
        buckets: the ladder; each holds `tokens` tokens of at most `max_items` images.
    """
    largest = max((bucket.tokens for bucket in buckets), default=0)
    packs = [Pack(images=(i,), tokens=size, bucket=None) for i, size in enumerate(sizes) if size > largest]
    fitting = sorted((size for size in sizes if size <= largest), reverse=True)
    if fitting:
        ladder = _Ladder(buckets)
        indices: dict[int, list[int]] = {}
        for i, size in enumerate(sizes):
            indices.setdefault(size, []).append(i)
        for group in _best_partition(tuple(fitting), ladder):
            images = tuple(sorted(indices[size].pop(0) for size in group))
            packs.append(Pack(images=images, tokens=sum(group), bucket=ladder.smallest(sum(group), len(group))))
    return sorted(packs, key=lambda pack: pack.images)


def pack_eager(sizes: Sequence[int], *, max_tokens: int) -> list[Pack]:
    """Neighbouring images together while they stay within `max_tokens`, for runs without graphs: no padding at all.

    An image larger than that runs alone.
    """
    packs: list[Pack] = []
    images: list[int] = []
    tokens = 0
    for i, size in enumerate(sizes):
        if images and tokens + size > max_tokens:
            packs.append(Pack(images=tuple(images), tokens=tokens, bucket=None))
            images, tokens = [], 0
        images.append(i)
        tokens += size
    if images:
        packs.append(Pack(images=tuple(images), tokens=tokens, bucket=None))
    return packs


class _Ladder:
    """The buckets, ascending, with the few questions that packing asks of them."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = sorted(buckets, key=lambda bucket: (bucket.tokens, bucket.max_items))
        self.max_tokens = self.buckets[-1].tokens
        self.max_items = max(bucket.max_items for bucket in self.buckets)

    def smallest(self, tokens: int, items: int) -> Bucket | None:
        for bucket in self.buckets:
            if bucket.tokens >= tokens and bucket.max_items >= items:
                return bucket
        return None

    def padding(self, group: Group) -> int | None:
        """Padded tokens of a group, or `None` when no bucket holds it."""
        tokens = sum(group)
        bucket = self.smallest(tokens, len(group))
        return None if bucket is None else bucket.tokens - tokens


def _best_partition(sizes: Group, ladder: _Ladder) -> list[Group]:
    """Groups with the least (padding, replays). `sizes` descend."""

    def cost(groups: list[Group]) -> tuple[int, int]:
        return sum(ladder.padding(group) or 0 for group in groups), len(groups)

    whole = ladder.padding(sizes)
    if whole == 0:
        return [sizes]
    one_by_one: list[Group] = [(size,) for size in sizes]
    best = min((one_by_one, _first_fit_decreasing(sizes, ladder), _closest_groups(sizes, ladder)), key=cost)
    if 1 < len(sizes) <= MAX_EXACT_IMAGES and cost(best) != (0, 1):
        return _exact(sizes, ladder)
    return best


def _first_fit_decreasing(sizes: Group, ladder: _Ladder) -> list[Group]:
    groups: list[Group] = []
    for size in sizes:
        for i, group in enumerate(groups):
            if ladder.padding((*group, size)) is not None:
                groups[i] = (*group, size)
                break
        else:
            groups.append((size,))
    return groups


def _closest_groups(sizes: Group, ladder: _Ladder) -> list[Group]:
    """Again and again: the largest image left, with those that fill some bucket best."""
    groups: list[Group] = []
    left = list(sizes)
    while left:
        group = _closest_group(left, ladder)
        for size in group:
            left.remove(size)
        groups.append(group)
    return groups


def _closest_group(left: Sequence[int], ladder: _Ladder) -> Group:
    """The group with the least padding that holds `left[0]`; between equals, the one of most tokens.

    A subset sum over bit sets: bit s of `reach[k]` says that some k of the others sum to s.
    """
    first, others = left[0], left[1:]
    mask = (1 << (ladder.max_tokens - first + 1)) - 1
    reach = [1] + [0] * (ladder.max_items - 1)
    history = [tuple(reach)]
    for size in others:
        for k in range(ladder.max_items - 1, 0, -1):
            reach[k] |= (reach[k - 1] << size) & mask
        history.append(tuple(reach))
    best: tuple[int, int, int, int] | None = None  # padding, -tokens, items, sum of the others
    for k, sums in enumerate(reach):
        for bucket in ladder.buckets:
            within = sums & ((1 << max(0, bucket.tokens - first + 1)) - 1)
            if within and bucket.max_items > k:
                rest = within.bit_length() - 1  # the largest sum that this bucket holds
                candidate = (bucket.tokens - first - rest, -(first + rest), k, rest)
                best = candidate if best is None else min(best, candidate)
    assert best is not None, "the first image alone fits"
    _, _, k, rest = best
    group = [first]
    for j in range(len(others), 0, -1):  # which images made the sum, read backwards
        if not history[j - 1][k] >> rest & 1:
            group.append(others[j - 1])
            k, rest = k - 1, rest - others[j - 1]
    return tuple(sorted(group, reverse=True))


def _exact(sizes: Group, ladder: _Ladder) -> list[Group]:
    """The best partition, by trying every group that holds the largest image left."""
    solved: dict[Group, tuple[int, int, list[Group]]] = {(): (0, 0, [])}

    def solve(left: Group) -> tuple[int, int, list[Group]]:
        if left in solved:
            return solved[left]
        best: tuple[int, int, list[Group]] | None = None
        for group, rest in _groups_with_first(left, ladder.max_items):
            padding = ladder.padding(group)
            if padding is None:
                continue
            rest_padding, rest_replays, rest_groups = solve(rest)
            candidate = (padding + rest_padding, 1 + rest_replays, [group, *rest_groups])
            if best is None or candidate[:2] < best[:2]:
                best = candidate
        assert best is not None, "the first image alone fits"
        solved[left] = best
        return best

    return solve(sizes)[2]


def _groups_with_first(left: Group, max_items: int) -> list[tuple[Group, Group]]:
    """Every (group, rest) of distinct contents where the group holds `left[0]`."""
    found: dict[Group, Group] = {}

    def extend(group: Group, skipped: Group, tail: Group) -> None:
        if not tail or len(group) == max_items:
            found.setdefault(group, (*skipped, *tail))
            return
        extend((*group, tail[0]), skipped, tail[1:])
        extend(group, (*skipped, tail[0]), tail[1:])

    extend(left[:1], (), left[1:])
    return list(found.items())
