"""A second try on an empty cache, and the piece of memory that is had again for it."""

import gc
import weakref

import pytest
import torch

from runtime.executor.arena import keep_arena, retry_on_empty_cache


def test_what_failed_is_gone_when_it_is_tried_again() -> None:
    seen: list[weakref.ref[torch.Tensor]] = []

    def run() -> str:
        if seen:
            assert seen[0]() is None
            return "done"
        hidden = torch.ones(3)
        seen.append(weakref.ref(hidden))
        raise torch.OutOfMemoryError("injected")

    assert retry_on_empty_cache(run) == "done"


def test_a_second_failure_is_an_error() -> None:
    calls = []

    def run() -> None:
        calls.append(1)
        raise torch.OutOfMemoryError("injected")

    with pytest.raises(torch.OutOfMemoryError, match="injected"):
        retry_on_empty_cache(run)
    assert len(calls) == 2


def test_other_errors_are_not_tried_again() -> None:
    calls = []

    def run() -> None:
        calls.append(1)
        raise ValueError("injected")

    with pytest.raises(ValueError, match="injected"):
        retry_on_empty_cache(run)
    assert len(calls) == 1
    gc.collect()


@pytest.mark.parametrize(("num_bytes", "expected"), [(100, [100, "emptied", 100]), (0, ["emptied"])])
def test_the_piece_is_had_again_once_the_cache_is_empty(
    monkeypatch: pytest.MonkeyPatch, num_bytes: int, expected: list[int | str]
) -> None:
    journal: list[int | str] = []
    errors = [torch.OutOfMemoryError("injected")]

    def run() -> None:
        if errors:
            raise errors.pop()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: journal.append("emptied"))
    monkeypatch.setattr(torch, "empty", lambda size, **_: journal.append(size))
    keep_arena(num_bytes, torch.device("cpu"))
    try:
        retry_on_empty_cache(run)
    finally:
        keep_arena(0, torch.device("cpu"))
    assert journal == expected
