import numpy as np

from runtime.config import PROMPT_TOKEN_BYTES
from runtime.request import Request, SamplingParams
from runtime.request_budget import RequestBudget, request_bytes


def test_pixels_prompt_and_grammar_count() -> None:
    sampling = SamplingParams(max_tokens=1, grammar="x" * 50)
    request = Request(request_id="r", prompt_token_ids=[1, 2, 3], sampling=sampling, arrival_time=0.0)
    pixels = [np.zeros((28, 56, 3), np.uint8), np.zeros((28, 28, 3), np.uint8)]
    assert request_bytes(request, pixels) == 28 * 84 * 3 + 3 * PROMPT_TOKEN_BYTES + 50


def test_only_what_fits_is_taken() -> None:
    budget = RequestBudget(10)
    assert budget.take("a", 6)
    assert not budget.take("b", 5)
    assert budget.take("b", 4)
    budget.release("a")
    assert budget.num_bytes == 4
    assert budget.take("c", 6)


def test_one_alone_always_fits() -> None:
    budget = RequestBudget(10)
    assert budget.take("large", 99)
    assert not budget.take("b", 0)
    budget.release("large")
    assert budget.take("b", 0)


def test_without_a_bound_everything_fits() -> None:
    budget = RequestBudget()
    assert all(budget.take(str(number), 1 << 40) for number in range(3))


def test_an_aborted_request_counts_until_the_engine_has_let_go() -> None:
    """Its last output may cross the abort on the way: only the answer to the abort counts then."""
    budget = RequestBudget(10)
    assert budget.take("a", 10)
    budget.abort("a")
    budget.release("a")
    assert not budget.take("b", 1)
    assert not budget.take("a", 1)
    budget.release_aborted("a")
    assert budget.num_bytes == 0
    assert budget.take("a", 10)
    budget.release("a")
    assert budget.num_bytes == 0


def test_unknown_ids_are_no_error() -> None:
    budget = RequestBudget(10)
    budget.release("x")
    budget.release_aborted("x")
    assert budget.num_bytes == 0
