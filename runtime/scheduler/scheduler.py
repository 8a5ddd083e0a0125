"""Schedules requests into steps: continuous batching, chunked prefill, preemption by recompute. Pure Python: no
tensors, no I/O.

A request is *waiting* (and then holds nothing) or *running* (and holds blocks, and the images whose rows its next
tokens read). One that waits may be kept from its turn until it is told to go on: it is *held*. Running ones come first,
in the order of their admission, then waiting ones in the order of arrival. A step is `schedule()`, the executor's work,
`update()`: nothing is believed computed before `update`.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable

from runtime.config import ResolvedConfig
from runtime.request import FinishReason, Request, RequestOutput
from runtime.scheduler.admission import RequestRejected, SchedulerLimits, check_request, clip_max_tokens
from runtime.scheduler.block_hash import extend_hashes
from runtime.scheduler.block_manager import BlockManager
from runtime.scheduler.counters import SchedulerCounters
from runtime.scheduler.encoder_cache import EncoderCache
from runtime.scheduler.encoder_step import EncoderStep
from runtime.scheduler.output import SampledToken, ScheduledRequest, SchedulerOutput, StepResult
from runtime.scheduler.state import RequestState
from runtime.stats import EngineStats


class Scheduler:
    """Decides what each step computes, and when a request ends.

    A token of `eos_token_ids` (unless the request ignores them and has no grammar) or of its own `stop_token_ids` ends
    a request with "stop" and is *not* among its `new_token_ids`; it counts as a generated token in the counters.
    `max_tokens`, and `max_model_len` where that comes earlier, end it with "length". Where one token does both, "stop"
    is said.

    Args:
        limits: of a request and of a step.
        eos_token_ids: tokens that end every request.
        num_blocks: of the KV cache, the null block among them.
        block_size: tokens in a block.
        encoder_cache_tokens: rows of the executor's embedding store.
        enable_prefix_caching: share blocks of equal content.
        allocates_ahead: give a decoding request the block for the token after its next one, where there is plenty: its
            executor may launch the step after this one before it is scheduled.
        max_shared_encoder_tokens: output tokens of the images that a step encodes, if they are several; `None`: as many
            as of one. Where several take as long together as one by one, the first requests need not wait for the last.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        *,
        eos_token_ids: Iterable[int],
        num_blocks: int,
        block_size: int,
        encoder_cache_tokens: int,
        enable_prefix_caching: bool = True,
        allocates_ahead: bool = False,
        max_shared_encoder_tokens: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._limits = limits
        self._eos_token_ids = frozenset(eos_token_ids)
        self._clock = clock
        self._allocates_ahead = allocates_ahead
        self._max_shared_encoder_tokens = max_shared_encoder_tokens
        self._blocks = BlockManager(num_blocks, block_size, enable_prefix_caching=enable_prefix_caching)
        self._encoder_cache = EncoderCache(encoder_cache_tokens)
        self._states: dict[str, RequestState] = {}
        self._waiting: deque[RequestState] = deque()
        self._held: dict[str, RequestState] = {}
        self._running: list[RequestState] = []

        # Told with the next step.
        self._finished_request_ids: list[str] = []
        self._outputs: list[RequestOutput] = []

        self._counters = SchedulerCounters()

    @classmethod
    def from_config(
        cls,
        config: ResolvedConfig,
        *,
        eos_token_ids: Iterable[int],
        num_blocks: int,
        allocates_ahead: bool = False,
        max_shared_encoder_tokens: int | None = None,
    ) -> "Scheduler":
        """A scheduler for a resolved configuration and the KV cache that the memory plan gave."""
        return cls(
            SchedulerLimits.of(config),
            eos_token_ids=eos_token_ids,
            num_blocks=num_blocks,
            block_size=config.engine.block_size,
            encoder_cache_tokens=config.encoder_cache_tokens,
            max_shared_encoder_tokens=max_shared_encoder_tokens,
            enable_prefix_caching=config.engine.enable_prefix_caching,
            allocates_ahead=allocates_ahead,
        )

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._states)

    @property
    def has_ready(self) -> bool:
        """Whether a request runs, or waits for nothing but its turn."""
        return bool(self._waiting or self._running)

    @property
    def has_held(self) -> bool:
        """Whether a request is held."""
        return bool(self._held)

    def has(self, request_id: str) -> bool:
        """Whether a request waits or runs under this id."""
        return request_id in self._states

    def add(self, request: Request) -> None:
        """Lets a request wait for its turn.

        Raises:
            RequestRejected: it can never fit, is malformed, or its id is in use.
        """
        if request.request_id in self._states:
            raise RequestRejected(f"request_id {request.request_id!r} is in use")
        check_request(
            request,
            self._limits,
            num_blocks=self._blocks.num_usable,
            block_size=self._blocks.block_size,
            encoder_cache_tokens=self._encoder_cache.capacity_tokens,
        )
        stop_token_ids = frozenset(request.sampling.stop_token_ids)
        if not request.sampling.ignore_eos or request.sampling.grammar is not None:
            stop_token_ids |= self._eos_token_ids
        state = RequestState(
            request, max_output_tokens=clip_max_tokens(request, self._limits), stop_token_ids=stop_token_ids
        )
        self._states[request.request_id] = state
        self._waiting.append(state)
        if request.request_id in self._finished_request_ids:
            # An id used again before the executor heard of its end: it must not hear of it now.
            self._finished_request_ids.remove(request.request_id)

    def missing_images(self, request_id: str) -> list[int]:
        """Which images of a waiting request would have to be encoded, were it admitted now."""
        state = self._states[request_id]
        self._extend_hashes(state)
        num_cached = len(self._blocks.find_prefix(state.block_hashes, len(state.token_ids) - 1))
        return [
            index
            for index, image in enumerate(state.images)
            if image.placeholder.end > num_cached * self._blocks.block_size
            and not self._encoder_cache.has(image.image_hash)
        ]

    def hold(self, request_id: str) -> None:
        """Keeps a waiting request from its turn until `resume`."""
        state = self._states[request_id]
        self._waiting.remove(state)
        self._held[request_id] = state

    def resume(self, request_id: str) -> None:
        """Lets a held request wait for its turn, behind all that do so already."""
        self._waiting.append(self._held.pop(request_id))

    def abort(self, request_id: str) -> None:
        """Ends a request at once and frees what it holds. No output tells of it. An unknown id is no error: the
        request may have ended meanwhile."""
        state = self._states.get(request_id)
        if state is None:
            return
        if state in self._running:
            self._running.remove(state)
        elif request_id in self._held:
            del self._held[request_id]
        else:
            self._waiting.remove(state)
        self._finish(state, "abort")

    def schedule(self) -> SchedulerOutput:
        """Decides the next step. An empty output means that nothing could be done; `update` it all the same."""
        encoder = EncoderStep(
            self._encoder_cache,
            max_tokens=self._limits.max_encoder_tokens_per_step,
            max_shared_tokens=self._max_shared_encoder_tokens,
        )
        scheduled: list[ScheduledRequest] = []
        num_preemptions = self._counters.num_preemptions
        budget = self._schedule_running(scheduled, encoder)
        if self._counters.num_preemptions == num_preemptions:
            budget = self._schedule_waiting(scheduled, encoder, budget)
            if not scheduled and self.has_ready:
                self._fail_head()
        if not scheduled:
            return SchedulerOutput(requests=())
        self._counters.encoder_cache_queries += encoder.num_queries
        self._counters.encoder_cache_hits += encoder.num_hits
        finished_request_ids = tuple(self._finished_request_ids)
        self._finished_request_ids.clear()
        return SchedulerOutput(
            requests=tuple(scheduled),
            images=tuple(encoder.images),
            evicted_images=self._encoder_cache.take_evicted(),
            finished_request_ids=finished_request_ids,
            num_scheduled_tokens=self._limits.max_num_batched_tokens - budget,
        )

    def update(self, output: SchedulerOutput, result: StepResult) -> list[RequestOutput]:
        """Takes in what a step did, and says what it added to each request. Requests aborted meanwhile are ignored."""
        outputs, self._outputs = self._outputs, []
        now = self._clock()
        has_finished = False
        for part in output.requests:
            state = self._states.get(part.request_id)
            if state is None:
                continue
            refusal = result.refused.get(part.request_id)
            error = result.failed.get(part.request_id, refusal)
            if error is None:
                self._advance(state, part.num_computed_tokens + part.num_scheduled_tokens)
                if not part.is_sampling:
                    continue
                sampled = result.tokens.get(part.request_id)
                if sampled is not None:
                    outputs.append(self._take_token(state, sampled, now))
                    has_finished = has_finished or state.finish_reason is not None
                    continue
                error = "the executor sampled no token"
            outputs.append(self._fail(state, error, is_rejected=refusal is not None))
            has_finished = True
        if result.failed:
            for image in output.images:
                if image.request_id in result.failed:
                    self._encoder_cache.distrust(image.image_hash)
        if has_finished:
            self._running = [state for state in self._running if state.finish_reason is None]
        return outputs

    def fail_step(self, output: SchedulerOutput, error: str) -> list[RequestOutput]:
        """Ends all requests of a step of which nothing is known: the executor raised. The others go on."""
        return self.update_again(
            output, StepResult(tokens={}, failed={part.request_id: error for part in output.requests})
        )

    def update_again(self, output: SchedulerOutput, result: StepResult) -> list[RequestOutput]:
        """As `update`, after the executor raised at first: it may not have heard what to drop and who ended, and so
        is told again with the next step."""
        outputs = self.update(output, result)
        self._encoder_cache.evict_again(output.evicted_images)
        self._finished_request_ids.extend(
            request_id for request_id in output.finished_request_ids if request_id not in self._states
        )
        return outputs

    def write_stats(self, stats: EngineStats) -> None:
        """Sets the scheduler's own fields of a snapshot."""
        stats.num_waiting = len(self._waiting) + len(self._held)
        stats.num_running = len(self._running)
        stats.num_blocks = self._blocks.num_usable
        stats.num_blocks_used = self._blocks.num_used
        stats.encoder_cache_tokens_used = self._encoder_cache.tokens_used
        self._counters.write(stats)

    def check_integrity(self) -> None:
        """Asserts everything that must hold between steps. For tests: it costs time in proportion to all blocks."""
        running, waiting = self._running, (*self._waiting, *self._held.values())
        assert len(running) <= self._limits.max_num_seqs
        assert Counter(state.request_id for state in (*running, *waiting)) == Counter(self._states.keys())
        references: Counter[bytes] = Counter()
        for state in self._states.values():
            assert state.finish_reason is None
            assert state.num_computed_tokens < len(state.token_ids)
            assert state.num_computed_tokens <= len(state.block_ids) * self._blocks.block_size
            held = state.images[state.images_begin : state.images_end]
            references.update(image.image_hash for image in held)
            assert all(image.placeholder.end > state.num_computed_tokens for image in held)
            if state in waiting:
                assert not state.block_ids, "a waiting request holds blocks"
                assert not held, "a waiting request holds images"
        self._blocks.check_integrity(state.block_ids for state in running)
        self._encoder_cache.check_integrity(dict(references))

    def _schedule_running(self, scheduled: list[ScheduledRequest], encoder: EncoderStep) -> int:
        """Gives each running request its tokens, preempting the newest ones where blocks run out. Returns the tokens
        that are left of the step's budget."""
        blocks = self._blocks
        running = self._running
        budget = self._limits.max_num_batched_tokens
        index = 0
        while index < len(running):
            state = running[index]
            index += 1
            start = state.num_computed_tokens
            # One token stays for each request behind this one: a long prefill must not stop their decoding.
            end = min(len(state.token_ids), start + budget - (len(running) - index))
            if state.images_end < len(state.images):
                end = encoder.limit(state, start, end)
            if end <= start:
                continue
            needed = blocks.num_for(end) - len(state.block_ids)
            if needed > 0:
                while needed > blocks.num_available:
                    victim = running.pop()
                    self._preempt(victim)
                    if victim is state:
                        return budget
                state.block_ids += blocks.allocate(needed)
            if self._allocates_ahead and end == len(state.token_ids) and blocks.num_for(end + 1) > len(state.block_ids):
                self._allocate_ahead(state)
            self._put(scheduled, encoder, state, end)
            budget -= end - start
        return budget

    def _allocate_ahead(self, state: RequestState) -> None:
        """One block more than the step needs, if the request goes on and nobody will miss the block."""
        goes_on = state.num_output_tokens + 1 < state.max_output_tokens
        if goes_on and self._blocks.num_available > len(self._running):
            state.block_ids += self._blocks.allocate(1)

    def _schedule_waiting(self, scheduled: list[ScheduledRequest], encoder: EncoderStep, budget: int) -> int:
        """Admits waiting requests while they fit, first come first served. Returns the tokens left of the budget."""
        blocks = self._blocks
        while self._waiting and budget > 0 and len(self._running) < self._limits.max_num_seqs:
            state = self._waiting[0]
            num_known = len(state.token_ids)
            self._extend_hashes(state)
            # The last known token is always computed: its logits give the next one.
            prefix = blocks.find_prefix(state.block_hashes, num_known - 1)
            start = len(prefix) * blocks.block_size
            state.skip_images_before(start)
            end = encoder.limit(state, start, min(num_known, start + budget))
            # There must be blocks for all that is known, not only for this chunk: a request admitted with less would
            # soon be preempted, and would compute its first chunk again and again.
            if end <= start or not blocks.can_take(prefix, blocks.num_for(num_known) - len(prefix)):
                break
            self._waiting.popleft()
            self._running.append(state)
            blocks.share(prefix)
            state.block_ids = prefix + blocks.allocate(blocks.num_for(end) - len(prefix))
            state.num_named_blocks = len(prefix)
            state.num_computed_tokens = start
            if state.scheduled_time is None:
                state.scheduled_time = self._clock()
                state.num_cached_tokens = start
                self._counters.num_prompt_tokens += state.num_prompt_tokens
                if blocks.enable_prefix_caching:
                    self._counters.prefix_cache_query_tokens += state.num_prompt_tokens
                    self._counters.prefix_cache_hit_tokens += start
            self._put(scheduled, encoder, state, end)
            budget -= end - start
        return budget

    def _put(self, scheduled: list[ScheduledRequest], encoder: EncoderStep, state: RequestState, end: int) -> None:
        """Makes the request part of the step, up to token `end`. It has the blocks for it."""
        if state.images_end < len(state.images):
            encoder.commit(state, end)
        scheduled.append(
            ScheduledRequest(
                request_id=state.request_id,
                num_computed_tokens=state.num_computed_tokens,
                num_scheduled_tokens=end - state.num_computed_tokens,
                block_ids=state.block_ids,
                is_sampling=end == len(state.token_ids),
            )
        )

    def _preempt(self, state: RequestState) -> None:
        """Takes everything from a request that left `running` and puts it at the head of the queue. Its output stays:
        it is computed again as if it were prompt."""
        self._release(state)
        state.num_computed_tokens = 0
        self._waiting.appendleft(state)
        self._counters.num_preemptions += 1

    def _fail_head(self) -> None:
        """Ends the request that stands in the way: there is work, nothing was preempted, and yet nothing could be
        scheduled, so the next step would be the same one. Admission should have refused it; never spin on it."""
        state = self._running.pop(0) if self._running else self._waiting.popleft()
        error = (
            f"the request can make no progress: {len(state.token_ids)} tokens, "
            f"{self._blocks.num_available} of {self._blocks.num_usable} KV blocks available, "
            f"{self._encoder_cache.room} of {self._encoder_cache.capacity_tokens} encoder_cache_tokens available"
        )
        self._outputs.append(self._fail(state, error))

    def _advance(self, state: RequestState, num_computed_tokens: int) -> None:
        """Believes tokens computed: names the blocks that they fill, and lets go of images that are wholly read."""
        state.num_computed_tokens = num_computed_tokens
        while state.images_begin < state.images_end:
            image = state.images[state.images_begin]
            if image.placeholder.end > num_computed_tokens:
                break
            self._encoder_cache.release(image.image_hash)
            state.images_begin += 1
        num_full = num_computed_tokens // self._blocks.block_size
        if num_full > state.num_named_blocks and self._blocks.enable_prefix_caching:
            self._extend_hashes(state)
            for number in range(state.num_named_blocks, num_full):
                self._blocks.name(state.block_ids[number], state.block_hashes[number])
            state.num_named_blocks = num_full

    def _extend_hashes(self, state: RequestState) -> None:
        if self._blocks.enable_prefix_caching:
            extend_hashes(
                state.block_hashes,
                state.token_ids,
                state.images,
                block_size=self._blocks.block_size,
                cache_salt=state.cache_salt,
            )

    def _take_token(self, state: RequestState, sampled: SampledToken, now: float) -> RequestOutput:
        """Appends a sampled token, and ends the request where that is due."""
        state.token_ids.append(sampled.token_id)
        self._counters.num_generation_tokens += 1
        if state.first_token_time is None:
            state.first_token_time = now
        token_ids = [sampled.token_id]
        logprobs = None if sampled.logprobs is None else [sampled.logprobs]
        if sampled.token_id in state.stop_token_ids:
            token_ids = []
            logprobs = None if logprobs is None else []
            self._finish(state, "stop")
        elif state.num_output_tokens >= state.max_output_tokens:
            self._finish(state, "length")
        return state.output(new_token_ids=token_ids, logprobs=logprobs)

    def _fail(self, state: RequestState, error: str, *, is_rejected: bool = False) -> RequestOutput:
        self._finish(state, "error")
        return state.output(error=error, is_rejected=is_rejected)

    def _finish(self, state: RequestState, reason: FinishReason) -> None:
        """Ends a request: frees what it holds and forgets it. The caller takes it out of its queue."""
        state.finish_reason = reason
        self._release(state)
        del self._states[state.request_id]
        self._finished_request_ids.append(state.request_id)

    def _release(self, state: RequestState) -> None:
        self._blocks.release(state.block_ids)
        state.block_ids = ()
        for image in state.images[state.images_begin : state.images_end]:
            self._encoder_cache.release(image.image_hash)
        state.images_begin = state.images_end
