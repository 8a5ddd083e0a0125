"""The sampler against a plain reference in NumPy, one row at a time, and against the distributions it promises."""

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from runtime.executor.sampler import MIN_LOGPROB, SampledBatch, Sampler
from runtime.executor.sampling_rows import SamplingRows, uniform_numbers
from runtime.request import SamplingParams

VOCAB = 16
CPU = torch.device("cpu")

# 99.99th percentiles of chi-square by degrees of freedom.
CHI_SQUARE_LIMIT = {1: 15.14, 2: 18.42, 3: 21.11, 4: 23.51, 5: 25.74, 7: 29.88, 15: 44.26}


def params(**fields: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, **fields})  # type: ignore[arg-type]


def make_rows(requests: list[SamplingParams], *, vocab: int = VOCAB, **tokens: list[list[int]]) -> SamplingRows:
    rows = SamplingRows(num_rows=len(requests), vocab_size=vocab, device=CPU)
    for row, request in enumerate(requests):
        rows.assign(
            row,
            request,
            seed=request.seed or row,
            prompt_token_ids=np.array(tokens.get("prompts", [[]] * len(requests))[row], dtype=np.int64),
            output_token_ids=np.array(tokens.get("outputs", [[]] * len(requests))[row], dtype=np.int64),
        )
    return rows


def sample(rows: SamplingRows, logits: NDArray[np.float32], steps: list[int] | None = None) -> SampledBatch:
    count = len(logits)
    return Sampler(rows).sample(
        torch.from_numpy(logits), np.arange(count), np.array(steps or [0] * count, dtype=np.int64)
    )


def reference_distribution(
    logits: NDArray[np.float32], request: SamplingParams, prompt: list[int], output: list[int]
) -> NDArray[np.float64]:
    """The definition, written plainly: loops over tokens, ranks by a sort."""
    values = logits.astype(np.float64)
    for token, bias in request.logit_bias.items():
        values[token] += bias
    for token in set(prompt) | set(output):
        if values[token] > 0:
            values[token] /= request.repetition_penalty
        else:
            values[token] *= request.repetition_penalty
    for token in set(output):
        values[token] -= request.frequency_penalty * output.count(token) + request.presence_penalty
    if request.temperature == 0:
        greedy = np.zeros(len(values))
        greedy[int(np.argmax(values))] = 1
        return greedy
    values /= request.temperature
    probabilities = np.exp(values - values.max())
    probabilities[probabilities < request.min_p * probabilities.max()] = 0
    order = np.argsort(-probabilities, kind="stable")
    if request.top_k:
        probabilities[order[request.top_k :]] = 0
    probabilities /= probabilities.sum()
    mass = 0.0
    for token in order:
        if mass >= request.top_p:
            probabilities[token] = 0
        mass += probabilities[token]
    return probabilities / probabilities.sum()


def chi_square(counts: NDArray[np.int64], expected: NDArray[np.float64]) -> tuple[float, int]:
    support = expected > 0
    assert not counts[~support].any(), "a token of probability zero was drawn"
    expectation = expected[support] * counts.sum()
    return float((((counts[support] - expectation) ** 2) / expectation).sum()), int(support.sum()) - 1


CASES = [
    params(temperature=1.0),
    params(temperature=0.5),
    params(temperature=1.7, top_k=4),
    params(temperature=1.0, top_p=0.7),
    params(temperature=1.0, min_p=0.2),
    params(temperature=1.3, top_k=6, top_p=0.8),
    params(temperature=1.3, min_p=0.1, top_k=8, top_p=0.9),
    params(temperature=1.0, presence_penalty=0.8),
    params(temperature=1.0, frequency_penalty=0.6),
    params(temperature=1.0, repetition_penalty=1.6),
    params(temperature=1.0, logit_bias={3: 2.5, 5: -4.0}),
    params(
        temperature=0.9,
        top_k=9,
        top_p=0.95,
        presence_penalty=0.4,
        frequency_penalty=-0.3,
        repetition_penalty=1.2,
        logit_bias={0: 1.0},
    ),
]


@pytest.mark.parametrize("request_params", CASES)
def test_draws_follow_the_plain_definition(request_params: SamplingParams) -> None:
    rng = np.random.default_rng(7)
    logits = rng.normal(size=VOCAB).astype(np.float32) * 1.5
    prompt, output = [1, 2, 2, 9], [3, 3, 3, 9, 11]
    num_draws = 4000
    rows = make_rows(
        [params(**{f: getattr(request_params, f) for f in request_params.__struct_fields__})] * num_draws,
        prompts=[prompt] * num_draws,
        outputs=[output] * num_draws,
    )
    rows.seed[:] = np.arange(num_draws, dtype=np.uint64)
    tokens = sample(rows, np.repeat(logits[None], num_draws, axis=0)).token_ids
    expected = reference_distribution(logits, request_params, prompt, output)
    assert_follows(tokens, expected)


def assert_follows(tokens: list[int], expected: NDArray[np.float64]) -> None:
    statistic, freedom = chi_square(np.bincount(tokens, minlength=VOCAB), expected)
    limit = CHI_SQUARE_LIMIT.get(freedom) or freedom + 6 * math.sqrt(2 * freedom) + 10
    assert freedom >= 1
    assert statistic < limit


@pytest.mark.parametrize("cases", [CASES, [case for case in CASES if case.top_k]], ids=["all", "top_k"])
def test_draws_in_company_follow_each_requests_own_definition(cases: list[SamplingParams]) -> None:
    """What one row wants, such as its number of tokens to look at, must change nothing for its neighbours."""
    logits = np.random.default_rng(8).normal(size=(len(cases), VOCAB)).astype(np.float32) * 1.5
    prompt, output = [1, 2, 2, 9], [3, 3, 3, 9, 11]
    num_draws = 2000
    count = num_draws * len(cases)
    rows = make_rows(cases * num_draws, prompts=[prompt] * count, outputs=[output] * count)
    rows.seed[:] = np.arange(count, dtype=np.uint64)
    tokens = sample(rows, np.tile(logits, (num_draws, 1))).token_ids
    for index, case in enumerate(cases):
        assert_follows(tokens[index :: len(cases)], reference_distribution(logits[index], case, prompt, output))


def test_draws_of_one_request_over_its_steps_follow_the_distribution_too() -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.125, 0.125]], dtype=np.float32))
    rows = make_rows([params(temperature=1.0, seed=5)], vocab=4)
    counts = np.zeros(4, dtype=np.int64)
    for step in range(3000):
        counts[sample(rows, logits, [step]).token_ids[0]] += 1
    statistic, freedom = chi_square(counts, np.array([0.5, 0.25, 0.125, 0.125]))
    assert statistic < CHI_SQUARE_LIMIT[freedom]


@pytest.mark.parametrize("seed", range(5))
def test_greedy_rows_with_extras_equal_the_reference(seed: int) -> None:
    rng = np.random.default_rng(seed)
    requests = [
        params(),
        params(repetition_penalty=1.8),
        params(presence_penalty=1.5, frequency_penalty=0.5),
        params(logit_bias={2: 3.0, 7: -100.0}),
        params(repetition_penalty=0.6, logit_bias={4: 1.0}, num_logprobs=2),
    ]
    prompts = [rng.integers(0, VOCAB, 6).tolist() for _ in requests]
    outputs = [rng.integers(0, VOCAB, 5).tolist() for _ in requests]
    logits = rng.normal(size=(len(requests), VOCAB)).astype(np.float32) * 2
    got = sample(make_rows(requests, prompts=prompts, outputs=outputs), logits).token_ids
    expected = [
        int(np.argmax(reference_distribution(row, request, prompt, output)))
        for row, request, prompt, output in zip(logits, requests, prompts, outputs, strict=True)
    ]
    assert got == expected


def test_greedy_fast_path_equals_the_general_path() -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(6, VOCAB)).astype(np.float32)
    plain = sample(make_rows([params()] * 6), logits).token_ids
    general = sample(make_rows([params()] * 5 + [params(num_logprobs=0)]), logits).token_ids
    assert plain == general == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("vocab", [7, 4096, 50_001])
def test_equal_logits_give_the_lowest_id(vocab: int) -> None:
    logits = np.zeros((3, vocab), dtype=np.float32)
    logits[1, [vocab // 2, vocab - 1]] = 4.0
    logits[2, [vocab - 2, vocab - 1]] = 4.0
    expected = [0, vocab // 2, vocab - 2]
    assert sample(make_rows([params()] * 3, vocab=vocab), logits).token_ids == expected
    assert sample(make_rows([params(num_logprobs=1)] * 3, vocab=vocab), logits).token_ids == expected


def test_same_seed_and_step_give_the_same_token_in_any_company() -> None:
    rng = np.random.default_rng(11)
    logits = rng.normal(size=(5, VOCAB)).astype(np.float32)
    request = params(temperature=1.2, top_p=0.95, seed=99)
    company = [
        params(temperature=2.0, top_k=3, seed=1),
        params(),
        params(temperature=1.0, min_p=0.3, frequency_penalty=1.0, seed=2),
        params(temperature=0.7, logit_bias={1: 2.0}, num_logprobs=3, seed=4),
    ]
    for step in range(40):
        alone = sample(make_rows([request]), logits[:1], [step]).token_ids[0]
        first = sample(make_rows([request, *company]), logits, [step, 9, 8, 7, 6]).token_ids[0]
        last = sample(make_rows([*company, request]), np.roll(logits, -1, axis=0), [1, 2, 3, 4, step]).token_ids[-1]
        assert alone == first == last


def test_different_seeds_and_steps_give_different_numbers() -> None:
    seeds = np.arange(2000, dtype=np.uint64)
    numbers = np.concatenate([uniform_numbers(seeds, np.full(2000, step)) for step in range(5)])
    assert len(np.unique(numbers)) == 10_000
    assert 0 <= numbers.min() < numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.02
    first, second = numbers[:2000], numbers[2000:4000]
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.08


def test_top_p_beyond_the_short_head_equals_the_whole_sort() -> None:
    vocab = 5000
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(4, vocab)).astype(np.float32) * 0.3
    request = params(temperature=1.0, top_p=0.9, seed=3)
    expected = reference_distribution(logits[0], request, [], [])
    assert (expected > 0).sum() > 1000
    tokens = {
        sample(
            make_rows([request] * 4, vocab=vocab), np.repeat(logits[:1], 4, axis=0), [s, s + 1, s + 2, s + 3]
        ).token_ids[i]
        for s in range(0, 400, 4)
        for i in range(4)
    }
    assert len(tokens) > 200
    assert all(expected[token] > 0 for token in tokens)


@pytest.mark.parametrize(
    ("fields", "token"),
    [
        ({"presence_penalty": 0.8}, 0),  # once, however often it came
        ({"presence_penalty": 1.2}, 1),
        ({"frequency_penalty": 0.3}, 0),
        ({"frequency_penalty": 0.4}, 1),  # each time
        ({"presence_penalty": 0.5, "frequency_penalty": 0.2}, 1),
        ({"repetition_penalty": 1.9}, 0),  # once
    ],
)
def test_presence_counts_once_and_frequency_each_time(fields: dict[str, float], token: int) -> None:
    logits = np.array([[2.0, 1.0, 0.0, 0.0]], dtype=np.float32)
    rows = make_rows([params(temperature=0.0, **fields)], vocab=4, prompts=[[1, 1]], outputs=[[0, 0, 0]])
    assert sample(rows, logits).token_ids == [token]


def test_penalties_count_what_was_sampled_since() -> None:
    logits = np.zeros((1, 4), dtype=np.float32)
    logits[0] = [1.0, 0.8, 0.6, 0.4]
    rows = make_rows([params(frequency_penalty=0.3)], vocab=4)
    tokens = [sample(rows, logits, [step]).token_ids[0] for step in range(6)]
    output: list[int] = []
    for _ in range(6):
        distribution = reference_distribution(logits[0], params(frequency_penalty=0.3), [], output)
        output.append(int(np.argmax(distribution)))
    assert tokens == output


def test_row_rebuilt_from_its_tokens_goes_on_as_before() -> None:
    rng = np.random.default_rng(4)
    logits = rng.normal(size=(1, VOCAB)).astype(np.float32)
    request = params(temperature=1.0, frequency_penalty=1.0, repetition_penalty=1.3, seed=12)
    rows = make_rows([request], prompts=[[1, 2]])
    tokens = [sample(rows, logits, [step]).token_ids[0] for step in range(8)]
    rebuilt = make_rows([request], prompts=[[1, 2]], outputs=[tokens[:5]])
    assert [sample(rebuilt, logits, [step]).token_ids[0] for step in range(5, 8)] == tokens[5:]


def test_reassigned_row_forgets_its_former_request() -> None:
    rows = make_rows([params(frequency_penalty=5.0, logit_bias={1: 50.0}, num_logprobs=1)], outputs=[[0, 0, 0]])
    nothing = np.array([], dtype=np.int64)
    rows.assign(0, params(frequency_penalty=1.0), seed=0, prompt_token_ids=nothing, output_token_ids=nothing)
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    logits[0, 0] = 0.5
    result = sample(rows, logits)
    assert result.token_ids == [0]
    assert result.logprobs is None


def test_logprobs_are_of_the_raw_distribution_likeliest_first() -> None:
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(3, VOCAB)).astype(np.float32)
    requests = [
        params(temperature=3.0, logit_bias={6: 100.0}, num_logprobs=4),
        params(num_logprobs=0),
        params(temperature=1.0),
    ]
    result = sample(make_rows(requests), logits)
    assert result.logprobs is not None
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    first, second, third = result.logprobs
    assert first is not None
    assert second is not None
    assert third is None
    assert result.token_ids[0] == 6
    assert first.logprob == pytest.approx(expected[0, 6], abs=1e-5)
    likeliest = np.argsort(-expected[0])[:4]
    assert [token for token, _ in first.top] == likeliest.tolist()
    assert [value for _, value in first.top] == pytest.approx(expected[0, likeliest].tolist(), abs=1e-5)
    assert second.top == []
    assert second.logprob == pytest.approx(expected[1].max(), abs=1e-5)


def test_more_logprobs_than_tokens_gives_all_tokens() -> None:
    result = sample(make_rows([params(num_logprobs=20)], vocab=4), np.zeros((1, 4), dtype=np.float32))
    assert result.logprobs is not None
    assert result.logprobs[0] is not None
    assert len(result.logprobs[0].top) == 4


def test_infinities_never_leave_and_nan_is_said() -> None:
    logits = np.zeros((3, 4), dtype=np.float32)
    logits[0, 1:] = -np.inf
    logits[1, 2] = np.nan
    result = sample(make_rows([params(num_logprobs=4)] * 3, vocab=4), logits)
    assert result.is_valid == [True, False, True]
    assert result.logprobs is not None
    assert result.logprobs[0] is not None
    assert [value for _, value in result.logprobs[0].top] == [0.0, MIN_LOGPROB, MIN_LOGPROB, MIN_LOGPROB]
    assert all(
        math.isfinite(entry.logprob) and all(math.isfinite(value) for _, value in entry.top)
        for entry in result.logprobs
        if entry
    )
    assert sample(make_rows([params()] * 3, vocab=4), logits).is_valid == [True, False, True]
    alone = [sample(make_rows([params()], vocab=4), logits[row : row + 1]) for row in range(3)]
    assert [result.is_valid for result in alone] == [[True], [False], [True]]
    assert [result.token_ids for result in (alone[0], alone[2])] == [[0], [0]]
    assert sample(make_rows([params(temperature=1.0)] * 3, vocab=4), logits).is_valid == [True, False, True]


def test_impossible_tokens_are_never_drawn() -> None:
    logits = np.full((200, VOCAB), -np.inf, dtype=np.float32)
    logits[:, [4, VOCAB - 3]] = 0.0
    rows = make_rows([params(temperature=1.0)] * 200)
    assert set(sample(rows, logits).token_ids) == {4, VOCAB - 3}


@pytest.mark.parametrize("others", [{}, {"min_p": 0.5}, {"top_k": 3}, {"top_p": 0.5}, {"logit_bias": {0: 0.0}}])
@pytest.mark.parametrize("temperature", [1.1e-5, 1e-6, 1e-38, 1e-45, 1e-300, 5e-324])
def test_tiny_temperature_is_greedy(temperature: float, others: dict[str, object]) -> None:
    logits = np.random.default_rng(6).normal(size=(8, VOCAB)).astype(np.float32) * 500
    rows = make_rows([params(temperature=temperature, **others)] * 8)
    assert sample(rows, logits).token_ids == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.1e-5, 1.0, 2.0])
@pytest.mark.parametrize("repetition", [1e-300, 1e-45, 1e-38, 1e-10])
def test_tiny_repetition_penalty_picks_what_was_seen(repetition: float, temperature: float) -> None:
    logits = np.abs(np.random.default_rng(7).normal(size=(8, VOCAB)).astype(np.float32)) + 1
    request = params(temperature=temperature, repetition_penalty=repetition, top_p=0.9, min_p=0.01, num_logprobs=1)
    rows = make_rows([request] * 8, prompts=[[2, 5]] * 8)
    assert set(sample(rows, logits).token_ids) <= {2, 5}


def test_logits_are_left_as_they_were() -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    rows = make_rows([params(logit_bias={1: 3.0}, repetition_penalty=2.0, num_logprobs=2), params(temperature=1.0)])
    Sampler(rows).sample(logits, np.arange(2), np.zeros(2, dtype=np.int64))
    assert torch.equal(logits, before)


def test_bias_outside_the_vocabulary_is_refused() -> None:
    rows = make_rows([params()])
    rows.check(params(logit_bias={0: 1.0, VOCAB - 1: 1.0}))
    with pytest.raises(ValueError, match="token 16; the vocabulary has 16"):
        rows.check(params(logit_bias={VOCAB: 1.0}))


def test_parameters_out_of_the_vocabularys_range_do_nothing() -> None:
    logits = np.random.default_rng(8).normal(size=(1, VOCAB)).astype(np.float32)
    for step in range(20):
        free = sample(make_rows([params(temperature=1.0, seed=1)]), logits, [step]).token_ids
        wide = sample(make_rows([params(temperature=1.0, seed=1, top_k=10_000)]), logits, [step]).token_ids
        assert free == wide
