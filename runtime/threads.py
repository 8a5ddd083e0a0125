"""How the engine shares the cores with the server beside it. Imports no torch: the environment must be set before it.

Measured on two cores, others busy on them, with a float32 model of 9.5 M parameters (a decode step at batch 1
and 8, one 64-token picture, the whole start; milliseconds, the best and the middle of many):

    threads, waiting       batch 1        batch 8        picture      start
    1                      2.9    3.2     6.1    6.6     24    25     3.6 s
    2, passive             3.4    4.0     8.6    9.1     27    27     4-9 s
    2, spinning (default)  18     93      33     185     347   871    17-56 s
"""

import os
import sys
from collections.abc import MutableMapping

# How long a thread computes in Python before one that waits gets its turn. Between two operations the encoder's thread
# waits for the step's, and the other way round; 5 ms is Python's own (docs/decisions.md).
SWITCH_SECONDS = 0.0005

# Threads of one operation gain little beyond this on models that a CPU serves.
MAX_DEFAULT_THREADS = 16


def default_threads(num_cores: int) -> int:
    """Threads of one operation: all cores but one, which the server has; at least 1."""
    return max(1, min(MAX_DEFAULT_THREADS, num_cores - 1))


def wait_without_spinning(environment: MutableMapping[str, str] = os.environ) -> None:
    """Makes OpenMP's threads sleep between operations, unless the operator decided. Works before torch is imported.

    By default they spin, and as soon as somebody else wants a core, every operation waits for a thread that waits.
    """
    if "GOMP_SPINCOUNT" not in environment:
        environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def keep_numpy_on_one_thread(environment: MutableMapping[str, str] = os.environ) -> None:
    """Makes NumPy's products run on the thread that asks, unless the operator decided. Works before NumPy is imported,
    so it is for the environment of a process to be started.

    OpenBLAS would take every core for a decoder's rows (`runtime.model.row_decoder`), the server's too, and spin there.
    """
    environment.setdefault("OPENBLAS_NUM_THREADS", "1")


def switch_often() -> None:
    """Lets this process's threads of Python take turns more often."""
    sys.setswitchinterval(SWITCH_SECONDS)
