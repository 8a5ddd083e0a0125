"""Grammars through scheduler, runner and sampler on a random model, which writes JSON only because it must."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.processing.grammar import GrammarError
from runtime.processing.json_grammar import json_object, json_schema
from runtime.processing.tokenizer import Tokenizer
from runtime.request import Request, RequestOutput, SamplingParams
from runtime.startup import build_engine
from tests.integration.in_process_engine import EngineFactory, InProcessEngine
from tests.process_memory import memory_beside_this_process

SCHEMAS: dict[str, dict[str, Any]] = {
    "object": {
        "type": "object",
        "properties": {
            "colour": {"enum": ["red", "green", "blue"]},
            "count": {"type": "integer", "minimum": 0, "maximum": 20},
            "is_round": {"type": "boolean"},
        },
        "required": ["colour", "count", "is_round"],
        "additionalProperties": False,
    },
    "array": {"type": "array", "items": {"enum": [1, 22, 333]}, "minItems": 2, "maxItems": 5},
    "text": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 9},
            "note": {"type": ["string", "null"], "maxLength": 5},
        },
        "required": ["name", "note"],
        "additionalProperties": False,
    },
    "choice": {
        "anyOf": [
            {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False},
            {"type": "object", "properties": {"b": {"const": "x"}}, "required": ["b"], "additionalProperties": False},
        ]
    },
    "reference": {
        "$defs": {
            "digit": {"type": "integer", "minimum": 0, "maximum": 9},
            "point": {"type": "array", "items": {"$ref": "#/$defs/digit"}, "minItems": 2, "maxItems": 2},
        },
        "type": "object",
        "properties": {"box": {"type": "array", "items": {"$ref": "#/$defs/point"}, "minItems": 2, "maxItems": 2}},
        "required": ["box"],
        "additionalProperties": False,
    },
    "pattern": {"type": "string", "pattern": "^[A-C]{2}-[0-9]{3}$"},
}  # fmt: skip


@pytest.fixture(scope="module")
def factory(tiny_checkpoint: Path) -> EngineFactory:
    return EngineFactory(tiny_checkpoint)


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_checkpoint(tiny_checkpoint)


def request(name: str, grammar: str | None = None, *, prompt: int = 5, **sampling: Any) -> Request:
    fields = {"max_tokens": 200, "grammar": grammar, **sampling}
    token_ids = np.random.default_rng(prompt).integers(0, 400, 12).tolist()
    return Request(request_id=name, prompt_token_ids=token_ids, sampling=SamplingParams(**fields), arrival_time=0.0)


def run(engine: InProcessEngine | Engine, *requests: Request) -> dict[str, tuple[list[int], RequestOutput]]:
    """Tokens of each request, and its last output."""
    for one in requests:
        engine.add(one, ())
    tokens: dict[str, list[int]] = {one.request_id: [] for one in requests}
    last: dict[str, RequestOutput] = {}
    while len(last) < len(requests):
        for output in engine.step():
            tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                last[output.request_id] = output
    return {name: (tokens[name], last[name]) for name in tokens}


def check(schema: dict[str, Any], text: str) -> None:
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", SCHEMAS)
def test_every_output_validates(factory: EngineFactory, tokenizer: Tokenizer, name: str, temperature: float) -> None:
    engine = factory.build(max_num_seqs=4)
    grammar = json_schema(SCHEMAS[name], is_strict=True)
    requests = [request(f"{i}", grammar, prompt=i, temperature=temperature, seed=i) for i in range(6)]
    for token_ids, last in run(engine, *requests).values():
        assert last.finish_reason == "stop"
        check(SCHEMAS[name], tokenizer.decode(token_ids))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_requests_with_and_without_grammars_share_a_batch(
    factory: EngineFactory, tokenizer: Tokenizer, temperature: float
) -> None:
    names = list(SCHEMAS)

    def requests(grammars: bool) -> list[Request]:
        free = [request(f"free {i}", prompt=i, temperature=temperature, seed=i, max_tokens=30) for i in range(4)]
        bound = [
            request(name, json_schema(SCHEMAS[name], is_strict=True), temperature=temperature, seed=7) for name in names
        ]
        return [one for pair in zip(free, bound, strict=False) for one in pair] if grammars else free

    mixed = run(factory.build(max_num_seqs=8), *requests(True))
    alone = run(factory.build(max_num_seqs=8), *requests(False))
    for name, (token_ids, _) in mixed.items():
        if name.startswith("free"):
            assert token_ids == alone[name][0]
        else:
            check(SCHEMAS[name], tokenizer.decode(token_ids))


def test_preempted_request_stays_within_its_grammar(factory: EngineFactory, tokenizer: Tokenizer) -> None:
    schema = {
        "type": "array",
        "items": {"type": "integer", "minimum": 100, "maximum": 999},
        "minItems": 9,
        "maxItems": 9,
    }
    grammar = json_schema(schema, is_strict=True)
    requests = [request(f"{i}", grammar, prompt=i, temperature=1.0, seed=i) for i in range(4)]
    roomy = run(factory.build(max_num_seqs=4, block_size=4), *requests)
    engine = factory.build(max_num_seqs=4, block_size=4, num_blocks=22, max_model_len=80, enable_prefix_caching=False)
    tight = run(engine, *[request(f"{i}", grammar, prompt=i, temperature=1.0, seed=i, max_tokens=60) for i in range(4)])
    assert engine.stats.num_preemptions > 0
    for name, (token_ids, last) in tight.items():
        assert last.finish_reason == "stop"
        check(schema, tokenizer.decode(token_ids))
        assert token_ids == roomy[name][0]


def test_cut_output_ends_with_length_and_is_a_beginning(factory: EngineFactory, tokenizer: Tokenizer) -> None:
    schema = SCHEMAS["object"]
    whole, cut = (
        run(factory.build(), request("a", json_schema(schema, is_strict=True), max_tokens=count))["a"]
        for count in (200, 5)
    )
    assert cut[1].finish_reason == "length"
    assert cut[0] == whole[0][:5]


def test_any_object_is_an_object(factory: EngineFactory, tokenizer: Tokenizer) -> None:
    # A random model hardly ever closes a string by itself: the likeliest ends are helped along.
    bias = {tokenizer.encode(text, allow_special=False)[0]: 12.0 for text in ("}", '"')}
    requests = [request(f"{i}", json_object(), prompt=i, temperature=1.0, seed=i, logit_bias=bias) for i in range(4)]
    ended = [
        (tokens, last) for tokens, last in run(factory.build(), *requests).values() if last.finish_reason == "stop"
    ]
    assert ended
    assert all(isinstance(json.loads(tokenizer.decode(tokens)), dict) for tokens, _ in ended)


@pytest.mark.parametrize(
    "extras",
    [
        {"num_logprobs": 3},
        {"presence_penalty": 1.5, "frequency_penalty": 1.0, "repetition_penalty": 1.3},
        {"temperature": 1.0, "top_p": 0.3, "top_k": 4, "min_p": 0.2},
        {"logit_bias": dict.fromkeys(range(100), -100.0)},
        {"ignore_eos": True},
    ],
    ids=lambda extras: next(iter(extras)),
)
def test_other_sampling_fields_do_not_break_a_grammar(
    factory: EngineFactory, tokenizer: Tokenizer, extras: dict[str, Any]
) -> None:
    ((token_ids, last),) = run(
        factory.build(), request("a", json_schema(SCHEMAS["object"], is_strict=True), **extras)
    ).values()
    assert last.finish_reason == "stop"
    check(SCHEMAS["object"], tokenizer.decode(token_ids))


def test_end_is_not_allowed_before_the_grammar_ends(factory: EngineFactory, tokenizer: Tokenizer) -> None:
    bias = dict.fromkeys(factory.config.eos_token_ids, 100.0)
    ((token_ids, last),) = run(
        factory.build(), request("a", json_schema(SCHEMAS["object"], is_strict=True), logit_bias=bias)
    ).values()
    assert last.finish_reason == "stop"
    check(SCHEMAS["object"], tokenizer.decode(token_ids))


def test_grammar_that_grows_too_complex_ends_its_request_alone(factory: EngineFactory) -> None:
    optional = {f"p{i}": {"type": "string"} for i in range(1000)}
    bomb = json_schema({"type": "object", "properties": optional}, is_strict=True)
    ended = run(factory.build(), request("bomb", bomb, max_tokens=100), request("plain", max_tokens=8, ignore_eos=True))
    _, last = ended["bomb"]
    assert last.finish_reason == "error"
    assert last.is_rejected
    assert "too complex" in (last.error or "")
    assert len(ended["plain"][0]) == 8


def test_engine_without_grammars_refuses_one(factory: EngineFactory) -> None:
    engine = factory.build()
    engine.runner._grammars = None
    with pytest.raises(ValueError, match="serves no grammars"):
        engine.runner.add(request("a", json_object()), ())


@pytest.fixture(scope="module")
def started_engine(tiny_checkpoint: Path) -> Engine:
    return build_engine(
        EngineConfig(
            model=str(tiny_checkpoint),
            memory_bytes=memory_beside_this_process(),
            max_num_seqs=4,
            max_num_batched_tokens=128,
            max_model_len=512,
            encoder_graph_budgets=(16,),
            num_threads=1,
        )
    )


def test_started_engine_compiles_beside_its_steps(
    started_engine: Engine, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = started_engine._grammar_queue._compiler  # type: ignore[union-attr]
    compile_it: Callable[[str], object] = compiler.matcher
    is_released = False

    def slow(grammar: str) -> object:
        while not is_released:
            time.sleep(0.001)
        return compile_it(grammar)

    monkeypatch.setattr(compiler, "matcher", slow)
    started_engine.add(request("bound", json_schema(SCHEMAS["object"], is_strict=True)), ())
    assert len(run(started_engine, request("free", max_tokens=20, ignore_eos=True))["free"][0]) == 20
    is_released = True
    tokens: list[int] = []
    while started_engine.has_work:
        for output in started_engine.step():
            assert output.error is None
            tokens += output.new_token_ids
    check(SCHEMAS["object"], tokenizer.decode(tokens))


def test_started_engine_refuses_what_does_not_compile(started_engine: Engine) -> None:
    ((tokens, last),) = run(started_engine, request("a", "start: (")).values()
    assert (tokens, last.finish_reason, last.is_rejected) == ([], "error", True)
    assert not started_engine.has_work


def test_request_that_leaves_while_its_grammar_is_compiled_is_gone(started_engine: Engine) -> None:
    grammar = json_schema({"enum": [f"word {i}" * 20 for i in range(800)]}, is_strict=True)
    started_engine.add(request("a", grammar), ())
    with pytest.raises(ValueError, match="in use"):
        started_engine.add(request("a", grammar), ())
    started_engine.abort("a")
    assert not started_engine.has_work
    assert started_engine.step() == []


def test_grammar_of_too_many_bytes_is_refused(factory: EngineFactory) -> None:
    with pytest.raises(GrammarError, match="the limit is"):
        factory.grammars.matcher(json_schema({"enum": ["x" * 1000 * i for i in range(40)]}, is_strict=True))
