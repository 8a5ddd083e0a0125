"""Turns a stream of tokens into a stream of text: whole characters only, and nothing that might be a stop string.

Knows no HTTP and no engine. The time is linear in the number of tokens: nothing is decoded twice.
"""

import codecs
from collections.abc import Iterable, Sequence

from runtime.processing.tokenizer import Tokenizer


class Detokenizer:
    """The text of one sequence as it grows.

    What all calls gave, joined, is the decoded text of all tokens, cut before the first stop string. The first is the
    one that is complete first; of two complete at the same character, the longer. So the text does not depend on how
    the tokens were grouped into calls. Special tokens are left out, unless they are to be shown.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, shown: Sequence[str] = ()) -> None:
        """
        Args:
            shown: added tokens that are text, special or not.

        Raises:
            ValueError: a stop string is empty.
        """
        if "" in stop:
            raise ValueError("a stop string is empty")
        self._tokenizer = tokenizer
        self._hidden_ids = tokenizer.special_ids - {tokenizer.added_ids[token] for token in shown}
        self._stop = tuple(stop)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""  # the longest end of the text so far that begins a stop string
        self._num_tokens = 0
        self._stopped: str | None = None

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._stopped

    @property
    def num_tokens(self) -> int:
        """Tokens taken so far: the one that completed the stop string counts, those after it do not."""
        return self._num_tokens

    def push(self, token_ids: Iterable[int]) -> str:
        """Takes new tokens and gives the text that has become safe to show. After a stop it takes and gives nothing."""
        shown = []
        for token_id in token_ids:
            if self._stopped is not None:
                break
            self._num_tokens += 1
            if token_id not in self._hidden_ids:
                shown.append(self._advance(self._utf8.decode(self._tokenizer.token_bytes(token_id))))
        return "".join(shown)

    def finish(self) -> str:
        """Gives the text held back, when no more tokens come. An incomplete character becomes U+FFFD."""
        if self._stopped is not None:
            return ""
        shown = self._advance(self._utf8.decode(b"", final=True))
        shown, self._held = shown + self._held, ""
        return shown

    def _advance(self, new_text: str) -> str:
        if not self._stop or not new_text:
            return new_text
        text = self._held + new_text
        matches = [(start + len(stop), start, stop) for stop in self._stop if (start := text.find(stop)) >= 0]
        if matches:
            _, start, self._stopped = min(matches)
            self._held = ""
            return text[:start]
        num_held = max(_overlap(text, stop) for stop in self._stop)
        cut = len(text) - num_held
        self._held = text[cut:]
        return text[:cut]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` with which `text` ends."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
