import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runtime.scheduler.block_manager import BlockManager


def name(number: int) -> bytes:
    return bytes([number])


def test_the_null_block_is_never_handed_out() -> None:
    blocks = BlockManager(5, 4)
    assert sorted(blocks.allocate(4)) == [1, 2, 3, 4]
    assert blocks.num_available == 0


@pytest.mark.parametrize("num_blocks", [0, 1])
def test_a_cache_without_usable_blocks_is_refused(num_blocks: int) -> None:
    with pytest.raises(ValueError, match="num_blocks"):
        BlockManager(num_blocks, 4)


def test_a_released_named_block_is_found_again() -> None:
    blocks = BlockManager(5, 4)
    table = blocks.allocate(2)
    blocks.name(table[0], name(1))
    blocks.name(table[1], name(2))
    blocks.release(table)
    assert blocks.find_prefix([name(1), name(2), name(3)], 12) == table
    assert blocks.find_prefix([name(3), name(1)], 12) == ()


def test_a_prefix_ends_within_the_given_tokens() -> None:
    blocks = BlockManager(5, 4)
    table = blocks.allocate(2)
    blocks.name(table[0], name(1))
    blocks.name(table[1], name(2))
    assert blocks.find_prefix([name(1), name(2)], 7) == table[:1]


def test_a_shared_block_is_free_when_its_last_user_lets_go() -> None:
    blocks = BlockManager(3, 4)
    table = blocks.allocate(1)
    blocks.name(table[0], name(1))
    blocks.share(table)
    blocks.release(table)
    assert blocks.num_used == 1
    blocks.release(table)
    assert blocks.num_used == 0


def test_nameless_blocks_are_taken_before_named_ones_are_evicted() -> None:
    blocks = BlockManager(4, 4)
    named, nameless = blocks.allocate(1), blocks.allocate(1)
    blocks.name(named[0], name(1))
    blocks.release(named)
    blocks.release(nameless)
    blocks.allocate(2)
    assert blocks.find_prefix([name(1)], 4) == named
    blocks.allocate(1)
    assert blocks.find_prefix([name(1)], 4) == ()


def test_the_longest_unused_block_is_evicted_first_and_a_tables_end_before_its_beginning() -> None:
    blocks = BlockManager(4, 4)
    old, young = blocks.allocate(2), blocks.allocate(1)
    for number, block_id in enumerate((*old, *young)):
        blocks.name(block_id, name(number))
    blocks.release(old)
    blocks.release(young)
    blocks.share(old[:1])
    blocks.release(old[:1])
    assert blocks.allocate(3) == (old[1], young[0], old[0])


def test_the_first_block_of_a_name_keeps_it() -> None:
    blocks = BlockManager(4, 4)
    first, second = blocks.allocate(1), blocks.allocate(1)
    blocks.name(first[0], name(1))
    blocks.name(second[0], name(1))
    assert blocks.find_prefix([name(1)], 4) == first
    blocks.release(first)
    blocks.release(second)
    blocks.check_integrity([])


def test_unused_blocks_of_the_prefix_are_not_counted_as_new_ones_too() -> None:
    blocks = BlockManager(4, 4)
    table = blocks.allocate(2)
    for number, block_id in enumerate(table):
        blocks.name(block_id, name(number))
    blocks.release(table)
    assert blocks.can_take(table, 1)
    assert not blocks.can_take(table, 2)
    blocks.share(table)
    assert blocks.can_take(table, 1)


def test_without_prefix_caching_nothing_is_found() -> None:
    blocks = BlockManager(4, 4, enable_prefix_caching=False)
    table = blocks.allocate(1)
    blocks.name(table[0], name(1))
    assert blocks.find_prefix([name(1)], 4) == ()


def test_integrity_notices_a_lost_block() -> None:
    blocks = BlockManager(4, 4)
    blocks.allocate(1)
    with pytest.raises(AssertionError):
        blocks.check_integrity([])


class BlockMachine(RuleBasedStateMachine):
    """Random tables over few names: whatever is done, each block is in one place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(9, 2)
        self.tables: list[tuple[int, ...]] = []

    @rule(names=st.lists(st.integers(0, 5), max_size=4), num_new=st.integers(0, 4))
    def take(self, names: list[int], num_new: int) -> None:
        prefix = self.blocks.find_prefix([name(n) for n in dict.fromkeys(names)], 8)
        if self.blocks.can_take(prefix, num_new):
            self.blocks.share(prefix)
            self.tables.append(prefix + self.blocks.allocate(num_new))

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), number=st.integers(0, 5))
    def give_a_name(self, data: st.DataObject, number: int) -> None:
        block_id = data.draw(st.sampled_from([block_id for table in self.tables for block_id in table]))
        self.blocks.name(block_id, name(number))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        self.blocks.release(self.tables.pop(index))

    @invariant()
    def is_sound(self) -> None:
        self.blocks.check_integrity(self.tables)

    def teardown(self) -> None:
        for table in self.tables:
            self.blocks.release(table)
        assert self.blocks.num_used == 0
        assert len(self.blocks.allocate(8)) == 8


TestBlockMachine = BlockMachine.TestCase
TestBlockMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
