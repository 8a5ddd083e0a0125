"""A step whose tokens nobody has read yet, and what the step after it is made of. Launches nothing itself.

While the device runs step n, the host launches step n + 1 for the same requests: their next tokens are on the device
already, all else follows from their lengths. Then it reads the tokens of step n, and schedules, all behind the device's
back. What the scheduler decides is obeyed: a row of step n + 1 counts only if its request is scheduled for exactly that
token; the rows of requests that ended meanwhile are dropped, and whatever else is scheduled runs as a step of its own.

    device   | step n        | step n + 1      | step n + 2
    host       launch n + 1, read n, schedule, launch n + 2, read n + 1

A dropped row has written a key and a value where its request's next token would be: into a block that the request held,
before anything that a later step writes there. No block with a name holds such a place.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from runtime.executor.batch import Step
from runtime.executor.request_slots import RunningRequest
from runtime.executor.sampler import PendingSample
from runtime.scheduler.output import ScheduledRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchedStep:
    """Rows that sample in a step on its way: requests, slots, tokens of each before the one that is sampled, and its
    row in `sample`."""

    rows: tuple[RunningRequest, ...]
    slots_S: NDArray[np.int64]
    lengths_S: NDArray[np.int64]
    index_S: NDArray[np.int64]
    sample: PendingSample

    def split(self, scheduled: Step) -> tuple["LaunchedStep", Step]:
        """What of a scheduled step is on its way already, and what is not."""
        index_of = {running.request_id: index for index, running in enumerate(self.rows)}
        known: list[int] = []
        rest: list[tuple[RunningRequest, ScheduledRequest]] = []
        for running, part in scheduled:
            index = index_of.get(running.request_id)
            if index is not None and self._holds(index, running, part):
                known.append(index)
            else:
                rest.append((running, part))
        return self.only(known), rest

    def only(self, indices: Sequence[int]) -> "LaunchedStep":
        """The step with some of its rows."""
        if list(indices) == list(range(len(self.rows))):
            return self
        chosen = np.array(indices, dtype=np.int64)
        return replace(
            self,
            rows=tuple(self.rows[index] for index in indices),
            slots_S=self.slots_S[chosen],
            lengths_S=self.lengths_S[chosen],
            index_S=self.index_S[chosen],
        )

    def following(self, *, block_size: int, max_model_len: int) -> "tuple[LaunchedStep, Step] | None":
        """The rows that go on after this step unless a stop token ends them, and their parts of the step after it.
        None if there are none, or if one lacks the block for its next token."""
        indices: list[int] = []
        step: list[tuple[RunningRequest, ScheduledRequest]] = []
        for index, (running, length) in enumerate(zip(self.rows, self.lengths_S.tolist(), strict=True)):
            num_outputs = len(running.output_token_ids) + 1
            if num_outputs >= running.request.sampling.max_tokens or length + 1 >= max_model_len:
                continue
            if length >= len(running.block_ids) * block_size:
                return None
            part = ScheduledRequest(
                request_id=running.request_id,
                num_computed_tokens=length,
                num_scheduled_tokens=1,
                block_ids=running.block_ids,
                is_sampling=True,
            )
            indices.append(index)
            step.append((running, part))
        return (self.only(indices), step) if step else None

    def _holds(self, index: int, running: RunningRequest, part: ScheduledRequest) -> bool:
        return (
            self.rows[index] is running
            and running.slot == self.slots_S[index]
            and part.is_sampling
            and part.num_scheduled_tokens == 1
            and part.num_computed_tokens + 1 == self.lengths_S[index]
        )
