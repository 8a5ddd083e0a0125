"""Grammars: compiled within limits, checked, and followed token by token. Knows llguidance; no tokenizer, no tensors,
no schedule, no HTTP.

A grammar is text in llguidance's dialect of Lark, as `json_grammar` and `tool_calls` write it. Everything here is
bounded: the size of the text, what compiling it may cost, and what one token of it may cost, so that no grammar of a
user's can hold up an engine (docs/decisions.md has what hostile ones did).
"""

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

# The grammar of a request, text and all. A schema of 2,000 properties is a hundred kilobytes and compiles in 80 ms.
MAX_GRAMMAR_BYTES = 256 * 1024

# Tokens of one byte that `check_grammar` generates.
_NUM_PROBE_STEPS = 64


class GrammarError(ValueError):
    """The grammar does not compile, asks for more than is allowed, or has come to where nothing fits; says which."""


def parser_limits() -> LLParserLimits:
    """What a grammar may cost. Fuel is llguidance's measure: some 50 units a microsecond while compiling, 14 while
    generating; a state of the lexer takes one or two kilobytes."""
    return LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=50_000,
        step_max_items=50_000,
        max_items_in_row=2_000,
        max_lexer_states=20_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


class Matcher:
    """Where one sequence stands in its grammar. Not for several threads at once."""

    def __init__(self, raw: LLMatcher) -> None:
        self._raw = raw

    @property
    def raw(self) -> LLMatcher:
        return self._raw

    @property
    def is_accepting(self) -> bool:
        """Whether the output may end here."""
        return self._raw.is_accepting()

    def accept(self, token_id: int) -> None:
        """Goes on by one token of the output.

        Raises:
            GrammarError: the token does not fit, or the grammar is at its limits.
        """
        if not self._raw.consume_token(token_id):
            raise GrammarError(self.error or f"token {token_id} does not fit the grammar")

    @property
    def error(self) -> str | None:
        """Why no more tokens can be taken, `None` while they can."""
        return _short(self._raw.get_error()) if self._raw.is_error() else None


def compile_grammar(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the beginning of `grammar`: milliseconds, up to a hundred for the largest, without the interpreter
    lock.

    Raises:
        GrammarError: it does not compile, or is too large.
    """
    num_bytes = len(grammar.encode(errors="replace"))
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"the grammar has {num_bytes} bytes; the limit is {MAX_GRAMMAR_BYTES}")
    compiled = LLMatcher(vocabulary, grammar, log_level=0, limits=parser_limits())
    if compiled.is_error():
        raise GrammarError(_short(compiled.get_error()))
    return compiled


def check_grammar(grammar: str, *, special_tokens: tuple[str, ...] = ()) -> None:
    """Says whether a grammar can be served, whatever the vocabulary: compiles it over bytes and walks some of the way,
    so that most of what comes to grief on the way is found out before the request is taken.

    Args:
        special_tokens: those that the grammar may name.

    Raises:
        GrammarError: it cannot; the message may hold parts of the grammar.
    """
    vocabulary = LLTokenizer(TokenizerWrapper(_Bytes(special_tokens)))
    matcher = compile_grammar(vocabulary, grammar)
    for step in range(_NUM_PROBE_STEPS):
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarError(_short(matcher.get_error()))
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little"))
        allowed = allowed[allowed != _Bytes.eos_token_id]
        if len(allowed) == 0:
            return
        # Some way through it, always the same.
        matcher.consume_token(int(allowed[step * 7919 % len(allowed)]))
    if matcher.is_error():
        raise GrammarError(_short(matcher.get_error()))


def _short(error: str) -> str:
    """The beginning; behind it come the grammar and the parser's state."""
    lines = [line.strip() for line in error.replace("<non-verbose/>", "").splitlines() if line.strip()]
    return " ".join(lines)[:300] or "nothing fits the grammar"


class _Bytes:
    """A vocabulary of the 256 bytes, an end token, and special tokens, as llguidance wants one."""

    bos_token_id = None
    eos_token_id = 256

    def __init__(self, special_tokens: tuple[str, ...]) -> None:
        special = [b"\xff" + token.encode() for token in ("<end>", *special_tokens)]
        self.tokens = [bytes([byte]) for byte in range(256)] + special
        self.special_token_ids = list(range(256, len(self.tokens)))

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)
