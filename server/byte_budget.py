"""A bound on the bytes of all requests in work together: their bodies, and their pixels. Counts only."""

from types import TracebackType

from server.errors import ServerBusyError


class ByteBudget:
    """One per application. Only what has really come is counted: an announced length would let senders that send
    nothing lock others out."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0

    def hold(self) -> "Hold":
        return Hold(self)


class Hold:
    """One request's share. Given back at the end of the `with` block, or before by `release`; changed by `replace`."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._num_bytes = 0

    @property
    def max_bytes(self) -> int:
        """Of all requests together."""
        return self._budget.max_bytes

    def __enter__(self) -> "Hold":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def add(self, num_bytes: int) -> None:
        """
        Raises:
            ServerBusyError: the budget does not hold so many more.
        """
        budget = self._budget
        # A request alone always fits: its own limit is `max_body_bytes`.
        if budget.num_bytes > self._num_bytes and budget.num_bytes + num_bytes > budget.max_bytes:
            raise ServerBusyError(budget.max_bytes)
        budget.num_bytes += num_bytes
        self._num_bytes += num_bytes

    def replace(self, num_bytes: int) -> None:
        """Holds so many instead: what was held before is gone by now.

        Raises:
            ServerBusyError: the budget does not hold so many.
        """
        self.release()
        self.add(num_bytes)

    def release(self) -> None:
        self._budget.num_bytes -= self._num_bytes
        self._num_bytes = 0
