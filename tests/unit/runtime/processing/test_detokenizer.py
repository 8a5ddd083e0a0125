"""Streamed text, joined, is the decoded text cut before the first stop string, however the tokens came."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from runtime.processing.detokenizer import Detokenizer
from runtime.processing.tokenizer import Tokenizer


def cut(text: str, stop: list[str]) -> tuple[str, str | None]:
    """The plain twin: look at each end in turn."""
    for end in range(1, len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def stream(tokenizer: Tokenizer, ids: list[int], sizes: list[int], stop: list[str]) -> tuple[list[str], Detokenizer]:
    detokenizer = Detokenizer(tokenizer, stop)
    parts, i = [], 0
    for size in [*sizes, len(ids)]:
        parts.append(detokenizer.push(ids[i : i + size]))
        i += size
    parts.append(detokenizer.finish())
    return parts, detokenizer


@given(
    ids=st.lists(st.integers(0, 520), max_size=40),
    sizes=st.lists(st.integers(0, 4), max_size=20),
)
@example(ids=[], sizes=[])
def test_any_tokens_stream_to_their_decoded_text(tokenizer: Tokenizer, ids: list[int], sizes: list[int]) -> None:
    parts, detokenizer = stream(tokenizer, ids, sizes, [])
    assert "".join(parts) == tokenizer.decode(ids)
    assert detokenizer.num_tokens == len(ids)


@given(
    text=st.text(alphabet="abcé🦊 ", max_size=60),
    sizes=st.lists(st.integers(0, 3), max_size=30),
    stop=st.lists(st.text(alphabet="abcé🦊 ", min_size=1, max_size=4), max_size=4),
)
@example(text="abcd", sizes=[1, 1, 1, 1], stop=["abce", "bc"])
@example(text="aab", sizes=[1, 1, 1], stop=["ab"])
@example(text="abc", sizes=[3], stop=["c", "bc"])
def test_text_is_cut_before_the_first_stop(tokenizer: Tokenizer, text: str, sizes: list[int], stop: list[str]) -> None:
    ids = tokenizer.encode(text, allow_special=False)
    parts, detokenizer = stream(tokenizer, ids, sizes, stop)
    assert ("".join(parts), detokenizer.stopped) == cut(text, stop)


def test_stop_across_tokens_is_never_shown(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.encode(character, allow_special=False)[0] for character in "say STOP now"]
    detokenizer = Detokenizer(tokenizer, ["STOP"])
    shown = [detokenizer.push([token_id]) for token_id in ids]
    assert "".join(shown) == "say "
    assert detokenizer.stopped == "STOP"
    assert detokenizer.num_tokens == len("say STOP")
    assert detokenizer.finish() == ""


def test_tokens_after_the_stop_within_one_push_do_not_count(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.encode(character, allow_special=False)[0] for character in "a.bcd"]
    detokenizer = Detokenizer(tokenizer, ["."])
    assert detokenizer.push(ids) == "a"
    assert detokenizer.num_tokens == 2


def test_beginning_of_a_stop_is_held_back_and_then_shown(tokenizer: Tokenizer) -> None:
    a, b, c = (tokenizer.encode(character, allow_special=False)[0] for character in "abc")
    detokenizer = Detokenizer(tokenizer, ["abb"])
    assert detokenizer.push([c, a]) == "c"
    assert detokenizer.push([b]) == ""
    assert detokenizer.push([a]) == "ab"
    assert detokenizer.finish() == "a"


def test_characters_are_shown_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🦊", allow_special=False)
    assert len(ids) > 1
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([token_id]) for token_id in ids] == [""] * (len(ids) - 1) + ["🦊"]


def test_incomplete_character_at_the_end_becomes_the_replacement_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🦊", allow_special=False)[:-1]
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(ids) + detokenizer.finish() == tokenizer.decode(ids) == "a\ufffd"


def test_special_tokens_show_nothing_even_inside_a_stop(tokenizer: Tokenizer) -> None:
    end = tokenizer.added_ids["<|im_end|>"]
    a, b = (tokenizer.encode(character, allow_special=False)[0] for character in "ab")
    detokenizer = Detokenizer(tokenizer, ["ab"])
    assert detokenizer.push([b, a, end, b]) == "b"
    assert detokenizer.stopped == "ab"


def test_long_repetitive_stop_and_text_stay_right(tokenizer: Tokenizer) -> None:
    a, b = (tokenizer.encode(character, allow_special=False)[0] for character in "ab")
    detokenizer = Detokenizer(tokenizer, ["a" * 500 + "b"])
    shown = "".join(detokenizer.push([a]) for _ in range(2000)) + detokenizer.push([b])
    assert shown == "a" * 1500
    assert detokenizer.stopped is not None


def test_empty_stop_is_an_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="empty"):
        Detokenizer(tokenizer, ["x", ""])
