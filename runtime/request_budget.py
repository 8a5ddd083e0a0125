"""Bounds what the requests in the engine hold of its memory: pixels and prompts. Counts only; knows no sockets.

The memory plan of a CPU has a row for it (`requests`), and whoever gives requests to an engine keeps to it: the client
of an engine process, and the offline engine, for which those that it makes ready ahead of their turn count too, since
they lie in the same process. What does not fit yet waits outside, in order.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.config import PROMPT_TOKEN_BYTES
from runtime.request import Request, SamplingParams


def request_bytes(request: Request, pixels: Sequence[NDArray[np.uint8]]) -> int:
    """What one request holds of the engine's memory while it is there."""
    num_pixel_bytes = sum(array.nbytes for array in pixels)
    return planned_bytes(num_pixel_bytes, len(request.prompt_token_ids), request.sampling)


def planned_bytes(num_pixel_bytes: int, num_prompt_tokens: int, sampling: SamplingParams) -> int:
    """What a request will hold whose pictures are not resized yet."""
    num_grammar_bytes = len(sampling.grammar) if sampling.grammar is not None else 0
    return num_pixel_bytes + PROMPT_TOKEN_BYTES * num_prompt_tokens + num_grammar_bytes


class RequestBudget:
    """Who holds how much. `max_bytes` None: there is no bound.

    A request is in the engine until the engine says that it is not: by its last output, or, once it was told to abort
    the request, by its answer to that. Until then new requests could come on top of the pixels of old ones.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._held: dict[str, int] = {}
        self._aborted: set[str] = set()

    def take(self, request_id: str, num_bytes: int) -> bool:
        """Counts the request if it fits; says whether it did. One alone always fits: the plan has room for the largest,
        and what is larger the engine refuses. An id that is still held does not fit."""
        if request_id in self._held:
            return False
        if self._held and self.max_bytes is not None and self.num_bytes + num_bytes > self.max_bytes:
            return False
        self._held[request_id] = num_bytes
        self.num_bytes += num_bytes
        return True

    def abort(self, request_id: str) -> None:
        """The engine is told to abort the request: only its answer, `release_aborted`, counts from now on."""
        self._aborted.add(request_id)

    def release(self, request_id: str) -> None:
        """The request's last output came. An unknown one is no error."""
        if request_id not in self._aborted:
            self.num_bytes -= self._held.pop(request_id, 0)

    def release_aborted(self, request_id: str) -> None:
        """The engine has aborted the request, or had finished it before."""
        self._aborted.discard(request_id)
        self.num_bytes -= self._held.pop(request_id, 0)
