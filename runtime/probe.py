"""What graphs took when they were measured, against what they take in production. Captures nothing itself.

With `kv_backing` `vmm` both are the same capture. With `torch` the first one was a probe: its graphs are released, the
check is that no private segment is left, and the second capture is compared with what was reserved for it.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from runtime.assembly import Parts
from runtime.config import MIB, ReserveGraphMemory
from runtime.executor.device import Device
from runtime.executor.memory import MeasuredRows
from runtime.stats import GraphFamilyInfo

log = logging.getLogger(__name__)

# A second capture may differ from the first by so much: what the driver keeps of it comes in pages of this size.
TOLERANCE = 0.01
TOLERANCE_BYTES = 2 * MIB


class GraphProbe:
    """The measured families, in the order encoder, decoder."""

    def __init__(self, measured: Sequence[GraphFamilyInfo]) -> None:
        self._measured = tuple(measured)
        self._num_captures = 1
        self._segments_left = 0

    def release(self, parts: Parts, device: Device, rows: MeasuredRows) -> MeasuredRows:
        """Releases every graph; the rows, with what stayed in private pools all the same counted once more."""
        parts.release_graphs()
        device.settled_bytes()
        self._segments_left = parts.segment_bytes
        self._num_captures = 2
        if self._segments_left:
            log.warning("private segments are left after the probe", extra={"bytes": self._segments_left})
        return replace(rows, graph_driver=rows.graph_driver + self._segments_left)

    def compare(self, captured: Sequence[GraphFamilyInfo]) -> None:
        """Warns where production took other than what was measured, beyond 1 % and 2 MiB."""
        for before, after in zip(self._measured, captured, strict=True):
            difference = after.captured_bytes - before.measured_bytes
            if abs(difference) > max(TOLERANCE_BYTES, TOLERANCE * before.measured_bytes):
                log.warning(
                    "production graphs took other than what was measured",
                    extra={
                        "graph": after.family,
                        "measured_bytes": before.measured_bytes,
                        "captured_bytes": after.captured_bytes,
                    },
                )

    def graph_infos(
        self, captured: Sequence[GraphFamilyInfo] | None, reserve: ReserveGraphMemory
    ) -> tuple[GraphFamilyInfo, ...]:
        """The families as they are exported: reserved and measured from the probe, the rest from production (`None`:
        the probe is production). `skip` does not even measure."""
        return tuple(
            msgspec.structs.replace(
                after,
                reserved_bytes=before.measured_bytes if reserve == "on" else 0,
                measured_bytes=0 if reserve == "skip" else before.measured_bytes,
                num_captures=self._num_captures,
                probe_segments_left_bytes=self._segments_left,
            )
            for before, after in zip(self._measured, captured or self._measured, strict=True)
        )
