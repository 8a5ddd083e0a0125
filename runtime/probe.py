"""What graphs took when they were measured, against what they take in production. Captures nothing itself.

With `kv_backing` `vmm` both are the same capture. With `torch` the first one was a probe: its graphs are released, the
check is that no private segment is left, and the second capture is compared with what was reserved for it. The driver
may keep what it took for the probe, and then takes nothing for the second capture: what it kept is read at the release,
and counts as the second capture's, which uses it.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from runtime.assembly import Parts
from runtime.config import MIB, ReserveGraphMemory
from runtime.executor.device import Device
from runtime.executor.graphs import GraphSet
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
        self._driver_kept = [0] * len(self._measured)

    def release(self, parts: Parts, device: Device, rows: MeasuredRows) -> MeasuredRows:
        """Releases every graph; the rows, with what stayed in private pools all the same counted once more."""
        self._driver_kept = [_release(graphs, device) for graphs in parts.graph_sets]
        self._segments_left = parts.segment_bytes
        self._num_captures = 2
        if self._segments_left:
            log.warning("private segments are left after the probe", extra={"bytes": self._segments_left})
        return replace(rows, graph_driver=rows.graph_driver + self._segments_left)

    def compare(self, captured: Sequence[GraphFamilyInfo]) -> None:
        """Warns where production took other than what was measured, beyond 1 % and 2 MiB."""
        for before, after in zip(self._measured, self._with_driver_kept(captured), strict=True):
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
            for before, after in zip(
                self._measured, self._with_driver_kept(captured) if captured else self._measured, strict=True
            )
        )

    def _with_driver_kept(self, captured: Sequence[GraphFamilyInfo]) -> Sequence[GraphFamilyInfo]:
        return [
            msgspec.structs.replace(
                info, captured_bytes=info.captured_bytes + kept, driver_bytes=info.driver_bytes + kept
            )
            for info, kept in zip(captured, self._driver_kept, strict=True)
        ]


def _release(graphs: GraphSet[Any], device: Device) -> int:
    """Releases a family's graphs. Of what the driver took for them, what it keeps all the same, in bytes."""
    driver_bytes = graphs.driver_bytes
    held_bytes = device.settled_bytes() - graphs.segment_bytes
    graphs.release()
    freed_bytes = held_bytes - (device.settled_bytes() - graphs.segment_bytes)
    return min(driver_bytes, max(0, driver_bytes - freed_bytes))
