"""Grammars over a checkpoint's tokens: compiled, cached, and turned into masks. Knows no tensors and no schedule."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from runtime.processing.grammar import Matcher, compile_grammar
from runtime.processing.tokenizer import Tokenizer

# Compiled grammars kept; one is some hundred kilobytes.
MAX_CACHED_GRAMMARS = 64

_BITS = 32


class GrammarCompiler:
    """Compiles grammars for one vocabulary, and keeps the last few. Its methods may be called by several threads: the
    engine compiles in one that is not its loop's.

    Args:
        tokenizer: of the checkpoint.
        vocab_size: width of the model's logits; ids that the tokenizer lacks are never allowed.
        eos_token_ids: tokens that end an output; they are allowed where the grammar may end, and nowhere else.
        num_threads: that fill the masks of a step with several sequences.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Sequence[int], num_threads: int = 1
    ) -> None:
        self.vocab_size = vocab_size
        self._vocabulary = LLTokenizer(
            TokenizerWrapper(_Vocabulary(tokenizer, vocab_size, eos_token_ids)),
            n_vocab=vocab_size,
            eos_token=list(eos_token_ids),
        )
        # One thread hands the work over and gains nothing: eight masks of 152,000 tokens took twice as long.
        self._executor = LLExecutor(num_threads) if num_threads > 1 else None
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    @classmethod
    def from_checkpoint(
        cls, directory: Path, *, vocab_size: int, eos_token_ids: Sequence[int], num_threads: int = 1
    ) -> "GrammarCompiler":
        """Reads a checkpoint's tokenizer.

        Raises:
            CheckpointError: it is missing or of a kind that is not served.
        """
        tokenizer = Tokenizer.from_checkpoint(directory)
        return cls(tokenizer, vocab_size=vocab_size, eos_token_ids=eos_token_ids, num_threads=num_threads)

    @property
    def num_words(self) -> int:
        """Words of 32 bits in the mask of one sequence."""
        return -(-self.vocab_size // _BITS)

    def is_compiled(self, grammar: str) -> bool:
        """Whether `matcher` would give one at once."""
        with self._lock:
            return grammar in self._compiled

    def matcher(self, grammar: str) -> Matcher:
        """A matcher at the beginning of `grammar`, which is compiled if it is new (see `compile_grammar`).

        Raises:
            GrammarError: it does not compile, or is too large.
        """
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is not None:
                self._compiled.move_to_end(grammar)
                return Matcher(compiled.deep_copy())
        compiled = compile_grammar(self._vocabulary, grammar)
        with self._lock:
            self._compiled[grammar] = compiled
            while len(self._compiled) > MAX_CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
            return Matcher(compiled.deep_copy())

    def fill_masks(self, matchers: Sequence[Matcher], masks: NDArray[np.int32]) -> None:
        """Writes which tokens may come next: bit `i % 32` of word `i // 32` of row `r` is that of token `i` for matcher
        `r`. A matcher with an error allows an end token only.

        Args:
            masks: int32 [len(matchers), num_words], contiguous.
        """
        assert masks.shape == (len(matchers), self.num_words), masks.shape
        assert masks.flags.c_contiguous
        if len(matchers) == 1 or self._executor is None:
            for row, matcher in enumerate(matchers):
                matcher.raw.unsafe_compute_mask_ptr(masks[row].ctypes.data, self.num_words * 4)
            return
        pairs = [(matcher.raw, row) for row, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(pairs, masks.ctypes.data, self.num_words * 4, len(matchers))


class _Vocabulary:
    """A tokenizer as llguidance wants it: bytes of all tokens, with a mark before the added ones, and an encoder."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        added = set(tokenizer.added_ids.values())
        self.special_token_ids = sorted(token_id for token_id in added if token_id < vocab_size)
        self.tokens = [
            (b"\xff" if token_id in added else b"") + tokenizer.token_bytes(token_id) for token_id in range(vocab_size)
        ]
        self.bos_token_id = None
        self.eos_token_id = eos_token_ids[0]
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            raise TypeError("bytes may end within a character; llguidance then gives the text alone")
        return self._tokenizer.encode(text, allow_special=False)
