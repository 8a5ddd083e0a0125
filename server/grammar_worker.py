"""The grammar worker: a process that checks one grammar at a time, asked and answering in lines of JSON.

It imports llguidance and NumPy and no tokenizer, has a bound on its memory, and ends when its input does. A grammar
that takes it down or holds it up costs its own request and nothing else. `grammar_checker` is the other end.
"""

import contextlib
import json
import resource
import signal
import sys
from typing import IO

from runtime.processing.grammar import GrammarError, check_grammar

MAX_ADDRESS_BYTES = 4 << 30


def answer(line: bytes) -> bytes:
    """`{"grammar": ..., "special_tokens": [...]}` -> `{"error": null}`, or why the grammar cannot be served."""
    asked = json.loads(line)
    error: str | None = None
    try:
        check_grammar(asked["grammar"], special_tokens=tuple(asked["special_tokens"]))
    except GrammarError as refusal:
        error = str(refusal)
    except MemoryError:
        error = "too large"
    return json.dumps({"error": error}).encode() + b"\n"


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Says that it is there, and answers until the requests end."""
    answers.write(b"{}\n")
    answers.flush()
    for line in requests:
        answers.write(answer(line))
        answers.flush()


def main() -> None:
    # Signals for the whole process group are the parent's to act on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = MAX_ADDRESS_BYTES if hard == resource.RLIM_INFINITY else min(hard, MAX_ADDRESS_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    with contextlib.suppress(BrokenPipeError):  # the parent is gone
        serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
