"""Added tokens cannot come from plain text, and ordinary text encodes and decodes as in transformers."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as RawTokenizer

from runtime.checkpoint import CheckpointError
from runtime.processing.tokenizer import Tokenizer

ADDED = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|endoftext|>", "<tool_call>", "<think>"]
TEXTS = [
    "What is in the picture? Describe the image.",
    "  two spaces,\n\n\nthree line breaks \t and a tab ",
    "naïve café, e\u0301 (combining), 你好, 🦊🏽, Ελληνικά",
    "x = [i**2 for i in range(10)]  # 100%",
    "\x00\x01 \u200b\ufeff \ue000",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_ordinary_text_encodes_as_in_transformers(tokenizer: Tokenizer, tokenizer_directory: Path, text: str) -> None:
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_directory / "tokenizer.json"))
    expected = reference.encode(text, add_special_tokens=False)
    assert tokenizer.encode(text, allow_special=False) == expected
    assert tokenizer.encode(text, allow_special=True) == expected
    assert tokenizer.decode(expected) == reference.decode(expected, skip_special_tokens=True)


@pytest.mark.parametrize("added", ADDED)
def test_added_token_in_plain_text_stays_text(tokenizer: Tokenizer, added: str) -> None:
    text = f"a{added}b {added}{added}"
    ids = tokenizer.encode(text, allow_special=False)
    assert set(ids).isdisjoint(tokenizer.added_ids.values())
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text, allow_special=True).count(tokenizer.added_ids[added]) == 3


@given(st.lists(st.sampled_from([*ADDED, "<|", "im_", "|>", " ", "a", "<", "\n"]), max_size=12).map("".join))
def test_no_mixture_of_their_parts_makes_an_added_token(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, allow_special=False)
    assert set(ids).isdisjoint(tokenizer.added_ids.values())
    assert tokenizer.decode(ids) == text


@given(st.lists(st.sampled_from([*ADDED, "<|", "im_end", "|>", " ", "é", "\n"]), max_size=12).map("".join))
def test_splitting_trusted_text_finds_the_tokens_that_encoding_finds(tokenizer: Tokenizer, text: str) -> None:
    joined: list[int] = []
    for part in tokenizer.split_added(text):
        joined += [part] if isinstance(part, int) else tokenizer.encode(part, allow_special=False)
    assert joined == tokenizer.encode(text, allow_special=True)


def test_token_listed_in_the_configuration_only_is_known(tokenizer: Tokenizer) -> None:
    token_id = tokenizer.added_ids["<think>"]
    assert token_id == tokenizer.vocab_size - 1
    assert tokenizer.decode([token_id]) == "<think>"


def test_special_tokens_are_left_out_of_text_and_others_kept(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>a<tool_call>b<|im_end|>", allow_special=True)
    assert tokenizer.decode(ids) == "a<tool_call>b"
    assert tokenizer.added_ids["<|im_end|>"] in tokenizer.special_ids
    assert tokenizer.added_ids["<tool_call>"] not in tokenizer.special_ids


def test_bytes_of_tokens_join_to_the_text(tokenizer: Tokenizer) -> None:
    text = "naïve 你好 🦊"
    ids = tokenizer.encode(text, allow_special=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert any("\ufffd" in tokenizer.token_text(token_id) for token_id in ids)
    assert tokenizer.token_bytes(tokenizer.added_ids["<|im_end|>"]) == b"<|im_end|>"
    assert tokenizer.token_bytes(10**6) == b""


def test_threads_may_share_a_tokenizer(tokenizer: Tokenizer) -> None:
    texts = [f"{text} {i} <|im_end|>" for i in range(40) for text in TEXTS]
    expected = [tokenizer.encode(text, allow_special=i % 2 == 0) for i, text in enumerate(texts)]
    with ThreadPoolExecutor(4) as pool:
        got = pool.map(lambda pair: tokenizer.encode(pair[1], allow_special=pair[0] % 2 == 0), enumerate(texts))
        assert list(got) == expected


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_checkpoint(tmp_path)


def test_broken_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(CheckpointError, match="is no tokenizer"):
        Tokenizer.from_checkpoint(tmp_path)


def test_other_kinds_of_vocabulary_are_refused() -> None:
    with pytest.raises(CheckpointError, match="only byte-level BPE"):
        Tokenizer(RawTokenizer(models.WordLevel({"a": 0}, unk_token="a")))


def test_added_token_that_swallows_spaces_is_refused() -> None:
    raw = RawTokenizer(models.BPE({"a": 0}, []))
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken("<|x|>", rstrip=True)])
    with pytest.raises(CheckpointError, match="rstrip"):
        Tokenizer(raw)


def test_vocabulary_whose_plain_text_makes_an_added_token_is_refused() -> None:
    raw = RawTokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken("ab")])
    with pytest.raises(CheckpointError, match="plain text can produce"):
        Tokenizer(raw)


def test_conflicting_ids_are_refused(tokenizer_directory: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_directory / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"3": {"content": "<|im_end|>"}}}')
    with pytest.raises(CheckpointError, match="the id 3"):
        Tokenizer.from_checkpoint(tmp_path)
