from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from runtime.device_errors import EngineFatalError
from runtime.engine import Engine
from runtime.request import Request, RequestOutput
from runtime.scheduler.admission import RequestRejected
from runtime.scheduler.output import SampledToken, SchedulerOutput, StepResult
from runtime.stats import GraphCounts, GraphFamily
from tests.integration.process_engines import RAISE, InventingRunner, engine_info
from tests.unit.runtime.scheduler.builders import picture, request, scheduler


class Encoder:
    num_images, num_tokens, num_batches, encode_seconds = 3, 30, 2, 0.5


class Graphs:
    family: GraphFamily = "encoder"
    counts = GraphCounts(hits=7)


class FatalRunner(InventingRunner):
    def run(self, output: SchedulerOutput) -> StepResult:
        raise EngineFatalError("the device is gone")


class FailingRunner(InventingRunner):
    def run(self, output: SchedulerOutput) -> StepResult:
        failed = {"bad": "no rows"}
        tokens = {p.request_id: SampledToken(token_id=5) for p in output.requests if p.request_id not in failed}
        return StepResult(tokens=tokens, failed=failed)


def run_until_done(engine: Engine) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    for _ in range(100):
        if not engine.has_work:
            return outputs
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    raise AssertionError("still work after 100 steps")


def test_requests_run_to_their_end_and_the_executor_forgets_them() -> None:
    runner = InventingRunner()
    engine = Engine(scheduler(), runner, engine_info())
    pixels = np.full((28, 28, 3), 2, np.uint8)
    engine.add(request("a", 8, images=[picture("x", 1, 1)], max_tokens=3, ignore_eos=True), [pixels])
    engine.add(request("b", 5, max_tokens=1), [])
    outputs = run_until_done(engine)
    base = int(pixels.sum()) % 1000
    assert [token for output in outputs["a"] for token in output.new_token_ids] == [base, base + 1, base + 2]
    assert [output.finish_reason for output in outputs["a"]] == [None, None, "length"]
    assert runner.requests == {}


def test_a_request_that_makes_a_step_raise_ends_and_those_beside_it_go_on() -> None:
    runner = InventingRunner()
    engine = Engine(scheduler(), runner, engine_info())
    engine.add(request("before", 5, max_tokens=3, ignore_eos=True), [])
    engine.step()
    engine.add(request("bad", [RAISE, 1, 2]), [])
    engine.add(request("beside", 5, max_tokens=3, ignore_eos=True), [])
    outputs = run_until_done(engine)
    assert [output.error for output in outputs["bad"]] == ["the step failed: RuntimeError"]
    for name, tokens in (("before", [1, 2]), ("beside", [0, 1, 2])):
        assert [token for output in outputs[name] for token in output.new_token_ids] == tokens
        assert outputs[name][-1].finish_reason == "length"
    assert (engine.stats().num_failed_steps, runner.requests) == (1, {})


def test_two_requests_that_make_a_step_raise_both_end_and_free_their_blocks() -> None:
    engine = Engine(scheduler(), InventingRunner(), engine_info())
    engine.add(request("bad", [RAISE, 1, 2]), [])
    engine.add(request("worse", [RAISE, 1, 2]), [])
    outputs = run_until_done(engine)
    assert {name: [o.finish_reason for o in each] for name, each in outputs.items()} == {
        "bad": ["error"],
        "worse": ["error"],
    }
    assert engine.stats().num_blocks_used == 0
    engine.add(request("good", 5, max_tokens=2, ignore_eos=True), [])
    assert run_until_done(engine)["good"][-1].finish_reason == "length"


def test_what_is_refused_beside_a_request_that_raises_stays_refused() -> None:
    class Refusing(InventingRunner):
        def run(self, output: SchedulerOutput) -> StepResult:
            result = super().run(output)
            refused = {name: "not so" for name in result.tokens if name == "refused"}
            tokens = {name: token for name, token in result.tokens.items() if name not in refused}
            return StepResult(tokens=tokens, failed={}, refused=refused)

    engine = Engine(scheduler(), Refusing(), engine_info())
    for name in ("bad", "refused"):
        engine.add(request(name, [RAISE, 1, 2] if name == "bad" else 5), [])
    outputs = run_until_done(engine)
    assert not outputs["bad"][-1].is_rejected
    assert (outputs["refused"][-1].is_rejected, outputs["refused"][-1].error) == (True, "not so")


class DeafRunner(InventingRunner):
    """Raises once, before it looks at anything; notes who was said to have ended."""

    is_deaf = False

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def run(self, output: SchedulerOutput) -> StepResult:
        if self.is_deaf:
            self.is_deaf = False
            raise RuntimeError("not listening")
        self.told += output.finished_request_ids
        return super().run(output)


def test_what_a_failed_step_was_told_is_told_again() -> None:
    runner = DeafRunner()
    engine = Engine(scheduler(), runner, engine_info())
    engine.add(request("gone"), [])
    engine.step()
    engine.abort("gone")
    for name in ("a", "b"):
        engine.add(request(name, 5, max_tokens=3, ignore_eos=True), [])
    runner.is_deaf = True
    outputs = run_until_done(engine)
    assert [len(outputs[name]) for name in ("a", "b")] == [3, 3]
    assert runner.told == ["gone"]


def test_a_request_that_the_executor_failed_ends_and_the_others_go_on() -> None:
    engine = Engine(scheduler(), FailingRunner(), engine_info())
    engine.add(request("bad"), [])
    engine.add(request("good", max_tokens=2), [])
    outputs = run_until_done(engine)
    assert [output.error for output in outputs["bad"]] == ["no rows"]
    assert len(outputs["good"]) == 2


def test_a_fatal_error_is_not_swallowed() -> None:
    engine = Engine(scheduler(), FatalRunner(), engine_info())
    engine.add(request("r"), [])
    with pytest.raises(EngineFatalError, match="the device is gone"):
        engine.step()


class BreakingRunner(InventingRunner):
    """The device breaks in a step, or when requests are run alone."""

    def __init__(self, *, breaks_alone: bool) -> None:
        super().__init__()
        self.breaks_alone = breaks_alone

    def run(self, output: SchedulerOutput) -> StepResult:
        if self.breaks_alone and len(output.requests) > 1:
            raise RuntimeError("no shape for this")
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nSearch for ...")


@pytest.mark.parametrize("breaks_alone", [False, True])
def test_an_error_that_leaves_the_device_unusable_ends_the_engine(breaks_alone: bool) -> None:
    engine = Engine(scheduler(), BreakingRunner(breaks_alone=breaks_alone), engine_info())
    engine.add(request("one"), [])
    engine.add(request("two"), [])
    with pytest.raises(EngineFatalError, match="AcceleratorError: CUDA error: an illegal memory access") as caught:
        engine.step()
    assert isinstance(caught.value.__cause__, torch.AcceleratorError)


def test_a_request_that_the_executor_refuses_is_not_scheduled() -> None:
    class Refusing(InventingRunner):
        def add(self, *_: object) -> None:
            raise ValueError("top_k is negative")

    engine = Engine(scheduler(), Refusing(), engine_info())
    with pytest.raises(ValueError, match="top_k"):
        engine.add(request("r"), [])
    assert not engine.has_work


def test_a_request_that_the_scheduler_rejects_never_reaches_the_executor() -> None:
    runner = InventingRunner()
    engine = Engine(scheduler(), runner, engine_info())
    with pytest.raises(RequestRejected):
        engine.add(request("r", 1000), [])
    assert runner.requests == {}


def test_an_abort_reaches_scheduler_and_executor_at_once() -> None:
    runner = InventingRunner()
    engine = Engine(scheduler(), runner, engine_info())
    engine.add(request("r"), [])
    engine.step()
    engine.abort("r")
    engine.abort("nobody")
    assert (engine.has_work, runner.requests) == (False, {})
    assert engine.stats().num_blocks_used == 0


def test_a_step_without_work_counts_nowhere() -> None:
    engine = Engine(scheduler(), FatalRunner(), engine_info())
    assert engine.step() == []
    assert engine.stats().num_steps == 0


def test_a_snapshot_holds_the_numbers_of_all_parts() -> None:
    engine = Engine(scheduler(), InventingRunner(), engine_info(), encoder=Encoder(), graphs=[Graphs()])
    engine.add(request("r", 6, max_tokens=2), [])
    run_until_done(engine)
    stats = engine.stats()
    assert (stats.num_steps, stats.num_prompt_tokens, stats.num_generation_tokens) == (2, 6, 2)
    assert (stats.num_images_encoded, stats.num_image_tokens_encoded, stats.encode_batches) == (3, 30, 2)
    assert (stats.encode_seconds, stats.graphs["encoder"].hits) == (0.5, 7)
    assert stats.step_seconds > 0


class FakeAhead:
    """Encodes when it is told to; keeps who must wait."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, list[int]]] = []
        self.forgotten: list[str] = []
        self.timeouts: list[float] = []
        self.ready: list[str] = []

    def begin(self, request: Request, pixels: Sequence[NDArray[np.uint8]], indices: Sequence[int]) -> bool:
        self.begun.append((request.request_id, list(indices)))
        return True

    def take_ready(self, *, timeout_seconds: float) -> list[str]:
        self.timeouts.append(timeout_seconds)
        ready, self.ready = self.ready, []
        return ready

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)


def test_a_request_whose_picture_is_encoded_ahead_waits_and_others_do_not() -> None:
    ahead = FakeAhead()
    engine = Engine(scheduler(), InventingRunner(), engine_info(), encodes_ahead=ahead)
    pixels = [np.full((28, 28, 3), 2, np.uint8)]
    engine.add(request("picture", 8, images=[picture("x", 1, 1)], max_tokens=1), pixels)
    engine.add(request("text", 5, max_tokens=1), [])
    assert ahead.begun == [("picture", [0])]
    assert [output.request_id for output in engine.step()] == ["text"]
    assert engine.step() == []
    assert [timeout > 0 for timeout in ahead.timeouts] == [False, True], "it waits where there is nothing else to do"
    ahead.ready = ["picture"]
    assert [output.request_id for output in engine.step()] == ["picture"]
    assert (engine.has_work, ahead.forgotten) == (False, ["text", "picture"])


def test_an_abort_of_a_request_whose_picture_is_being_encoded_is_told_on() -> None:
    ahead = FakeAhead()
    engine = Engine(scheduler(), InventingRunner(), engine_info(), encodes_ahead=ahead)
    engine.add(request("r", 8, images=[picture("x", 1, 1)]), [np.zeros((28, 28, 3), np.uint8)])
    engine.abort("r")
    assert (engine.has_work, ahead.forgotten) == (False, ["r"])


class NeverCompiled:
    """Compiles every grammar, and never says that it has."""

    def is_compiled(self, grammar: str) -> bool:
        return False

    def matcher(self, grammar: str) -> object:
        return grammar


def test_an_id_in_use_is_refused_at_once_to_a_request_whose_grammar_must_be_compiled() -> None:
    runner = InventingRunner()
    engine = Engine(scheduler(), runner, engine_info(), grammars=NeverCompiled())
    engine.add(request("r", 5, max_tokens=2, ignore_eos=True), [])
    again = request("r", 5)
    again = msgspec.structs.replace(again, sampling=msgspec.structs.replace(again.sampling, grammar="root ::= [a]"))
    with pytest.raises(ValueError, match="'r' is in use"):
        engine.add(again, [])
    assert [output.finish_reason for output in run_until_done(engine)["r"]] == [None, "length"]
