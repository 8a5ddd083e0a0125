"""Where requests wait whose grammar is being compiled, so that no step waits for it. Knows no schedule and no sockets.

One thread compiles, in the order of arrival. Requests with a grammar that is compiled already do not come here.
"""

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.request import Request


class Compiler(Protocol):
    """Compiles grammars and keeps them, for the runner to find."""

    def is_compiled(self, grammar: str) -> bool: ...

    def matcher(self, grammar: str) -> object:
        """
        Raises:
            ValueError: the grammar cannot be served.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class WaitingRequest:
    """A request with its pixels, and why its grammar cannot be served, if so."""

    request: Request
    pixels: Sequence[NDArray[np.uint8]]
    error: Exception | None = None


class GrammarQueue:
    """Requests by id, each with its compilation."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._waiting: dict[str, tuple[WaitingRequest, Future[object]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def must_wait(self, request: Request) -> bool:
        """Whether the request has a grammar that is not compiled yet."""
        grammar = request.sampling.grammar
        return grammar is not None and not self._compiler.is_compiled(grammar)

    def put(self, request: Request, pixels: Sequence[NDArray[np.uint8]]) -> None:
        """Begins to compile the request's grammar."""
        assert request.sampling.grammar is not None
        waiting = WaitingRequest(request=request, pixels=pixels)
        compilation: Future[object] = self._thread.submit(self._compiler.matcher, request.sampling.grammar)
        self._waiting[request.request_id] = (waiting, compilation)

    def discard(self, request_id: str) -> None:
        """Forgets a request; an unknown one is no error."""
        _, compilation = self._waiting.pop(request_id, (None, None))
        if compilation is not None:
            compilation.cancel()

    def take_ready(self, *, timeout_seconds: float) -> list[WaitingRequest]:
        """The requests whose grammar is compiled or refused, which leave the queue. Waits for the first of them.

        Args:
            timeout_seconds: the longest wait; 0 only looks.
        """
        if not self._waiting:
            return []
        wait([compilation for _, compilation in self._waiting.values()], timeout_seconds, FIRST_COMPLETED)
        done = [request_id for request_id, (_, compilation) in self._waiting.items() if compilation.done()]
        ready = []
        for request_id in done:
            waiting, compilation = self._waiting.pop(request_id)
            error = compilation.exception()
            if isinstance(error, Exception):
                waiting = WaitingRequest(request=waiting.request, pixels=waiting.pixels, error=error)
            ready.append(waiting)
        return ready
