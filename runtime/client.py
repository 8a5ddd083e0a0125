"""The seam between server and engine: the `EngineClient` protocol and the errors it raises. No torch, no HTTP."""

from collections.abc import AsyncGenerator, Sequence
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.request import Request, RequestOutput
from runtime.stats import EngineInfo, EngineStats

EngineState = Literal["starting", "ready", "dead"]


class EngineDeadError(Exception):
    """The engine is gone: requests in flight end with this, and no new one starts."""


class EngineClient(Protocol):
    """What the HTTP layer knows of an engine. `ProcessEngineClient` is the real one; tests replay tokens.

    `start` returns when the engine is ready and raises `EngineDeadError` when it cannot become so.
    """

    @property
    def state(self) -> EngineState: ...

    @property
    def info(self) -> EngineInfo | None:
        """What the engine said of itself; `None` until it is ready."""
        ...

    @property
    def stats(self) -> EngineStats:
        """The newest snapshot."""
        ...

    @property
    def seconds_since_heartbeat(self) -> float:
        """Age of the engine's last sign of life; it gives one at least every second, in idleness too."""
        ...

    async def start(self) -> None: ...

    def generate(self, request: Request, pixels: Sequence[NDArray[np.uint8]]) -> AsyncGenerator[RequestOutput, None]:
        """Sends the request, then yields its outputs; the last has a `finish_reason`. Closing the generator early
        aborts the request in the engine.

        Args:
            request: the sequence to generate.
            pixels: one array [height, width, 3] for each of `request.images`, in order.

        Raises:
            EngineDeadError: the engine died before the last output.
        """
        ...

    async def wait_dead(self) -> str:
        """Returns, with the reason, when the engine has died by itself (not by `shutdown`)."""
        ...

    async def shutdown(self) -> None:
        """Ends the engine and waits for it. Safe to call twice and in any state."""
        ...
