"""One request as the scheduler sees it: what is known, what is computed, what it holds. Data, no decisions."""

from runtime.request import FinishReason, Request, RequestOutput, TokenLogprobs


class RequestState:
    """The mutable row of one request."""

    __slots__ = (
        "block_hashes",
        "block_ids",
        "cache_salt",
        "finish_reason",
        "first_token_time",
        "images",
        "images_begin",
        "images_end",
        "max_output_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_named_blocks",
        "num_prompt_tokens",
        "request_id",
        "sampling",
        "scheduled_time",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(self, request: Request, *, max_output_tokens: int, stop_token_ids: frozenset[int]) -> None:
        # Set once, by the request.
        self.request_id = request.request_id
        self.images = request.images
        self.sampling = request.sampling
        self.cache_salt = request.cache_salt
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.max_output_tokens = max_output_tokens
        self.stop_token_ids = stop_token_ids

        # Grow with the output: all known tokens, prompt first, and the hashes of their full blocks.
        self.token_ids = list(request.prompt_token_ids)
        self.block_hashes: list[bytes] = []

        # Set while running, and back to nothing by a preemption. The tuple of block ids is replaced when it grows, so
        # that a step which adds no block passes it on as it is. Images [images_begin, images_end) are referenced.
        self.num_computed_tokens = 0
        self.block_ids: tuple[int, ...] = ()
        self.num_named_blocks = 0
        self.images_begin = 0
        self.images_end = 0

        # Set once, by the first admission, the first token, the end.
        self.num_cached_tokens = 0
        self.scheduled_time: float | None = None
        self.first_token_time: float | None = None
        self.finish_reason: FinishReason | None = None

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def output(
        self,
        *,
        new_token_ids: list[int] | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        error: str | None = None,
        is_rejected: bool = False,
    ) -> RequestOutput:
        """What a step added to the request, with what is known of it by now."""
        return RequestOutput(
            request_id=self.request_id,
            new_token_ids=[] if new_token_ids is None else new_token_ids,
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            error=error,
            is_rejected=is_rejected,
            num_cached_tokens=self.num_cached_tokens,
            scheduled_time=self.scheduled_time,
            first_token_time=self.first_token_time,
        )

    def skip_images_before(self, num_tokens: int) -> None:
        """Sets the window of referenced images, empty, to the first image that is not wholly within `num_tokens`."""
        assert self.images_begin == self.images_end, "images are referenced"
        begin = 0
        while begin < len(self.images) and self.images[begin].placeholder.end <= num_tokens:
            begin += 1
        self.images_begin = self.images_end = begin
