"""API keys: who may ask, and what parts one key's caches from another's. Knows digests, not the keys themselves."""

import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256

import msgspec

from runtime.request import ImageInput


@dataclass(frozen=True, kw_only=True)
class ApiKey:
    """`cache_salt`: two keys' requests share no cached prefix and no cached picture, so that how fast an answer comes
    tells nothing of what others asked."""

    digest: bytes
    cache_salt: str


class ApiKeys:
    """The keys that are accepted. None at all: everybody may ask."""

    def __init__(self, keys: Iterable[str]) -> None:
        digests = {sha256(key.encode()).digest() for key in keys}
        self._keys = [
            ApiKey(digest=digest, cache_salt=hmac.digest(digest, b"cache salt", "sha256").hex()[:32])
            for digest in sorted(digests)
        ]

    @property
    def are_needed(self) -> bool:
        return bool(self._keys)

    def find(self, authorization: bytes | None) -> ApiKey | None:
        """The key in an Authorization header; None if there is none that is known.

        All digests are compared, each in constant time, so that the time taken tells nothing of any key.
        """
        scheme, _, token = (authorization or b"").strip().partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        digest = sha256(token.strip()).digest()
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found


def join_salts(key_salt: str, cache_salt: str) -> str:
    """The salt of a request: its key's and its own. Keys' salts have one length, so that no two pairs join alike."""
    return f"{key_salt}:{cache_salt}" if key_salt else cache_salt


def salted(image: ImageInput, cache_salt: str) -> ImageInput:
    """The same picture under a name that requests with other salts do not share, cached embedding included."""
    if not cache_salt:
        return image
    salted_hash = sha256(cache_salt.encode() + b"\0" + image.image_hash).digest()
    return msgspec.structs.replace(image, image_hash=salted_hash)
