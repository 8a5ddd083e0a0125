"""Chooses the encoder's ladder of budgets for a sample of pictures: from measured rungs to the fewest that pay.

Knows numbers only: tokens of pictures, and what a replay of each budget and an eager forward were measured to take.
`runtime.tune` measures; packing is the engine's own.

A rung pays if without it the pictures of the sample would take longer by a larger share than the share of memory that
it takes from the KV cache: 3 % of the encoder's time are worth more than 1 % of the cache.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from runtime.executor.graphs import Bucket
from runtime.executor.packing import pack_images

# Less than this share of the time is no gain: a rung costs a capture at each start, too.
MIN_GAIN = 0.005

# An eager forward must be quicker by so much to be preferred: unlike a replay it keeps the host busy, too.
EAGER_HANDICAP = 1.1

# Budgets are multiples of this: kernels work in tiles of some dozens of patches, four to a token.
GRANULARITY = 8

# Steps that a ladder is tried on, of one image up to as many as a replay holds, in turns.
NUM_STEPS = 48

# Rungs beside those of the ladder in use: so many quantiles of the sample.
NUM_QUANTILES = 8

# Pictures of the sample when there is none: areas from min_pixels to max_pixels, every scale as likely as any other.
NUM_DEFAULT_PICTURES = 33


@dataclass(frozen=True, kw_only=True)
class Rung:
    """A budget as it was measured beside the other candidates. `graph_bytes`: what its graph took when those larger
    than it were there already, whose working memory it shares."""

    tokens: int
    graph_bytes: int
    replay_seconds: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Everything that was measured: rungs ascending, and eager forwards as (tokens, seconds), ascending."""

    rungs: tuple[Rung, ...]
    eager: tuple[tuple[int, float], ...]
    max_items: int

    def replay_seconds(self, tokens: int) -> float:
        """Of a rung; never less than a smaller one's, which only noise could make it."""
        return max(rung.replay_seconds for rung in self.rungs if rung.tokens <= tokens)

    def eager_seconds(self, tokens: int) -> float:
        """Between two measured forwards in proportion; beyond the largest as that one grows with its tokens."""
        sizes, seconds = zip(*self.eager, strict=True)
        if tokens > sizes[-1]:
            return float(seconds[-1] * tokens / sizes[-1])
        return float(np.interp(tokens, sizes, seconds))

    def graph_bytes(self, ladder: Sequence[int]) -> int:
        """What a ladder of these rungs takes. Its largest holds the working memory that all share, in proportion to its
        tokens, whichever of the candidates it is."""
        by_tokens = {rung.tokens: rung.graph_bytes for rung in self.rungs}
        top, largest = max(ladder), self.rungs[-1]
        shared = largest.graph_bytes * top // largest.tokens
        return sum(by_tokens[tokens] for tokens in ladder if tokens != top) + max(by_tokens[top], shared)


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What a ladder would do to the sample. `seconds_per_image`: eager forwards with their handicap. `padded_share`: of
    the tokens of all replays. `replays`: by budget."""

    budgets: tuple[int, ...]
    graph_bytes: int
    seconds_per_image: float
    padded_share: float
    eager_share: float
    replays: Mapping[int, int]


def default_sample(min_tokens: int, max_tokens: int) -> tuple[int, ...]:
    """Tokens of pictures between the smallest and the largest."""
    steps = np.geomspace(max(1, min_tokens), max(1, min_tokens, max_tokens), NUM_DEFAULT_PICTURES)
    return tuple(int(tokens) for tokens in np.rint(steps))


def steps_of(
    sample: Sequence[int], *, max_items: int, max_shared_tokens: int | None = None, seed: int = 0
) -> list[tuple[int, ...]]:
    """Images that come to the encoder together: drawn from the sample, one to `max_items` of them, and parted where the
    scheduler would (`max_shared_tokens`: see `EncoderStep`)."""
    generator = np.random.default_rng(seed)
    drawn = [generator.choice(sample, 1 + index % max_items).tolist() for index in range(NUM_STEPS)]
    if max_shared_tokens is None:
        return [tuple(images) for images in drawn]
    return [step for images in drawn for step in _parted(images, max_shared_tokens)]


def _parted(images: Sequence[int], max_shared_tokens: int) -> list[tuple[int, ...]]:
    """In order, several to a step as long as they have no more tokens together."""
    steps: list[tuple[int, ...]] = []
    for tokens in images:
        if steps and sum(steps[-1]) + tokens <= max_shared_tokens:
            steps[-1] += (tokens,)
        else:
            steps.append((tokens,))
    return steps


def candidates(sample: Sequence[int], ladder: Sequence[int], *, max_tokens: int) -> tuple[int, ...]:
    """Budgets to measure: the ladder in use, and quantiles of the sample alone and of two together, within `max_tokens`
    (a budget beyond what runs anyway would cost a larger transient, too)."""
    quantiles = np.quantile(sample, np.linspace(1 / NUM_QUANTILES, 1, NUM_QUANTILES), method="higher")
    alone = {int(one) for one in quantiles}
    wanted = {-(-tokens // GRANULARITY) * GRANULARITY for tokens in alone | {2 * tokens for tokens in alone}}
    return tuple(sorted({*ladder, *(min(tokens, max_tokens) for tokens in wanted if tokens < 2 * max_tokens)}))


def outlook(ladder: Sequence[int], steps: Sequence[Sequence[int]], measured: Measured) -> Outlook:
    """Packs every step into the ladder as the engine would, and adds up what was measured."""
    max_items = measured.max_items
    buckets = [Bucket(name=str(one), tokens=one, max_items=min(max_items, one)) for one in sorted(ladder)]
    seconds = 0.0
    num_padded = num_replayed = num_eager = 0
    replays = dict.fromkeys(sorted(ladder), 0)
    for step in steps:
        for pack in pack_images(step, buckets):
            if pack.bucket is None:
                seconds += measured.eager_seconds(pack.tokens) * EAGER_HANDICAP
                num_eager += len(pack.images)
                continue
            seconds += measured.replay_seconds(pack.bucket.tokens)
            num_padded += pack.padded_tokens
            num_replayed += pack.bucket.tokens
            replays[pack.bucket.tokens] += 1
    num_images = sum(map(len, steps))
    return Outlook(
        budgets=tuple(sorted(ladder)),
        graph_bytes=measured.graph_bytes(ladder),
        seconds_per_image=seconds / num_images,
        padded_share=num_padded / num_replayed if num_replayed else 0.0,
        eager_share=num_eager / num_images,
        replays=replays,
    )


def tuned_ladder(steps: Sequence[Sequence[int]], measured: Measured, *, memory_bytes: int) -> Outlook:
    """From all measured rungs takes away, one after the other, the one that pays least, until each one left pays.

    Args:
        memory_bytes: what graphs and the KV cache share.
    """
    best = outlook([rung.tokens for rung in measured.rungs], steps, measured)
    while len(best.budgets) > 1:
        without = [
            outlook([other for other in best.budgets if other != tokens], steps, measured) for tokens in best.budgets
        ]
        gains = [_gain(best, one, memory_bytes) for one in without]
        least = min(range(len(gains)), key=gains.__getitem__)
        if gains[least] >= 0:
            break
        best = without[least]
    return best


def _gain(ladder: Outlook, without: Outlook, memory_bytes: int) -> float:
    """By how much the share of time that a rung saves exceeds the share of memory that it takes."""
    time_share = without.seconds_per_image / ladder.seconds_per_image - 1
    memory_share = (ladder.graph_bytes - without.graph_bytes) / memory_bytes
    return time_share - max(memory_share, MIN_GAIN)
