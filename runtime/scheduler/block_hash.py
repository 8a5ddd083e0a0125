"""Names the content of KV blocks, so that equal names mean equal keys and values. Pure: no state, no tensors.

A block's hash covers everything that its keys and values depend on: the parent's hash (and so all tokens before it and
the cache salt), its own token ids, and the full digest and place of each image that overlaps it. Placeholder tokens
are the same for every picture: without digest and place another picture, or the same one elsewhere, would hit.
"""

from array import array
from collections.abc import Sequence
from hashlib import sha256
from struct import pack

from runtime.request import ImageInput


def root_hash(cache_salt: str) -> bytes:
    """The parent of a first block. Requests with different salts share nothing."""
    return sha256(b"root:" + cache_salt.encode()).digest()


def extend_hashes(
    hashes: list[bytes],
    token_ids: Sequence[int],
    images: Sequence[ImageInput],
    *,
    block_size: int,
    cache_salt: str,
) -> None:
    """Appends to `hashes` those of the full blocks of `token_ids` that it lacks.

    Args:
        hashes: one for each full block so far, first block first; extended in place.
        token_ids: all known tokens of the request.
        images: ascending by place, not overlapping.
    """
    num_full = len(token_ids) // block_size
    first = 0
    for number in range(len(hashes), num_full):
        start = number * block_size
        end = start + block_size
        parent = hashes[-1] if hashes else root_hash(cache_salt)
        digest = sha256(parent)
        digest.update(array("q", token_ids[start:end]))
        while first < len(images) and images[first].placeholder.end <= start:
            first += 1
        for image in images[first:]:
            if image.placeholder.offset >= end:
                break
            digest.update(pack("<Iq", len(image.image_hash), image.placeholder.offset - start))
            digest.update(image.image_hash)
        hashes.append(digest.digest())
