"""One completion as data: chunks, their fold into an answer, usage. Knows OpenAI's JSON, not how it travels."""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from runtime.processing.tokenizer import Tokenizer
from runtime.request import TokenLogprobs
from server.tool_calls import CallDelta, CallFold

# What OpenAI gives for very unlikely tokens; JSON has no infinity.
LEAST_LOGPROB = -9999.0


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class LogprobEntry(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class Chunk(msgspec.Struct, frozen=True):
    """What one output of the engine adds to choice `index`. The last one of a choice has a `finish_reason`."""

    index: int
    text: str
    logprobs: list[LogprobEntry] | None = None
    finish_reason: str | None = None
    calls: tuple[CallDelta, ...] = ()


@dataclass(kw_only=True)
class Usage:
    """Tokens of one completion; `completion_tokens` grows while it is generated."""

    prompt_tokens: int
    image_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    _cached: dict[int, int] = field(default_factory=dict)

    def count_cached(self, prompt: int, num_tokens: int) -> None:
        """Choices share the cached tokens of their prompt, the `prompt`th of the request."""
        self._cached[prompt] = max(num_tokens, self._cached.get(prompt, 0))
        self.cached_tokens = sum(self._cached.values())

    def wire(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": self.cached_tokens,
                "cache_write_tokens": 0,
                "audio_tokens": 0,
                "image_tokens": self.image_tokens,
                "text_tokens": self.prompt_tokens - self.image_tokens,
            },
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "audio_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
                "text_tokens": self.completion_tokens,
            },
        }


@dataclass(kw_only=True)
class _Choice:
    texts: list[str] = field(default_factory=list)
    calls: CallFold = field(default_factory=CallFold)
    logprobs: list[LogprobEntry] | None = None
    finish_reason: str | None = None

    def message(self) -> dict[str, Any]:
        text = "".join(self.texts)
        calls = self.calls.wire()
        return {"role": "assistant", "content": text if text or not calls else None, "refusal": None, **calls}


class Fold:
    """Folds chunks into the answer that is not streamed."""

    def __init__(self, num_choices: int) -> None:
        self._choices = [_Choice() for _ in range(num_choices)]

    def add(self, chunk: Chunk) -> None:
        choice = self._choices[chunk.index]
        choice.texts.append(chunk.text)
        for delta in chunk.calls:
            choice.calls.add(delta)
        if chunk.logprobs is not None:
            choice.logprobs = (choice.logprobs or []) + chunk.logprobs
        if chunk.finish_reason is not None:
            choice.finish_reason = chunk.finish_reason

    def body(self, *, completion_id: str, created: int, model: str, usage: Usage) -> bytes:
        """The JSON of a `chat.completion` object."""
        assert all(choice.finish_reason for choice in self._choices), "a choice has not ended"
        return msgspec.json.encode(
            {
                "id": completion_id,
                "object": "chat.completion",
                "created": created,
                "model": model,
                "choices": [
                    {
                        "index": index,
                        "message": choice.message(),
                        "logprobs": logprobs_wire(choice.logprobs),
                        "finish_reason": choice.finish_reason,
                    }
                    for index, choice in enumerate(self._choices)
                ],
                "usage": usage.wire(),
            }
        )


def logprobs_wire(entries: list[LogprobEntry] | None) -> dict[str, Any] | None:
    return None if entries is None else {"content": entries, "refusal": None}


def logprob_entries(
    token_ids: list[int], logprobs: list[TokenLogprobs], tokenizer: Tokenizer, num_top: int
) -> list[LogprobEntry]:
    """Entries for the tokens that show; special ones, as the end of the turn, are no part of the answer."""
    return [
        LogprobEntry(
            *_token(token_id, one.logprob, tokenizer),
            [TopLogprob(*_token(top_id, logprob, tokenizer)) for top_id, logprob in one.top[:num_top]],
        )
        for token_id, one in zip(token_ids, logprobs, strict=True)
        if token_id not in tokenizer.special_ids
    ]


def _token(token_id: int, logprob: float, tokenizer: Tokenizer) -> tuple[str, float, list[int]]:
    raw = tokenizer.token_bytes(token_id)
    # NaN compares false, and so becomes the least too.
    return raw.decode(errors="replace"), logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB, list(raw)
