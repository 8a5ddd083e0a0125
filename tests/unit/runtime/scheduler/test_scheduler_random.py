"""Random arrivals, aborts and failures under tight limits, on an executor that knows what each block and each embedding
holds: no request may ever read another content than its own, nothing may leak, and every request ends once."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runtime.request import ImageInput, Request
from runtime.scheduler.admission import RequestRejected
from runtime.scheduler.output import SampledToken, ScheduledRequest, SchedulerOutput, StepResult
from runtime.scheduler.scheduler import Scheduler
from tests.unit.runtime.scheduler.builders import BLOCK_SIZE, EOS, picture, request, scheduler, stats

SIZES = {"a": 1, "b": 3, "c": 5, "d": 9}


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], list[ImageInput]]:
    """Short prompts over few tokens and few pictures, so that prefixes and pictures repeat."""
    tokens: list[int] = []
    images: list[ImageInput] = []
    for piece in draw(st.lists(st.sampled_from([*SIZES, "text", "text"]), min_size=1, max_size=4)):
        if piece == "text":
            tokens += [20] * draw(st.sampled_from([1, 4, 7]))
        else:
            images.append(picture(piece, len(tokens), SIZES[piece]))
            tokens += [9] * SIZES[piece]
    return tokens, images


class ContentExecutor:
    """Writes down, for each slot of each block, everything that its keys and values would depend on."""

    def __init__(self, encoder_cache_tokens: int) -> None:
        self.capacity = encoder_cache_tokens
        self.rows: dict[bytes, int] = {}
        self.slots: dict[tuple[int, int], int] = {}
        self.known: dict[str, tuple[Request, list[int]]] = {}

    def run(self, output: SchedulerOutput, tokens: dict[str, int]) -> dict[str, SampledToken]:
        for image_hash in output.evicted_images:
            self.rows.pop(image_hash, None)
        for image in output.images:
            assert image.image_hash not in self.rows, "encoded twice"
            self.rows[image.image_hash] = image.num_tokens
        assert sum(self.rows.values()) <= self.capacity
        sampled: dict[str, SampledToken] = {}
        for part in output.requests:
            self._run_part(part)
            if part.is_sampling:
                sampled[part.request_id] = SampledToken(token_id=tokens[part.request_id])
        for request_id, token in sampled.items():
            self.known[request_id][1].append(token.token_id)
        return sampled

    def _run_part(self, part: ScheduledRequest) -> None:
        asked, token_ids = self.known[part.request_id]
        end = part.num_computed_tokens + part.num_scheduled_tokens
        assert part.is_sampling == (end == len(token_ids))
        content = hash(asked.cache_salt)
        for index, token in enumerate(token_ids[:end]):
            inside: Any = None
            for image in asked.images:
                if image.placeholder.offset <= index < image.placeholder.end:
                    inside = (image.image_hash, index - image.placeholder.offset)
                    if index >= part.num_computed_tokens:
                        assert image.image_hash in self.rows, "an embedding is missing"
            content = hash((content, token, inside))
            slot = (part.block_ids[index // BLOCK_SIZE], index % BLOCK_SIZE)
            if index < part.num_computed_tokens:
                assert self.slots[slot] == content, "the cache holds another content"
            else:
                self.slots[slot] = content


class SchedulerMachine(RuleBasedStateMachine):
    target: Scheduler
    executor: ContentExecutor

    def __init__(self) -> None:
        super().__init__()
        self.num_added = 0
        self.alive: set[str] = set()
        self.held: set[str] = set()
        self.ended: list[str] = []

    @initialize(
        max_num_seqs=st.integers(1, 4),
        more_tokens=st.integers(0, 12),
        num_blocks=st.integers(3, 16),
        encoder_cache_tokens=st.sampled_from([5, 9, 12, 30]),
        max_encoder_tokens_per_step=st.sampled_from([5, 9, 30]),
        max_shared_encoder_tokens=st.sampled_from([None, 1, 4, 8]),
        enable_prefix_caching=st.booleans(),
    )
    def start(self, max_num_seqs: int, more_tokens: int, encoder_cache_tokens: int, **limits: Any) -> None:
        self.target = scheduler(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + more_tokens,
            max_model_len=32,
            encoder_cache_tokens=encoder_cache_tokens,
            **limits,
        )
        self.executor = ContentExecutor(encoder_cache_tokens)

    @rule(prompt=prompts(), max_tokens=st.integers(1, 12), salt=st.sampled_from(["", "", "s"]), is_held=st.booleans())
    def add(self, prompt: tuple[list[int], list[ImageInput]], max_tokens: int, salt: str, is_held: bool) -> None:
        self.num_added += 1
        asked = request(f"r{self.num_added}", prompt[0], images=prompt[1], max_tokens=max_tokens, cache_salt=salt)
        try:
            self.target.add(asked)
        except RequestRejected:
            return
        self.alive.add(asked.request_id)
        if is_held:
            self.target.hold(asked.request_id)
            self.held.add(asked.request_id)
        self.executor.known[asked.request_id] = (asked, list(asked.prompt_token_ids))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.alive)))
        self.target.abort(request_id)
        self.alive.remove(request_id)
        self.held.discard(request_id)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.held)))
        self.target.resume(request_id)
        self.held.remove(request_id)

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        output = self.target.schedule()
        ids = [part.request_id for part in output.requests]
        tokens = {name: data.draw(st.sampled_from([20, 20, 20, 21, EOS])) for name in ids}
        failed = {name: "injected" for name in ids if data.draw(st.integers(0, 40)) == 40}
        self.finish_step(output, tokens, failed)

    @rule(is_late=st.booleans())
    def step_that_raises(self, is_late: bool) -> None:
        output = self.target.schedule()
        if is_late:
            self.executor.run(output, dict.fromkeys((part.request_id for part in output.requests), 20))
        for result in self.target.fail_step(output, "raised"):
            self.end(result.request_id)

    def finish_step(self, output: SchedulerOutput, tokens: dict[str, int], failed: dict[str, str]) -> None:
        sampled = self.executor.run(output, tokens)
        for name in failed:
            sampled.pop(name, None)
        for result in self.target.update(output, StepResult(tokens=sampled, failed=failed)):
            assert result.finish_reason != "error" or result.request_id in failed, result.error
            if result.finish_reason is not None:
                self.end(result.request_id)

    def end(self, request_id: str) -> None:
        assert request_id in self.alive, "ended twice, or after its abort"
        assert request_id not in self.held, "ended before its turn"
        self.alive.remove(request_id)
        self.ended.append(request_id)

    @invariant()
    def is_sound(self) -> None:
        if hasattr(self, "target"):
            self.target.check_integrity()
            assert self.target.has_work == bool(self.alive)

    def teardown(self) -> None:
        if not hasattr(self, "target"):
            return
        for request_id in sorted(self.held):
            self.target.resume(request_id)
        self.held.clear()
        for _ in range(60 * len(self.alive) + 1):
            if not self.target.has_work:
                break
            output = self.target.schedule()
            self.finish_step(output, dict.fromkeys((part.request_id for part in output.requests), 20), {})
            self.target.check_integrity()
        assert not self.alive, "these never ended"
        snapshot = stats(self.target)
        assert (snapshot.num_blocks_used, snapshot.num_running, snapshot.num_waiting) == (0, 0, 0)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
