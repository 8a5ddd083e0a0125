"""Accounts for image embeddings on the device, by content, in tokens. Holds no embeddings: the executor does.

An image is *referenced* by the running requests whose steps still read its rows, and otherwise *kept* for the next
request with the same picture until its room is needed, the longest unused first.
"""

from collections import OrderedDict


class EncoderCache:
    """Which embeddings the executor holds after the step that is being scheduled.

    Args:
        capacity_tokens: rows of the executor's embedding store.
    """

    def __init__(self, capacity_tokens: int) -> None:
        if capacity_tokens < 0:
            raise ValueError(f"encoder_cache_tokens is {capacity_tokens}; it must be at least 0")
        self.capacity_tokens = capacity_tokens
        self._num_tokens: dict[bytes, int] = {}
        self._ref_counts: dict[bytes, int] = {}
        self._kept: OrderedDict[bytes, None] = OrderedDict()
        self._tokens_used = 0
        self._tokens_kept = 0
        self._evicted: list[bytes] = []

    @property
    def tokens_used(self) -> int:
        """Tokens of all images here, kept ones too."""
        return self._tokens_used

    @property
    def room(self) -> int:
        """Tokens that can still be referenced: free ones, and those of kept images."""
        return self.capacity_tokens - self._tokens_used + self._tokens_kept

    def has(self, image_hash: bytes) -> bool:
        return image_hash in self._num_tokens

    def is_referenced(self, image_hash: bytes) -> bool:
        return image_hash in self._ref_counts

    def reference(self, image_hash: bytes) -> None:
        """Adds a reference to an image that is here."""
        count = self._ref_counts.get(image_hash, 0)
        if count == 0:
            del self._kept[image_hash]
            self._tokens_kept -= self._num_tokens[image_hash]
        self._ref_counts[image_hash] = count + 1

    def allocate(self, image_hash: bytes, num_tokens: int) -> None:
        """Makes room for an image that is not here, evicting kept ones, and gives it one reference."""
        assert image_hash not in self._num_tokens, "the image is here already"
        assert num_tokens <= self.room, (num_tokens, self.room)
        while self.capacity_tokens - self._tokens_used < num_tokens:
            self._evict(next(iter(self._kept)))
        self._num_tokens[image_hash] = num_tokens
        self._ref_counts[image_hash] = 1
        self._tokens_used += num_tokens

    def release(self, image_hash: bytes) -> None:
        """Takes one reference off. An image without any is kept."""
        count = self._ref_counts[image_hash] - 1
        if count > 0:
            self._ref_counts[image_hash] = count
        else:
            del self._ref_counts[image_hash]
            self._kept[image_hash] = None
            self._tokens_kept += self._num_tokens[image_hash]

    def distrust(self, image_hash: bytes) -> None:
        """Evicts an image whose encoding may have failed, unless somebody references it or it is gone already."""
        if image_hash in self._kept:
            self._evict(image_hash)

    def evict_again(self, image_hashes: tuple[bytes, ...]) -> None:
        """Puts images back on the list: the executor may not have seen that they were evicted."""
        self._evicted.extend(image_hash for image_hash in image_hashes if image_hash not in self._num_tokens)

    def take_evicted(self) -> tuple[bytes, ...]:
        """The images evicted since the last call, in order. One may be here again by now: it is to be encoded anew."""
        if not self._evicted:
            return ()
        evicted = tuple(dict.fromkeys(self._evicted))
        self._evicted.clear()
        return evicted

    def check_integrity(self, references: dict[bytes, int]) -> None:
        """Asserts that counts and tokens agree.

        Args:
            references: how often running requests reference each image.
        """
        assert self._ref_counts == references
        assert set(self._kept) == set(self._num_tokens) - set(references)
        assert self._tokens_used == sum(self._num_tokens.values()) <= self.capacity_tokens
        assert self._tokens_kept == sum(self._num_tokens[image_hash] for image_hash in self._kept)

    def _evict(self, image_hash: bytes) -> None:
        del self._kept[image_hash]
        num_tokens = self._num_tokens.pop(image_hash)
        self._tokens_kept -= num_tokens
        self._tokens_used -= num_tokens
        self._evicted.append(image_hash)
