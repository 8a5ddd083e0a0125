"""Owns the numbers of the KV blocks: who uses which, which are free, which hold a reusable prefix. Holds no KV itself.

Every block but block 0 (the null block, which padding writes to) is in exactly one of three places:

    used   (ref_count > 0)  in the block table of one request, or of several that share a prefix
    cached (ref_count 0)    nobody uses it, but its content has a name: it may be hit again, or evicted, oldest first
    free   (ref_count 0)    its content has no name
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


class BlockManager:
    """Hands out blocks, shares those with equal content, takes them back.

    Args:
        num_blocks: of the KV cache, the null block among them.
        block_size: tokens in a block.
        enable_prefix_caching: without it no block is ever named, and so none is shared.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}; it must be at least 2 (block 0 is for padding)")
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; it must be at least 1")
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._ref_counts = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_usable(self) -> int:
        """Blocks that requests may have: all but the null block."""
        return len(self._ref_counts) - 1

    @property
    def num_available(self) -> int:
        """Blocks that nobody uses, those with reusable content among them."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_usable - self.num_available

    def num_for(self, num_tokens: int) -> int:
        """How many blocks `num_tokens` tokens take."""
        return -(-num_tokens // self.block_size)

    def find_prefix(self, hashes: Sequence[bytes], max_tokens: int) -> tuple[int, ...]:
        """The longest run of whole blocks, at most `max_tokens` tokens, whose content is here. Takes nothing."""
        found: list[int] = []
        for block_hash in hashes[: max_tokens // self.block_size]:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return tuple(found)

    def can_take(self, prefix: Sequence[int], num_new: int) -> bool:
        """Whether `share(prefix)` leaves `num_new` blocks to `allocate`."""
        available = self.num_available
        if num_new > available:
            return False
        return num_new + sum(self._ref_counts[block_id] == 0 for block_id in prefix) <= available

    def share(self, prefix: Iterable[int]) -> None:
        """Adds a user to each block that `find_prefix` found."""
        for block_id in prefix:
            if self._ref_counts[block_id] == 0:
                del self._cached[block_id]
            self._ref_counts[block_id] += 1

    def allocate(self, num_new: int) -> tuple[int, ...]:
        """`num_new` blocks with one user each. Nameless ones go first, then the named ones that waited longest."""
        assert num_new <= self.num_available, (num_new, self.num_available)
        taken: list[int] = []
        for _ in range(num_new):
            if self._free:
                block_id = self._free.pop()
            else:
                block_id, _ = self._cached.popitem(last=False)
                self._forget(block_id)
            self._ref_counts[block_id] = 1
            taken.append(block_id)
        return tuple(taken)

    def name(self, block_id: int, block_hash: bytes) -> None:
        """Says that the used block's content is computed, and what it is. The first block of a name keeps it."""
        assert self._ref_counts[block_id] > 0, block_id
        if self.enable_prefix_caching and self._hash_of[block_id] is None and block_hash not in self._block_of:
            self._hash_of[block_id] = block_hash
            self._block_of[block_hash] = block_id

    def release(self, block_table: Sequence[int]) -> None:
        """Takes one user off each block. The table's end becomes the first to be evicted: a prefix without its
        beginning is of no use, one without its end is."""
        for block_id in reversed(block_table):
            self._ref_counts[block_id] -= 1
            assert self._ref_counts[block_id] >= 0, block_id
            if self._ref_counts[block_id] == 0:
                if self._hash_of[block_id] is None:
                    self._free.append(block_id)
                else:
                    self._cached[block_id] = None

    def check_integrity(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Asserts that every block is in one place, and that users and tables agree.

        Args:
            block_tables: those of all requests that hold blocks.
        """
        users: Counter[int] = Counter()
        for table in block_tables:
            assert len(set(table)) == len(table), f"a block stands twice in {table}"
            users.update(table)
        assert 0 not in users, "the null block was handed out"
        assert self._ref_counts == [users[block_id] for block_id in range(len(self._ref_counts))]
        places = [*self._free, *self._cached, *users]
        assert sorted(places) == list(range(1, len(self._ref_counts))), "a block is lost, or in two places"
        assert all(self._hash_of[block_id] is None for block_id in self._free)
        assert all(self._hash_of[block_id] is not None for block_id in self._cached)
        assert all(self._hash_of[block_id] is not None for block_id, count in users.items() if count > 1)
        named = {block_hash: block_id for block_id, block_hash in enumerate(self._hash_of) if block_hash is not None}
        assert named == self._block_of

    def _forget(self, block_id: int) -> None:
        block_hash = self._hash_of[block_id]
        assert block_hash is not None
        del self._block_of[block_hash]
        self._hash_of[block_id] = None
