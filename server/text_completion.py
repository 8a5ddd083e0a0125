"""The older completions API on the wire: a prompt of text or tokens, and its answer. No pictures, no chat template.

Knows OpenAI's JSON of /v1/completions; the chunks are those of every completion.
"""

from typing import Annotated, Any

import msgspec
from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from server.completion import Chunk, LogprobEntry, Usage
from server.schemas import SamplingFields
from server.sse import DONE, error_event
from server.wire import rejected

# OpenAI's own for this API.
DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 64
# Choices of one request over all its prompts.
MAX_PROMPT_CHOICES = 64
MAX_PROMPT_TOKENS = 1 << 20
MAX_TEXT_LOGPROBS = 5

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_PROMPT_TOKENS)]


def _prompt_tag(value: Any) -> str:
    if isinstance(value, str):
        return "<string>"
    first = value[0] if isinstance(value, list) and value else None
    return "<tokens>" if isinstance(first, int) else "<token lists>" if isinstance(first, list) else "<strings>"


def _known_prompt(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise rejected(
            "'prompt' must be a string, an array of strings, an array of tokens, or an array of such arrays."
        )
    return value


Prompt = Annotated[
    Annotated[str, Tag("<string>")]
    | Annotated[TokenIds, Tag("<tokens>")]
    | Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS), Tag("<token lists>")]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS), Tag("<strings>")],
    Discriminator(_prompt_tag),
    BeforeValidator(_known_prompt),
]


class TextCompletionRequest(SamplingFields):
    """The body of POST /v1/completions."""

    prompt: Prompt
    logprobs: int | None = Field(None, ge=0, le=MAX_TEXT_LOGPROBS)

    # Known, and honoured only where that is doing nothing.
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _check_text(self) -> "TextCompletionRequest":
        if self.echo:
            raise rejected("'echo' is not supported.", at="echo")
        if self.suffix:
            raise rejected("'suffix' is not supported.", at="suffix")
        if self.best_of is not None and self.best_of != self.choices_per_prompt:
            raise rejected("'best_of' is not supported: it can only equal 'n'.", at="best_of")
        if self.num_choices > MAX_PROMPT_CHOICES:
            raise rejected(f"The prompts times 'n' may be {MAX_PROMPT_CHOICES} choices at most.", at="prompt")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.choices_per_prompt

    @property
    def default_max_tokens(self) -> int | None:
        return DEFAULT_MAX_TOKENS

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class TextLogprobs:
    """Log-probabilities of one choice in this API's columns; `offset` is where in the text the next token begins."""

    def __init__(self) -> None:
        self._offset = 0

    def wire(self, entries: list[LogprobEntry] | None) -> dict[str, Any] | None:
        """The columns of the next tokens."""
        if entries is None:
            return None
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(entry.token)
        return {
            "tokens": [entry.token for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [{top.token: top.logprob for top in entry.top_logprobs} for entry in entries],
            "text_offset": offsets,
        }


def _choice(index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


class TextFold:
    """Folds chunks into a `text_completion` object."""

    def __init__(self, head: dict[str, Any], num_choices: int, usage: Usage) -> None:
        self._head = head
        self._usage = usage
        self._texts: list[list[str]] = [[] for _ in range(num_choices)]
        self._logprobs: list[list[LogprobEntry] | None] = [None] * num_choices
        self._finish_reasons: list[str | None] = [None] * num_choices

    def add(self, chunk: Chunk) -> None:
        self._texts[chunk.index].append(chunk.text)
        if chunk.logprobs is not None:
            self._logprobs[chunk.index] = (self._logprobs[chunk.index] or []) + chunk.logprobs
        self._finish_reasons[chunk.index] = chunk.finish_reason or self._finish_reasons[chunk.index]

    def body(self) -> bytes:
        assert all(self._finish_reasons), "a choice has not ended"
        choices = [
            _choice(index, "".join(texts), TextLogprobs().wire(logprobs), reason)
            for index, (texts, logprobs, reason) in enumerate(
                zip(self._texts, self._logprobs, self._finish_reasons, strict=True)
            )
        ]
        return msgspec.json.encode({**self._head, "choices": choices, "usage": self._usage.wire()})


class TextPrinter:
    """Events of one text completion. With `has_usage` the last one has no choices, and every other a null usage."""

    def __init__(
        self, head: dict[str, Any], num_choices: int, usage: Usage, *, has_usage: bool, continuous_usage: bool
    ) -> None:
        self._head = head
        self._usage = usage
        self._has_usage = has_usage
        self._continuous_usage = has_usage and continuous_usage
        self._logprobs = [TextLogprobs() for _ in range(num_choices)]

    def start(self) -> bytes:
        """Nothing: a choice of this API has no role."""
        return b""

    def chunk(self, chunk: Chunk) -> bytes:
        if not (chunk.text or chunk.logprobs or chunk.finish_reason):
            return b""
        logprobs = self._logprobs[chunk.index].wire(chunk.logprobs)
        usage = self._usage.wire() if self._continuous_usage else None
        return self._event([_choice(chunk.index, chunk.text, logprobs, chunk.finish_reason)], usage)

    def end(self) -> bytes:
        return (self._event([], self._usage.wire()) if self._has_usage else b"") + DONE

    def error(self, body: bytes) -> bytes:
        return error_event(body)

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> bytes:
        value = {**self._head, "choices": choices}
        if self._has_usage:
            value["usage"] = usage
        return b"data: " + msgspec.json.encode(value) + b"\n\n"
