"""Memory of the tests' own process, for engines that are built inside it."""

from runtime.config import MIB
from runtime.executor.device import CpuDevice


def memory_beside_this_process(spare_bytes: int = 512 * MIB) -> int:
    """Bytes to let an engine in this process plan with: what the process holds by now, hundreds of tests later, is the
    engine's context, so a fixed number would suffice or not by the order of tests."""
    return CpuDevice().used_bytes() + spare_bytes
