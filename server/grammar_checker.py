"""Checks requests' grammars in a process of its own, before the engine is asked. Knows how to ask, and what to tell.

The process starts with the first grammar. The event loop waits on nothing but a future; a grammar that takes too long
loses its process, and the next one gets another.
"""

import asyncio
import contextlib
import hashlib
import json
import subprocess
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from runtime.processing.grammar import MAX_GRAMMAR_BYTES
from server.errors import InvalidRequestError
from server.worker_process import WorkerProcess

MAX_VERDICTS = 512

# What llguidance says, and what a client is told; the rest of its words may hold anything.
_REASONS: tuple[tuple[str, str], ...] = (
    ("Unimplemented keys", "it uses keywords that cannot be enforced"),
    ("look-around", "a pattern uses look-around, which cannot be enforced"),
    ("regex parse error", "a pattern is no regular expression that can be enforced"),
    ("not present in a registry", "a reference leads out of the schema"),
    ("Unsatisfiable", "nothing can satisfy it"),
    ("NoExtension", "nothing can satisfy it"),
    ("oneOf", "the branches of a oneOf do not exclude each other"),
    ("not disjoint", "the patterns of patternProperties do not exclude each other"),
    ("Invalid type", "a type is none of JSON Schema's"),
    ("too many digits", "a multipleOf has too many digits"),
    ("too large", "it is too large"),
    ("too big", "it is too large"),
    ("row has", "it is too complex"),
    ("too many expressions", "it is too complex"),
)


class GrammarChecker:
    """One worker and the verdicts that it gave."""

    def __init__(self, *, timeout_seconds: float = 5.0) -> None:
        """
        Args:
            timeout_seconds: a grammar that takes the worker longer is refused.
        """
        self._timeout_seconds = timeout_seconds
        self._worker = _Worker()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-worker")
        self._turn = asyncio.Lock()
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()

    @property
    def pid(self) -> int | None:
        """Process id of the worker, if it runs."""
        return self._worker.pid

    async def check(self, grammar: str, *, special_tokens: Sequence[str], param: str) -> None:
        """
        Args:
            special_tokens: those that the grammar may name.
            param: the field of the request that is told when it is refused.

        Raises:
            InvalidRequestError: the grammar cannot be served, or nobody knows within the time.
        """
        if len(grammar) > MAX_GRAMMAR_BYTES:
            raise _refusal("it is too large", param)
        key = hashlib.sha256(grammar.encode(errors="surrogatepass")).digest()
        if key not in self._verdicts:
            async with self._turn:
                if key not in self._verdicts:
                    self._remember(key, await self._ask(grammar, special_tokens, param))
        reason = self._verdicts.get(key)
        if reason is not None:
            raise _refusal(reason, param)

    async def close(self) -> None:
        """Ends the worker. Safe to call twice."""
        self._worker.close()
        await asyncio.to_thread(self._thread.shutdown, wait=True, cancel_futures=True)

    def _remember(self, key: bytes, verdict: str | None) -> None:
        self._verdicts[key] = verdict
        while len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)

    async def _ask(self, grammar: str, special_tokens: Sequence[str], param: str) -> str | None:
        """The worker's verdict. Raises one of its own where the worker gave none: another time it may."""
        line = json.dumps({"grammar": grammar, "special_tokens": list(special_tokens)}).encode() + b"\n"
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._worker.greet)
        job = loop.run_in_executor(self._thread, self._worker.ask, line)
        try:
            error = await asyncio.wait_for(asyncio.shield(job), self._timeout_seconds)
        except TimeoutError:
            self._worker.kill()
            with contextlib.suppress(EOFError, OSError):
                await job
            raise _refusal("it is too complex", param) from None
        except asyncio.CancelledError:
            # The client left: nobody else may talk to the worker before it has answered.
            self._worker.kill()
            job.add_done_callback(lambda done: done.exception())
            raise
        except (EOFError, OSError):
            self._worker.kill()
            raise _refusal("it is too complex", param) from None
        if error is None:
            return None
        return next((told for known, told in _REASONS if known in error), "it is no schema that can be enforced")


def _refusal(reason: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(f"The answer cannot be kept within '{param}': {reason}.", param=param)


class _Worker(WorkerProcess):
    """The grammar worker. `greet` and `ask` block, and are called in one thread."""

    def __init__(self) -> None:
        super().__init__("server.grammar_worker")
        self._greeted: subprocess.Popen[bytes] | None = None

    def greet(self) -> None:
        """Returns once the process is there to be asked: its start is no part of the time that a grammar may take.

        Raises:
            OSError: it does not start, or the checker is closed.
        """
        process = self.ensure_running()
        if process is self._greeted:
            return
        assert process.stdout is not None
        if not process.stdout.readline():
            raise OSError("the grammar worker does not start")
        self._greeted = process

    def ask(self, line: bytes) -> str | None:
        """What the worker has against a grammar.

        Raises:
            EOFError, OSError: it died over it.
        """
        process = self._greeted
        if self.is_closed or process is None or process.stdin is None or process.stdout is None:
            raise EOFError
        process.stdin.write(line)
        process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            raise EOFError
        error: str | None = json.loads(answer)["error"]
        return error
