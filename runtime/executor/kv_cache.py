"""The paged KV cache: a span of addresses with memory behind the first part of it, cut into blocks.

Knows the layout of a block and how one layer sees it. Does not know who owns which block (the scheduler's block
manager does), nor what attention makes of a layer. A block holds every layer's keys and values, so that the span grows
and shrinks at one end. Nothing here reads or writes the whole span: most of it may have no memory behind it.

Block 0 is the null block: padding sequences read and write it, and no request ever owns it.
"""

import ctypes
import mmap
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from runtime.checkpoint import TextConfig

NULL_BLOCK = 0


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """Shape of one block: `[num_layers, 2, block_size, num_kv_heads, head_dim]` of `dtype`, keys before values."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_layers, 2, self.block_size, self.num_kv_heads, self.head_dim)

    @property
    def block_elements(self) -> int:
        return self.num_layers * 2 * self.block_size * self.num_kv_heads * self.head_dim

    @property
    def block_bytes(self) -> int:
        """Bytes that one block takes, all layers together."""
        return self.block_elements * self.dtype.itemsize


def kv_layout(config: TextConfig, dtype: torch.dtype, block_size: int) -> KVLayout:
    """The layout for a decoder: `block_size` tokens a block, elements of `dtype`."""
    return KVLayout(
        num_layers=config.num_hidden_layers,
        block_size=block_size,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        dtype=dtype,
    )


def block_bytes(config: TextConfig, dtype: torch.dtype, block_size: int) -> int:
    """Bytes of one block of `block_size` tokens: layers * 2 * block_size * KV heads * head width * element size."""
    return kv_layout(config, dtype, block_size).block_bytes


class KVBacking(Protocol):
    """Addresses that never move, and memory behind the first `backed_bytes` of them.

    `resize` gives memory to, or takes it from, the far end; what stays backed keeps its contents. A tensor over memory
    that was taken away must not be touched: the owner of the blocks sees to that.
    """

    @property
    def capacity_bytes(self) -> int:
        """Bytes of addresses: `resize` cannot go beyond."""
        ...

    @property
    def backed_bytes(self) -> int: ...

    def tensor(self) -> Tensor:
        """uint8 [capacity_bytes] over all the addresses, backed or not."""
        ...

    def resize(self, num_bytes: int) -> None: ...

    def resident_bytes(self) -> int:
        """Bytes of real memory that the span holds now."""
        ...


class AnonymousMapping:
    """The CPU's backing: an anonymous mapping, whose pages cost nothing until they are first written.

    Huge pages are declined, so that what is resident follows what was used to the page.
    """

    def __init__(self, capacity_bytes: int) -> None:
        """Maps `capacity_bytes` (at least one) of zeros; all of it counts as backed.

        Raises:
            OSError: the system gives no such span.
        """
        self._map = mmap.mmap(-1, capacity_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            self._map.madvise(mmap.MADV_NOHUGEPAGE)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._backed_bytes = capacity_bytes
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._page_flags = np.zeros(-(-capacity_bytes // mmap.PAGESIZE), dtype=np.uint8)

    @property
    def capacity_bytes(self) -> int:
        return self._bytes.numel()

    @property
    def backed_bytes(self) -> int:
        return self._backed_bytes

    def tensor(self) -> Tensor:
        return self._bytes

    def resize(self, num_bytes: int) -> None:
        """Gives the pages that lie wholly beyond `num_bytes` back to the system; they read as zeros afterwards."""
        assert 0 <= num_bytes <= self.capacity_bytes, (num_bytes, self.capacity_bytes)
        first_free = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if num_bytes < self._backed_bytes and first_free < self.capacity_bytes:
            self._map.madvise(mmap.MADV_DONTNEED, first_free, self.capacity_bytes - first_free)
        self._backed_bytes = num_bytes

    def resident_bytes(self) -> int:
        """Exact to the page, by mincore(2): 0.45 ms for each GiB of addresses, so for a snapshot, not for a step."""
        address = ctypes.c_void_p(self._bytes.data_ptr())
        flags = ctypes.c_void_p(self._page_flags.ctypes.data)
        if self._libc.mincore(address, ctypes.c_size_t(self.capacity_bytes), flags) != 0:
            raise OSError(ctypes.get_errno(), "mincore")
        return int(np.count_nonzero(self._page_flags & 1)) * mmap.PAGESIZE


class TensorBacking:
    """An ordinary tensor of the device: a backing whose size is what it was made with."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        # Zeros: a masked position contributes 0 times what is there, which must be a number.
        self._bytes = torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    @property
    def capacity_bytes(self) -> int:
        return self._bytes.numel()

    @property
    def backed_bytes(self) -> int:
        return self._bytes.numel()

    def tensor(self) -> Tensor:
        return self._bytes

    def resize(self, num_bytes: int) -> None:
        """Nothing moves: all of it has memory, whatever part is in use."""
        assert 0 <= num_bytes <= self.capacity_bytes, (num_bytes, self.capacity_bytes)

    def resident_bytes(self) -> int:
        return self._bytes.numel()


class KVCache:
    """Blocks `0 .. num_blocks` over a backing, and the strided views through which attention reads and writes them.

    The views span all the addresses, so that a graph may bake them before most blocks have memory.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, backing: KVBacking | None = None) -> None:
        """Lays `num_blocks` blocks, the null block included, over `backing` (default: a mapping of just that size).

        Raises:
            ValueError: there is not room for the null block and one more, or the backing is too small.
        """
        if num_blocks < 2:
            raise ValueError(f"the KV cache has {num_blocks} blocks; it needs 2 at least, one of them for padding")
        backing = backing or AnonymousMapping(num_blocks * layout.block_bytes)
        self.layout = layout
        self._backing = backing
        self._max_blocks = backing.capacity_bytes // layout.block_bytes
        self._num_blocks = 0
        elements = backing.tensor()[: self._max_blocks * layout.block_bytes].view(layout.dtype)
        blocks = elements.view(self._max_blocks, *layout.block_shape)
        self._layers = tuple(blocks[:, index] for index in range(layout.num_layers))
        self.resize(num_blocks)

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self.layout.block_size

    @property
    def num_blocks(self) -> int:
        """Blocks with memory behind them, the null block included."""
        return self._num_blocks

    @property
    def max_blocks(self) -> int:
        """Blocks that the addresses have room for."""
        return self._max_blocks

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks with memory behind them: what the plan counts."""
        return self._num_blocks * self.layout.block_bytes

    def layer(self, index: int) -> Tensor:
        """Layer `index`: a strided view [max_blocks, 2, block_size, num_kv_heads, head_dim]."""
        return self._layers[index]

    def resize(self, num_blocks: int) -> None:
        """Puts memory behind exactly `num_blocks` blocks. Blocks beyond lose their contents: no request may own one.

        Raises:
            ValueError: the addresses have no room for so many.
        """
        if not 1 <= num_blocks <= self._max_blocks:
            raise ValueError(
                f"the KV cache cannot have {num_blocks} blocks; its addresses hold 1 to {self._max_blocks}"
            )
        self._backing.resize(num_blocks * self.layout.block_bytes)
        self._num_blocks = num_blocks

    def resident_bytes(self) -> int:
        """Bytes of real memory that the blocks hold now (on a CPU, only pages that were written count)."""
        return self._backing.resident_bytes()
