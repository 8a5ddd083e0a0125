"""Text to tokens and back, for byte-level BPE vocabularies. Knows added tokens (special or not), no chat, no pictures.

All methods are pure reads, so that one object may serve many threads; encoding lets go of the interpreter lock.
"""

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import AddedToken, decoders
from tokenizers import Tokenizer as RawTokenizer

from runtime.checkpoint import CheckpointError, read_json


class Tokenizer:
    """A checkpoint's tokenizer.

    Two encoders share one vocabulary: one knows the added tokens, the other does not and so cannot produce any of
    them, whatever the text is. `encode_special_tokens` of the tokenizers library would not do: it leaves added tokens
    that are not flagged special, such as `<tool_call>`, recognised.
    """

    def __init__(self, raw: RawTokenizer) -> None:
        """
        Raises:
            CheckpointError: the vocabulary is no byte-level BPE, an added token swallows the text around it, or plain
                text could produce an added token.
        """
        if not isinstance(raw.decoder, decoders.ByteLevel):
            raise CheckpointError(f"tokenizer.json: only byte-level BPE is served, its decoder is {raw.decoder!r}")
        raw.no_truncation()
        raw.no_padding()
        plain = RawTokenizer(raw.model)
        plain.normalizer = raw.normalizer
        plain.pre_tokenizer = raw.pre_tokenizer
        self._raw = raw
        self._plain = plain
        added: dict[int, AddedToken] = raw.get_added_tokens_decoder()
        self._added_ids = {token.content: token_id for token_id, token in added.items()}
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        longest_first = sorted(self._added_ids, key=len, reverse=True)
        self._added_pattern = re.compile("(" + ("|".join(map(re.escape, longest_first)) or "(?!)") + ")")
        for token in added.values():
            if token.lstrip or token.rstrip or token.single_word:
                raise CheckpointError(
                    f"tokenizer.json: the added token {token.content!r} looks at the text around it "
                    "(lstrip, rstrip or single_word), which is not served"
                )
            if not added.keys().isdisjoint(plain.encode(token.content, add_special_tokens=False).ids):
                raise CheckpointError(f"tokenizer.json: plain text can produce the added token {token.content!r}")

    @classmethod
    def from_checkpoint(cls, directory: Path) -> "Tokenizer":
        """Reads `tokenizer.json`, and the added tokens that only `tokenizer_config.json` knows.

        Raises:
            CheckpointError: a file is missing or broken, or the tokenizer is of a kind that is not served.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"tokenizer.json is missing from {directory}")
        try:
            raw = RawTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exceptions
            raise CheckpointError(f"{path} is no tokenizer: {error}") from error
        config = directory / "tokenizer_config.json"
        if config.is_file():
            _add_missing_tokens(raw, read_json(config).get("added_tokens_decoder") or {})
        return cls(raw)

    @cached_property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. A model's embedding may have more rows."""
        return self._raw.get_vocab_size()

    @cached_property
    def max_token_chars(self) -> int:
        """Most bytes, and so most characters, that one token stands for."""
        return max(map(len, self._raw.get_vocab()))

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that never show in decoded text, such as the end of a turn."""
        return self._special_ids

    @property
    def added_ids(self) -> dict[str, int]:
        """Text and id of each added token, special or not."""
        return dict(self._added_ids)

    def encode(self, text: str, *, allow_special: bool) -> list[int]:
        """Token ids of `text`; nothing is put before or after it.

        With `allow_special`, added tokens (special or not) in the text become their ids: for text of our own, never
        for a user's. Without it, they are letters and signs like any others.
        """
        encoder = self._raw if allow_special else self._plain
        ids: list[int] = encoder.encode(text, add_special_tokens=False).ids
        return ids

    def split_added(self, text: str) -> list[str | int]:
        """Cuts trusted text at its added tokens: ids for them, and the (non-empty) text between as it is."""
        return [self._added_ids.get(part, part) for part in self._added_pattern.split(text) if part]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the tokens, without special ones; bytes that are no UTF-8 become U+FFFD."""
        text: str = self._raw.decode(list(token_ids), skip_special_tokens=True)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes, perhaps only a part of a character, of one token. Special ones show their text; an id that the
        vocabulary lacks has none."""
        token: str | None = self._raw.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes([_BYTES[character] for character in token])
        except KeyError:  # an added token that is not written in the byte alphabet
            return token.encode()

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text, with U+FFFD for parts of characters: what a log-probability entry shows."""
        return self.token_bytes(token_id).decode(errors="replace")


def _add_missing_tokens(raw: RawTokenizer, listed: dict[str, dict[str, object]]) -> None:
    for token_id, fields in sorted((int(key), value) for key, value in listed.items()):
        content = str(fields["content"])
        if raw.token_to_id(content) is None:
            raw.add_tokens([AddedToken(content, normalized=False, special=bool(fields.get("special")))])
        if raw.token_to_id(content) != token_id:
            raise CheckpointError(
                f"tokenizer_config.json gives {content!r} the id {token_id}, tokenizer.json {raw.token_to_id(content)}"
            )


def _byte_alphabet() -> dict[str, int]:
    """The letters in which byte-level BPE writes bytes (GPT-2): printable ones stand for themselves, the others for
    the code points from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()
