import pytest

from runtime.request import ImageInput
from runtime.scheduler.block_hash import extend_hashes
from tests.unit.runtime.scheduler.builders import picture

TOKENS = [9] * 12


def hashes(
    tokens: list[int] = TOKENS, images: tuple[ImageInput, ...] = (), salt: str = "", block_size: int = 4
) -> list[bytes]:
    result: list[bytes] = []
    extend_hashes(result, tokens, images, block_size=block_size, cache_salt=salt)
    return result


def test_only_full_blocks_have_a_hash() -> None:
    assert len(hashes([1] * 11)) == 2
    assert len(hashes([1] * 3)) == 0


def test_equal_tokens_in_a_later_block_have_another_hash() -> None:
    assert len(set(hashes())) == 3


def test_a_changed_token_changes_its_block_and_all_after() -> None:
    before, after = hashes(list(range(12))), hashes([0, 1, 2, 3, 4, 99, 6, 7, 8, 9, 10, 11])
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, False]


def test_extending_in_pieces_equals_at_once() -> None:
    images = (picture("a", 1, 2), picture("b", 6, 5), picture("c", 13, 1))
    tokens = list(range(20))
    pieces: list[bytes] = []
    for end in range(1, 21):
        extend_hashes(pieces, tokens[:end], images, block_size=4, cache_salt="s")
    assert pieces == hashes(tokens, images, "s")


def test_another_picture_changes_the_blocks_from_its_first_on() -> None:
    one, other = hashes(images=(picture("cat", 5, 2),)), hashes(images=(picture("dog", 5, 2),))
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, False, False]


@pytest.mark.parametrize(("first", "second"), [((5, 2), (4, 2)), ((2, 6), (3, 5))])
def test_the_same_picture_elsewhere_changes_the_hash(first: tuple[int, int], second: tuple[int, int]) -> None:
    assert hashes(images=(picture("cat", *first),))[-1] != hashes(images=(picture("cat", *second),))[-1]


def test_a_picture_that_runs_through_a_block_counts_in_each() -> None:
    text, image = hashes(), hashes(images=(picture("cat", 0, 12),))
    assert not set(text) & set(image)
    # The second block alone: the same parent cannot be had, so compare the place of two pictures that differ there.
    assert hashes(images=(picture("cat", 0, 4), picture("dog", 4, 4)))[1] != image[1]


def test_two_pictures_in_one_block_are_told_from_one() -> None:
    one = hashes(images=(picture("a", 0, 1),))
    two = hashes(images=(picture("a", 0, 1), picture("b", 1, 1)))
    swapped = hashes(images=(picture("b", 0, 1), picture("a", 1, 1)))
    assert len({one[0], two[0], swapped[0]}) == 3


def test_the_salt_parts_all_blocks() -> None:
    assert not set(hashes(salt="a")) & set(hashes(salt="b"))
