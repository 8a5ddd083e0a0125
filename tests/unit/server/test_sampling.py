import json
from pathlib import Path
from typing import Any

import pytest

from runtime.checkpoint import CheckpointError
from runtime.request import SamplingParams
from server.errors import InvalidRequestError
from server.sampling import SamplingDefaults, sampling_params
from server.schemas import ChatCompletionRequest


def params(defaults: SamplingDefaults | None = None, *, index: int = 0, **fields: Any) -> SamplingParams:
    document = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    request = ChatCompletionRequest.model_validate(document)
    return sampling_params(request, defaults or SamplingDefaults(), index=index, max_tokens=5, vocab_size=100)


def defaults_from(directory: Path, content: dict[str, Any]) -> SamplingDefaults:
    (directory / "generation_config.json").write_text(json.dumps(content))
    return SamplingDefaults.from_checkpoint(directory)


def test_silent_request_gets_openais_defaults() -> None:
    assert params() == SamplingParams(max_tokens=5, temperature=1.0)


def test_checkpoints_defaults_apply_where_the_request_is_silent(tmp_path: Path) -> None:
    defaults = defaults_from(tmp_path, {"temperature": 0.2, "top_k": 3, "repetition_penalty": 1.05, "eos_token_id": 1})
    found = params(defaults, temperature=0.9)
    assert (found.temperature, found.top_k, found.repetition_penalty, found.top_p) == (0.9, 3, 1.05, 1.0)


def test_checkpoint_that_does_not_sample_is_greedy(tmp_path: Path) -> None:
    assert defaults_from(tmp_path, {"do_sample": False, "top_p": 0.5}) == SamplingDefaults(temperature=0.0)


def test_checkpoint_may_have_no_defaults(tmp_path: Path) -> None:
    assert SamplingDefaults.from_checkpoint(tmp_path) == SamplingDefaults()


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", "hot"), ("temperature", -1), ("top_p", float("nan")), ("top_k", [1]), ("repetition_penalty", 0)],
)
def test_wrong_defaults_of_a_checkpoint_name_the_file_and_the_field(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=f"generation_config.json: {name} is "):
        defaults_from(tmp_path, {name: value})


def test_zero_is_a_value() -> None:
    found = params(SamplingDefaults(temperature=0.7, top_p=0.7, top_k=7), temperature=0, top_p=0, top_k=0)
    assert (found.temperature, found.top_p, found.top_k) == (0, 0, 0)
    assert params(SamplingDefaults(top_k=7), top_k=-1).top_k == 0


def test_choices_have_seeds_of_their_own() -> None:
    assert [params(index=i, seed=7).seed for i in range(3)] == [7, 8, 9]
    assert params(index=1, seed=2**63 - 1).seed == -(2**63)
    assert params(index=1).seed is None


def test_logprobs() -> None:
    assert params().num_logprobs is None
    assert params(logprobs=False).num_logprobs is None
    assert params(logprobs=True).num_logprobs == 0
    assert params(logprobs=True, top_logprobs=4).num_logprobs == 4


def test_tokens_must_be_in_the_vocabulary() -> None:
    assert params(logit_bias={"99": 1}).logit_bias == {99: 1}
    with pytest.raises(InvalidRequestError, match="vocabulary of 100"):
        params(logit_bias={"100": 1})
    with pytest.raises(InvalidRequestError):
        params(stop_token_ids=[100])
