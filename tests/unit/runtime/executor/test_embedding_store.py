"""The embedding store gives back what was put, and never loses a row."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.executor.embedding_store import EmbeddingStore, EmbeddingStoreFullError, MissingEmbeddingError


def make_store(capacity: int = 10) -> EmbeddingStore:
    return EmbeddingStore(capacity_tokens=capacity, hidden=3, dtype=torch.float32, device=torch.device("cpu"))


def rows_of(value: float, count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32).unsqueeze(1).repeat(1, 3) + 100 * value


def test_rows_come_back_whole_and_in_parts() -> None:
    store = make_store()
    store.put(b"a", rows_of(1, 4))
    store.put(b"b", rows_of(2, 5))
    assert torch.equal(store.rows(b"a", 0, 4), rows_of(1, 4))
    assert torch.equal(store.rows(b"b", 1, 3), rows_of(2, 5)[1:3])
    assert store.rows(b"b", 2, 2).shape == (0, 3)
    assert store.num_free_tokens == 1
    assert len(store) == 2


def test_missing_image_is_a_typed_error() -> None:
    store = make_store()
    store.put(b"a", rows_of(1, 4))
    store.drop(b"a")
    with pytest.raises(MissingEmbeddingError):
        store.rows(b"a", 0, 1)
    assert b"a" not in store


def test_full_store_refuses_and_stays_as_it_was() -> None:
    store = make_store()
    store.put(b"a", rows_of(1, 8))
    with pytest.raises(EmbeddingStoreFullError, match="3 rows, but 2 of 10"):
        store.put(b"b", rows_of(2, 3))
    assert torch.equal(store.rows(b"a", 0, 8), rows_of(1, 8))
    store.check_integrity()


def test_rows_freed_apart_serve_one_image() -> None:
    store = make_store()
    for name in (b"a", b"b", b"c", b"d", b"e"):
        store.put(name, rows_of(name[0], 2))
    store.drop(b"a")
    store.drop(b"c")
    store.drop(b"e")
    store.put(b"f", rows_of(7, 6))
    assert torch.equal(store.rows(b"f", 0, 6), rows_of(7, 6))
    assert torch.equal(store.rows(b"d", 0, 2), rows_of(b"d"[0], 2))


def test_putting_twice_takes_rows_once() -> None:
    store = make_store()
    store.put(b"a", rows_of(1, 4))
    store.put(b"a", rows_of(1, 4))
    assert store.num_free_tokens == 6
    store.drop(b"a")
    store.drop(b"a")
    assert store.num_free_tokens == 10


def test_keep_only_drops_the_others() -> None:
    store = make_store()
    for name in (b"a", b"b", b"c"):
        store.put(name, rows_of(1, 2))
    store.keep_only({b"b", b"x"})
    assert b"b" in store
    assert len(store) == 1


def test_rows_are_kept_in_the_stores_dtype() -> None:
    store = EmbeddingStore(capacity_tokens=4, hidden=3, dtype=torch.bfloat16, device=torch.device("cpu"))
    store.put(b"a", rows_of(1, 2))
    assert store.rows(b"a", 0, 2).dtype == torch.bfloat16
    assert store.num_bytes == 4 * 3 * 2


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12)), max_size=60))
def test_no_row_is_lost_or_lent_twice(actions: list[tuple[int, int]]) -> None:
    store = make_store(24)
    held: dict[bytes, torch.Tensor] = {}
    for name, count in actions:
        image_hash = bytes([name])
        if image_hash in held:
            store.drop(image_hash)
            del held[image_hash]
        elif count <= store.num_free_tokens:
            held[image_hash] = rows_of(name, count)
            store.put(image_hash, held[image_hash])
        store.check_integrity()
        for other, rows in held.items():
            assert torch.equal(store.rows(other, 0, len(rows)), rows)
