"""From the wire's sampling fields to `SamplingParams`, over the checkpoint's own defaults. No I/O but one JSON file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.checkpoint import CheckpointError, read_json
from runtime.request import SamplingParams
from server.errors import InvalidRequestError
from server.schemas import SamplingFields


@dataclass(frozen=True, kw_only=True)
class SamplingDefaults:
    """What applies when a request is silent: the checkpoint's `generation_config.json`, else OpenAI's defaults."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def from_checkpoint(cls, directory: Path) -> "SamplingDefaults":
        """Reads `generation_config.json` where there is one. `do_sample: false` means greedy.

        Raises:
            CheckpointError: the file holds no JSON object, or a value that is no number of its range.
        """
        path = directory / "generation_config.json"
        raw: dict[str, Any] = read_json(path) if path.exists() else {}
        values = {name: _number(path, name, raw[name]) for name in _FIELDS if raw.get(name) is not None}
        if raw.get("do_sample") is False:
            return cls(temperature=0.0, repetition_penalty=values.get("repetition_penalty", 1.0))
        return cls(**values)


# Type, least and largest value: what a request may say too.
_FIELDS: dict[str, tuple[type, float, float]] = {
    "temperature": (float, 0, 2),
    "top_p": (float, 0, 1),
    "top_k": (int, -1, 2**31 - 1),
    "min_p": (float, 0, 1),
    "repetition_penalty": (float, 1e-5, 100),
}


def _number(path: Path, name: str, value: Any) -> Any:
    kind, least, largest = _FIELDS[name]
    # A NaN is within no range.
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= largest:
        raise CheckpointError(f"{path}: {name} is {value!r}; it must be a number from {least:g} to {largest:g}")
    return kind(max(0, value)) if name == "top_k" else kind(value)


def sampling_params(
    request: SamplingFields,
    defaults: SamplingDefaults,
    *,
    index: int,
    max_tokens: int,
    vocab_size: int,
    grammar: str | None = None,
) -> SamplingParams:
    """The parameters of choice `index`. Choices of one seeded request have seeds of their own.

    Raises:
        InvalidRequestError: a token id is outside of the vocabulary.
    """
    logit_bias = {int(token): bias for token, bias in (request.logit_bias or {}).items()}
    for name, tokens in (("logit_bias", logit_bias), ("stop_token_ids", request.stop_token_ids or [])):
        if any(token >= vocab_size for token in tokens):
            raise InvalidRequestError(f"'{name}' names a token outside of the vocabulary of {vocab_size}.", param=name)
    seed = request.seed
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_first(request.temperature, defaults.temperature),
        top_p=_first(request.top_p, defaults.top_p),
        top_k=max(0, request.top_k) if request.top_k is not None else defaults.top_k,
        min_p=_first(request.min_p, defaults.min_p),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_first(request.repetition_penalty, defaults.repetition_penalty),
        logit_bias=logit_bias,
        seed=None if seed is None else (seed + index + 2**63) % 2**64 - 2**63,
        num_logprobs=request.num_logprobs,
        ignore_eos=bool(request.ignore_eos),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        grammar=grammar,
    )


def _first(value: float | None, default: float) -> float:
    return default if value is None else value
