"""A bounded pool of image workers, for asyncio. Knows how to ask them; what decoding means is `image_decode`'s.

Each worker is a process behind a thread of ours: the thread waits on the pipe without the interpreter lock, and reads
pixels straight into their array, so that the event loop moves no bytes.
"""

import asyncio
import io
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from server.image_decode import DecodeOptions, ImageError
from server.image_worker import read_header, write_header
from server.worker_process import WorkerClosedError, WorkerProcess


class ImagePoolClosedError(RuntimeError):
    """The pool was closed while a picture was in flight, or before."""


@dataclass(frozen=True, kw_only=True)
class LoadedImage:
    """A picture, ready for the engine. `pixels`: uint8 [height, width, 3]; `image_hash`: their SHA-256 digest.

    The original size is that of the upright picture before resizing; `num_source_bytes` is the size of its file.
    """

    pixels: NDArray[np.uint8]
    image_hash: bytes
    format: str
    original_height: int
    original_width: int
    num_source_bytes: int
    decode_seconds: float

    @property
    def height(self) -> int:
        return int(self.pixels.shape[0])

    @property
    def width(self) -> int:
        return int(self.pixels.shape[1])


def default_num_workers() -> int:
    """Two workers, or one where there are no more than two cores: pictures must not starve the engine."""
    return 1 if len(os.sched_getaffinity(0)) <= 2 else 2


class ImagePool:
    """Image workers. At most one picture a worker is in flight; further callers wait their turn in `decode`."""

    def __init__(self, *, num_workers: int | None = None, timeout_seconds: float = 30.0) -> None:
        """
        Args:
            num_workers: `default_num_workers()` if None.
            timeout_seconds: a worker that takes longer over one picture is killed.
        """
        self._workers = [_Worker() for _ in range(num_workers or default_num_workers())]
        self._timeout_seconds = timeout_seconds
        self._is_closed = False
        self._threads = ThreadPoolExecutor(len(self._workers), thread_name_prefix="image-worker")
        self._idle: asyncio.LifoQueue[_Worker] = asyncio.LifoQueue()
        for worker in self._workers:
            self._idle.put_nowait(worker)

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that run."""
        return [pid for worker in self._workers if (pid := worker.pid) is not None]

    def start(self) -> None:
        """Starts the processes and returns at once: they load their modules meanwhile, and work waits in the pipe.

        A worker that is not running when it is needed starts then, so that calling this is optional.
        """
        for worker in self._workers:
            worker.ensure_running()

    async def decode(
        self, payload: bytes, options: DecodeOptions, *, encoding: Literal["base64", "raw"], max_bytes: int
    ) -> LoadedImage:
        """Decodes one picture in a worker.

        Raises:
            ImageError: the picture cannot be used, or its worker died or took too long over it.
            ImagePoolClosedError: the pool is closed.
        """
        header = {"num_bytes": len(payload), "encoding": encoding, "max_bytes": max_bytes, **asdict(options)}
        worker = await self._idle.get()
        if self._is_closed:
            self._idle.put_nowait(worker)  # for the next who waits, to learn the same
            raise ImagePoolClosedError
        job = asyncio.get_running_loop().run_in_executor(self._threads, worker.decode, header, payload)

        def release(done: asyncio.Future[LoadedImage]) -> None:
            if not done.cancelled():
                done.exception()  # whoever asked may be gone; then nobody else looks
            self._idle.put_nowait(worker)

        # A caller that is cancelled leaves; the worker becomes free when it is done.
        job.add_done_callback(release)
        try:
            return await asyncio.wait_for(asyncio.shield(job), self._timeout_seconds)
        except TimeoutError:
            worker.kill()
            raise ImageError(
                "invalid_image", f"the image could not be decoded within {self._timeout_seconds:g} seconds"
            ) from None

    async def close(self) -> None:
        """Ends the workers; pictures in flight or waiting fail. Safe to call twice."""
        self._is_closed = True
        for worker in self._workers:
            worker.close()
        await asyncio.to_thread(self._threads.shutdown, wait=True, cancel_futures=True)


class _Worker(WorkerProcess):
    """One image worker. `decode` blocks and is called by one thread at a time."""

    def __init__(self) -> None:
        super().__init__("server.image_worker")

    def decode(self, header: dict[str, Any], payload: bytes) -> LoadedImage:
        try:
            return _ask(self.ensure_running(), header, payload)
        except ImageError:
            raise
        except WorkerClosedError:
            raise ImagePoolClosedError from None
        except (EOFError, OSError, ValueError):
            # Killed, out of memory, or crashed in a decoder. The next use starts a new process.
            self.kill()
            if self.is_closed:
                raise ImagePoolClosedError from None
            raise ImageError("invalid_image", "the image could not be decoded: its decoder ended") from None


def _ask(process: subprocess.Popen[bytes], header: dict[str, Any], payload: bytes) -> LoadedImage:
    requests, answers = process.stdin, process.stdout
    assert requests is not None
    assert isinstance(answers, io.BufferedReader)
    write_header(requests, header)
    requests.write(payload)
    requests.flush()
    answer = read_header(answers)
    if answer is None:
        raise EOFError
    if "code" in answer:
        raise ImageError(answer["code"], answer["message"])
    pixels = np.empty((answer["height"], answer["width"], 3), np.uint8)
    if answers.readinto(pixels.data.cast("B")) < pixels.nbytes:
        raise EOFError
    return LoadedImage(
        pixels=pixels,
        image_hash=bytes.fromhex(answer["image_hash"]),
        format=answer["format"],
        original_height=answer["original_height"],
        original_width=answer["original_width"],
        num_source_bytes=answer["num_source_bytes"],
        decode_seconds=answer["decode_seconds"],
    )
