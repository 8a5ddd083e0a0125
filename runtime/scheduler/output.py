"""What the scheduler decided for one step. Frozen: the executor obeys and adds nothing. No tensors."""

from dataclasses import dataclass, field

from runtime.request import TokenLogprobs


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledRequest:
    """One request's part of a step: tokens `num_computed_tokens` .. `+ num_scheduled_tokens` of prompt + output.

    `block_ids` is the whole block table. `is_sampling`: the part reaches the last known token, so a token is sampled.
    """

    request_id: str
    num_computed_tokens: int
    num_scheduled_tokens: int
    block_ids: tuple[int, ...]
    is_sampling: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledImage:
    """One image that must be encoded in this step, before the decoder runs; its rows go to the embedding store."""

    request_id: str
    image_index: int
    image_hash: bytes
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerOutput:
    """One step. The executor drops `evicted_images` and `finished_request_ids`, encodes `images`, runs `requests`.

    `requests`: running ones in scheduling order. An image may be both in `evicted_images` and, encoded anew, in
    `images`: drop first. `finished_request_ids`: ended or aborted since the last step.
    """

    requests: tuple[ScheduledRequest, ...]
    images: tuple[ScheduledImage, ...] = ()
    evicted_images: tuple[bytes, ...] = ()
    finished_request_ids: tuple[str, ...] = ()
    num_scheduled_tokens: int = 0

    @property
    def is_empty(self) -> bool:
        return not self.requests


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledToken:
    """What the executor picked for one request."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """`tokens` by request_id for every scheduled request with `is_sampling`; `failed`: request_id to an error message,
    for requests that the executor could not run (the others went on); `refused`: the same, where the request itself was
    at fault."""

    tokens: dict[str, SampledToken]
    failed: dict[str, str]
    refused: dict[str, str] = field(default_factory=dict)
