from pathlib import Path

import numpy as np
import pytest
import torch

from runtime.executor.grammar_masks import GrammarMasks, TokenMasks, unpack_bits
from runtime.executor.sampler import Sampler
from runtime.processing.grammar import GrammarError, check_grammar
from runtime.processing.grammar_compiler import MAX_CACHED_GRAMMARS, GrammarCompiler
from runtime.processing.json_grammar import json_schema
from runtime.processing.tokenizer import Tokenizer
from tests.unit.runtime.executor.test_sampler import make_rows, params

CPU = torch.device("cpu")
DIGITS = 'start: "a" /[0-9]+/\n'


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_checkpoint(tiny_checkpoint)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    # As many ids as a model's logits may have beyond the tokenizer's, and no multiple of 32.
    end = tokenizer.added_ids["<|im_end|>"]
    return GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size + 45, eos_token_ids=[end], num_threads=2)


@pytest.mark.parametrize("num_bits", [1, 8, 31, 32, 33, 500, 512])
def test_bits_are_unpacked_as_numpy_does(num_bits: int) -> None:
    packed = np.random.default_rng(num_bits).integers(0, 256, (3, -(-num_bits // 32) * 4), dtype=np.uint8)
    expected = np.unpackbits(packed, axis=1, bitorder="little")[:, :num_bits].astype(bool)
    assert np.array_equal(unpack_bits(torch.from_numpy(packed), num_bits).numpy(), expected)


def test_mask_binds_its_own_sequences_and_leaves_the_logits_alone() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    allowed = np.zeros((2, 64), dtype=np.uint8)
    allowed[0, [3, 39]] = 1
    allowed[1, 8] = 1
    masks = TokenMasks(
        positions_C=torch.tensor([0, 2]), packed_CB=torch.from_numpy(np.packbits(allowed, axis=1, bitorder="little"))
    )
    masked = masks.apply(logits)
    assert torch.equal(logits, before)
    assert torch.equal(masked[1], logits[1])
    assert [torch.isfinite(masked[row]).nonzero().flatten().tolist() for row in (0, 2)] == [[3, 39], [8]]
    for sampling in ({}, {"temperature": 1.0}, {"temperature": 2.0, "top_p": 0.5, "frequency_penalty": 1.0}):
        rows = make_rows([params(**sampling)] * 3, vocab=40)
        sampled = Sampler(rows).sample(logits, np.arange(3), np.zeros(3, dtype=np.int64), masks)
        assert sampled.token_ids[0] in (3, 39)
        assert sampled.token_ids[2] == 8
        assert sampled.is_valid == [True, True, True]


def test_masks_follow_the_grammar(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    masks = GrammarMasks(compiler, num_rows=4, device=CPU)
    assert masks.fill([None, None]) is None
    first, second = masks.matcher(DIGITS), masks.matcher(DIGITS)
    (letter,) = tokenizer.encode("a", allow_special=False)
    second.accept(letter)

    def allowed() -> list[set[int]]:
        filled = masks.fill([None, first, None, second])
        assert filled is not None
        assert filled.positions_C.tolist() == [1, 3]
        bits = unpack_bits(filled.packed_CB, compiler.vocab_size)
        return [set(row.nonzero().flatten().tolist()) for row in bits]

    assert allowed()[0] == {letter}
    digits = allowed()[1]
    assert digits == {i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i).isdigit()}
    second.accept(min(digits))
    assert second.is_accepting
    assert allowed()[1] == digits | {tokenizer.added_ids["<|im_end|>"]}
    # Row by row it is the same as side by side.
    alone = [unpack_bits(masks.fill([one]).packed_CB, compiler.vocab_size).clone() for one in (first, second)]  # type: ignore[union-attr]
    assert [set(row.nonzero()[:, 1].tolist()) for row in alone] == allowed()


def test_matcher_refuses_what_does_not_fit_and_allows_an_end_then(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    matcher = compiler.matcher(DIGITS)
    (other,) = tokenizer.encode("b", allow_special=False)
    with pytest.raises(GrammarError):
        matcher.accept(other)
    assert matcher.error
    mask = np.zeros((1, compiler.num_words), dtype=np.int32)
    compiler.fill_masks([matcher], mask)
    end = tokenizer.added_ids["<|im_end|>"]
    assert np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist() == [end]


def test_special_tokens_are_no_letters(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    mask = np.zeros((1, compiler.num_words), dtype=np.int32)
    compiler.fill_masks([compiler.matcher("start: /(.|\\n)*/\n")], mask)
    allowed = set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())
    assert allowed & set(tokenizer.added_ids.values()) == {tokenizer.added_ids["<|im_end|>"]}
    assert max(allowed) < tokenizer.vocab_size
    assert len(allowed) > 400


def test_compiled_grammars_are_kept_within_a_limit(compiler: GrammarCompiler) -> None:
    grammars = [json_schema({"const": number}, is_strict=True) for number in range(MAX_CACHED_GRAMMARS + 1)]
    for grammar in grammars:
        compiler.matcher(grammar)
    assert not compiler.is_compiled(grammars[0])
    assert all(compiler.is_compiled(grammar) for grammar in grammars[1:])


@pytest.mark.parametrize("grammar", ["", "start: (", "start: missing", 'start: %json {"type": "nothing"}', "\ud800"])
def test_what_does_not_compile_is_said(compiler: GrammarCompiler, grammar: str) -> None:
    with pytest.raises((GrammarError, UnicodeEncodeError)):
        compiler.matcher(grammar)
    with pytest.raises((GrammarError, UnicodeEncodeError)):
        check_grammar(grammar)
