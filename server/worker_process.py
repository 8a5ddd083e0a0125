"""A worker: a process that runs one of our modules, and the pipes to it. Knows how it starts and ends, not its work.

Plain processes over pipes, not `multiprocessing`: a worker imports what its module does and nothing of the parent's.
"""

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path


class WorkerClosedError(OSError):
    """The worker was closed for good."""


class WorkerProcess:
    """One process at a time; a new one in place of one that has ended. Its methods may be called by any thread."""

    def __init__(self, module: str) -> None:
        """`module`: what the process runs, as `server.image_worker`."""
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """Process id of the worker, if it runs."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def ensure_running(self) -> subprocess.Popen[bytes]:
        """The process, which is started if none runs.

        Raises:
            WorkerClosedError: it was closed.
        """
        with self._lock:
            if self._is_closed:
                raise WorkerClosedError(f"{self._module} is closed")
            if self._process is not None and self._process.poll() is not None:
                _discard(self._process)
                self._process = None
            if self._process is None:
                self._process = _spawn(self._module)
            return self._process

    def kill(self) -> None:
        """Ends the process; the next use starts another."""
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._process.wait()

    def close(self) -> None:
        """Ends the process for good. Safe to call twice."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()
                _discard(self._process)
                self._process = None


def _spawn(module: str) -> subprocess.Popen[bytes]:
    root = str(Path(__file__).resolve().parent.parent)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
        # NumPy's arithmetic in a worker is trivial; threads would only take memory.
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    # -P: the folder in which the server was started is not searched for modules.
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )


def _discard(process: subprocess.Popen[bytes]) -> None:
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
