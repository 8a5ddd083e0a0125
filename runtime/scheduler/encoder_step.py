"""Decides which images one step encodes, and where a request's chunk must end for want of room. No tensors.

First come, first served also for the encoder: once a request was cut for want of room in the cache, later ones get no
room in the same step, or small pictures would keep a large one out for ever.
"""

from runtime.scheduler.encoder_cache import EncoderCache
from runtime.scheduler.output import ScheduledImage
from runtime.scheduler.state import RequestState


class EncoderStep:
    """The encoder's part of a step while it is being scheduled.

    Args:
        cache: the accounts, changed by `commit` only.
        max_tokens: output tokens that the encoder may compute in this step.
        max_shared_tokens: the same for several images; one that is larger has a step of its own.
    """

    def __init__(self, cache: EncoderCache, *, max_tokens: int, max_shared_tokens: int | None = None) -> None:
        self.images: list[ScheduledImage] = []
        self.num_queries = 0
        self.num_hits = 0
        self._cache = cache
        self._max_tokens = max_tokens
        self._max_shared_tokens = max_tokens if max_shared_tokens is None else min(max_tokens, max_shared_tokens)
        self._num_tokens = 0
        self._is_room_claimed = False

    def limit(self, state: RequestState, start: int, end: int) -> int:
        """Where the chunk of tokens `start` .. `end` must end, at least `start`: before the first image that does not
        fit. Takes nothing."""
        room = 0 if self._is_room_claimed else self._cache.room
        num_tokens = self._num_tokens
        pending: set[bytes] = set()
        for image in state.images[state.images_end :]:
            place = image.placeholder
            if place.offset >= end:
                break
            image_hash = image.image_hash
            if image_hash in pending or self._cache.is_referenced(image_hash):
                continue
            is_missing = not self._cache.has(image_hash)
            if place.length > room:
                self._is_room_claimed = True
                return max(start, place.offset)
            if is_missing:
                limit = self._max_shared_tokens if num_tokens else self._max_tokens
                if num_tokens + place.length > limit:
                    return max(start, place.offset)
                num_tokens += place.length
            # A kept image takes room too: referenced, it can no longer be evicted for another.
            room -= place.length
            pending.add(image_hash)
        return end

    def commit(self, state: RequestState, end: int) -> None:
        """References the images that begin before token `end`, which `limit` allowed; missing ones will be encoded."""
        begin = state.images_end
        stop = begin
        while stop < len(state.images) and state.images[stop].placeholder.offset < end:
            stop += 1
        if stop == begin:
            return
        # Those that are here first, so that making room for the others cannot evict them.
        missing: list[int] = []
        for index in range(begin, stop):
            if self._cache.has(state.images[index].image_hash):
                self._cache.reference(state.images[index].image_hash)
                self.num_hits += 1
            else:
                missing.append(index)
        for index in missing:
            image = state.images[index]
            if self._cache.has(image.image_hash):
                self._cache.reference(image.image_hash)
                self.num_hits += 1
                continue
            num_tokens = image.placeholder.length
            self._cache.allocate(image.image_hash, num_tokens)
            self._num_tokens += num_tokens
            self.images.append(
                ScheduledImage(
                    request_id=state.request_id,
                    image_index=index,
                    image_hash=image.image_hash,
                    num_tokens=num_tokens,
                )
            )
        self.num_queries += stop - begin
        state.images_end = stop
