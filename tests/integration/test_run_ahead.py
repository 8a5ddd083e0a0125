"""Steps that are launched before the tokens of those before them are read: the same outputs as without."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.processing.json_grammar import json_object
from runtime.request import Request, RequestOutput, SamplingParams
from runtime.scheduler.output import SchedulerOutput, StepResult
from tests.integration.in_process_engine import EngineFactory, InProcessEngine

MAX_MODEL_LEN = 64


@pytest.fixture(scope="module")
def factory(tiny_checkpoint: Path) -> EngineFactory:
    return EngineFactory(tiny_checkpoint)


def request(name: str, num_tokens: int = 9, **sampling: Any) -> Request:
    fields: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, **sampling}
    prompt = np.random.default_rng(sum(name.encode())).integers(0, 480, num_tokens).tolist()
    return Request(request_id=name, prompt_token_ids=prompt, sampling=SamplingParams(**fields), arrival_time=0.0)


def engine(factory: EngineFactory, run_ahead: str, **settings: Any) -> InProcessEngine:
    defaults: dict[str, Any] = {
        "enforce_eager": False,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 4,
        "block_size": 4,
        "max_num_batched_tokens": 32,
        "enable_prefix_caching": False,
    }
    return factory.build(run_ahead=run_ahead, **{**defaults, **settings})


def outputs_of(made: InProcessEngine, arrivals: Sequence[tuple[int, Request]]) -> dict[str, list[RequestOutput]]:
    """All outputs by request, of requests that arrive before the step of that number."""
    found: dict[str, list[RequestOutput]] = {}
    pending = list(arrivals)
    for number in range(200):
        while pending and pending[0][0] <= number:
            made.add(pending.pop(0)[1])
        if not pending and not made.scheduler.has_work:
            return found
        for output in made.step():
            found.setdefault(output.request_id, []).append(output)
    raise AssertionError("no end")


def tokens_of(outputs: Sequence[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.new_token_ids]


class Replays:
    """Counts the replays of an engine's decoder."""

    def __init__(self, made: InProcessEngine) -> None:
        self.count = 0
        graphs: Any = made.decoder_graphs
        replay: Callable[..., Any] = graphs.replay

        def counted(*arguments: Any, **named: Any) -> Any:
            self.count += 1
            return replay(*arguments, **named)

        graphs.replay = counted


ARRIVALS: dict[str, list[tuple[int, Request]]] = {
    "one": [(0, request("a"))],
    "together, ending apart": [(0, request(name, max_tokens=3 + 4 * index)) for index, name in enumerate("abcd")],
    "into the middle of others": [(3 * index, request(name, 5 + index)) for index, name in enumerate("abcde")],
    "up to the model's length": [(0, request("a", 50, max_tokens=40)), (1, request("b", 61, max_tokens=40))],
    "random": [(0, request(name, temperature=0.9, top_p=0.8, seed=index)) for index, name in enumerate("abc")],
    "log-probabilities": [(0, request("a", num_logprobs=2)), (2, request("b", num_logprobs=0))],
    "penalties": [(0, request("a", repetition_penalty=1.3, presence_penalty=0.5)), (0, request("b"))],
    "bias": [(0, request("a", logit_bias={7: 3.0}, temperature=0.5, seed=1)), (0, request("b"))],
    "grammar": [(0, request("a", grammar=json_object(), ignore_eos=False)), (1, request("b"))],
    "chunked prompt beside decodes": [(0, request("a", max_tokens=20)), (3, request("b", 60, max_tokens=3))],
}  # fmt: skip


@pytest.mark.parametrize("name", ARRIVALS)
def test_outputs_are_those_without_running_ahead(factory: EngineFactory, name: str) -> None:
    plain = outputs_of(engine(factory, "off"), ARRIVALS[name])
    ahead = outputs_of(engine(factory, "on"), ARRIVALS[name])
    assert ahead.keys() == plain.keys()
    for request_id, expected in plain.items():
        assert [output.new_token_ids for output in ahead[request_id]] == [output.new_token_ids for output in expected]
        assert [output.finish_reason for output in ahead[request_id]] == [output.finish_reason for output in expected]
        for one, other in zip(ahead[request_id], expected, strict=True):
            assert (one.logprobs is None) == (other.logprobs is None)


def test_stop_token_drops_the_row_that_ran_ahead(factory: EngineFactory) -> None:
    tokens = outputs_of(engine(factory, "off"), [(0, request("a"))])["a"]
    stop = tokens[5].new_token_ids[0]
    arrivals = [(0, request("a", stop_token_ids=(stop,))), (0, request("b", max_tokens=20)), (7, request("c"))]
    plain, ahead = (outputs_of(engine(factory, run_ahead), arrivals) for run_ahead in ("off", "on"))
    assert ahead["a"][-1].finish_reason == "stop"
    assert len(ahead["a"]) < len(tokens)
    for request_id in "abc":
        assert [o.new_token_ids for o in ahead[request_id]] == [o.new_token_ids for o in plain[request_id]]


def test_a_decode_step_is_on_its_way_before_it_is_scheduled(factory: EngineFactory) -> None:
    made = engine(factory, "on")
    replays = Replays(made)
    made.add(request("a", max_tokens=12))
    made.step()
    for number in range(1, 11):
        assert replays.count == number
        assert len(made.step()) == 1
    made.step()
    assert not made.scheduler.has_work
    # Eleven tokens after the first: the last step was known to be the last.
    assert replays.count == 11


def test_preemptions_change_no_token(factory: EngineFactory) -> None:
    arrivals = [(0, request(name, max_tokens=30)) for name in "abcd"]
    plain, ahead = (engine(factory, run_ahead, num_blocks=22) for run_ahead in ("off", "on"))
    expected, found = outputs_of(plain, arrivals), outputs_of(ahead, arrivals)
    assert min(plain.stats.num_preemptions, ahead.stats.num_preemptions) > 0
    for request_id in "abcd":
        assert tokens_of(found[request_id]) == tokens_of(expected[request_id])


@pytest.fixture
def aborting(factory: EngineFactory) -> InProcessEngine:
    made = engine(factory, "on")
    for name in "ab":
        made.add(request(name, max_tokens=20))
    for _ in range(4):
        made.step()
    return made


def test_id_that_is_used_again_gets_no_row_of_its_forerunner(factory: EngineFactory, aborting: InProcessEngine) -> None:
    expected = outputs_of(engine(factory, "off"), [(0, request("a", 7))])["a"]
    aborting.scheduler.abort("a")
    aborting.runner.remove("a")
    aborting.add(request("a", 7))
    found = outputs_of(aborting, [])
    assert [output.new_token_ids for output in found["a"]] == [output.new_token_ids for output in expected]


def test_step_that_raises_is_run_again_without_what_ran_ahead(
    aborting: InProcessEngine, factory: EngineFactory
) -> None:
    expected = {name: outputs_of(engine(factory, "off"), [(0, request(name, max_tokens=20))])[name] for name in "ab"}
    scheduled: SchedulerOutput = aborting.scheduler.schedule()
    runner: Any = aborting.runner
    launch = runner._decoder._launch_ahead

    def fail(_: Any) -> None:
        raise RuntimeError("planted")

    runner._decoder._launch_ahead = fail
    with pytest.raises(RuntimeError, match="planted"):
        runner.run(scheduled)
    runner._decoder._launch_ahead = launch
    result: StepResult = runner.run(scheduled)
    found = {output.request_id: [output] for output in aborting.scheduler.update(scheduled, result)}
    for request_id, outputs in outputs_of(aborting, []).items():
        found[request_id] += outputs
    for name in "ab":
        tokens = [output.new_token_ids for output in expected[name]]
        assert [output.new_token_ids for output in found[name]] == tokens[4:]
