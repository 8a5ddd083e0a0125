"""A second try on an empty cache."""

import gc
import weakref

import pytest
import torch

from runtime.executor.arena import retry_on_empty_cache


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
