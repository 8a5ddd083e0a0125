"""A step's sequences as FlashInfer's paged kernels want them, and how much workspace they take. Arithmetic only.

Knows FlashInfer's layout of indices and how it cuts work (its `scheduler.cuh`, version 0.6.12); imports nothing of it.

    kv_indptr   0     2     5  6        sequence b reads pages `indices[kv_indptr[b]] .. indices[kv_indptr[b + 1]]`
    indices     p0 p1 p2 p3 p4 p5       and of the last one only `last_page_len[b]` tokens
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from runtime.model.attention import AttentionBatch, AttentionBucket

Kernel = Literal["fa2", "fa3"]

MIB = 1 << 20

# What FlashInfer's own wrappers allocate each; ours share one. A plan uses kilobytes of it.
INT_WORKSPACE_BYTES = 8 * MIB

# Each part of the indices begins at a multiple of this many entries: 256 bytes, as an allocation of its own would.
_ALIGNMENT = 64


@dataclass(frozen=True, kw_only=True)
class IndexLayout:
    """Where the index arrays of a step lie within one array, so that one copy brings them to the device.

    Offsets do not depend on a step's size: graphs bake the addresses.
    """

    max_seqs: int
    max_pages: int

    @property
    def kv_start(self) -> int:
        return _aligned(self.max_seqs + 1)

    @property
    def last_page_start(self) -> int:
        return 2 * self.kv_start

    @property
    def indices_start(self) -> int:
        return 2 * self.kv_start + _aligned(self.max_seqs)

    @property
    def size(self) -> int:
        """Entries in all."""
        return self.indices_start + self.max_pages


@dataclass(frozen=True, kw_only=True)
class PagePlan:
    """One step's index arrays, padded by empty sequences to what the wrapper was made for. All int32."""

    qo_indptr: NDArray[np.int32]  # [B + 1]
    kv_indptr: NDArray[np.int32]  # [B + 1]
    kv_lens: NDArray[np.int32]  # [B]

    @property
    def num_rows(self) -> int:
        """Queries in all."""
        return int(self.qo_indptr[-1])

    @property
    def num_pages(self) -> int:
        return int(self.kv_indptr[-1])

    def schedule_key(self, kernel: Kernel) -> bytes:
        """What the kernel's schedule depends on: `fa2` cuts work by pages, `fa3` by tokens."""
        lens = self.kv_lens.tobytes() if kernel == "fa3" else b""
        return self.qo_indptr.tobytes() + self.kv_indptr.tobytes() + lens


def page_plan(
    query_start_loc: NDArray[np.int32], seq_lens: NDArray[np.int32], *, block_size: int, num_seqs: int | None = None
) -> PagePlan:
    """The plan of sequences with `seq_lens` tokens each, filled up to `num_seqs` (default: as many as there are)."""
    count = len(seq_lens)
    size = count if num_seqs is None else num_seqs
    assert count <= size, f"{count} sequences, made for {size}"
    qo_indptr = np.full(size + 1, query_start_loc[-1], np.int32)
    qo_indptr[: count + 1] = query_start_loc
    kv_lens = np.zeros(size, np.int32)
    kv_lens[:count] = seq_lens
    kv_indptr = np.zeros(size + 1, np.int32)
    np.cumsum(-(-kv_lens // block_size), out=kv_indptr[1:])
    return PagePlan(qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_lens=kv_lens)


def write_indices(
    target: NDArray[np.int32], layout: IndexLayout, plan: PagePlan, batch: AttentionBatch, *, block_size: int
) -> int:
    """Writes a step's index arrays into `target`; returns how many entries from its start are to be copied."""
    tables = batch.block_tables_cpu
    assert tables is not None, "paged kernels read block tables on the host"
    size, count = len(plan.kv_lens), len(batch.seq_lens_cpu)
    target[: size + 1] = plan.qo_indptr
    target[layout.kv_start : layout.kv_start + size + 1] = plan.kv_indptr
    target[layout.last_page_start : layout.last_page_start + size] = (plan.kv_lens - 1) % block_size + 1
    num_pages_B = np.diff(plan.kv_indptr[: count + 1])
    width = int(num_pages_B.max(initial=0))
    is_read_BN = np.arange(width) < num_pages_B[:, None]
    end = layout.indices_start + plan.num_pages
    target[layout.indices_start : end] = tables[:, :width][is_read_BN]
    return end


def float_workspace_bytes(
    buckets: Sequence[AttentionBucket],
    *,
    kernel: Kernel,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_multiprocessors: int,
) -> int:
    """Bytes of the float workspace that all wrappers share: partial outputs of sequences cut along their keys.

    `fa3` cuts none and needs none. `fa2` takes `padded tiles * heads * rows of a tile * (head_dim + 1)` floats. Eager,
    it cuts only while the tiles stay within two for each multiprocessor; in a graph the tiles are padded to the most
    that the bucket can have. Decode buckets always run `fa2`.
    """
    groups = num_heads // num_kv_heads
    max_split_tiles = max(1, 2 * num_multiprocessors // num_kv_heads)

    def tile_bytes(num_tiles: int, tile: int) -> int:
        return num_heads * num_tiles * tile * (head_dim + 1) * 4

    sizes = [tile_bytes(max_split_tiles, 128)]
    for bucket in buckets:
        if kernel == "fa3" and bucket.is_mixed:
            continue
        longest = (bucket.num_tokens - bucket.num_seqs + 1) * groups
        tile = query_tile(longest if longest > 0 else bucket.num_tokens * groups, head_dim)
        num_tiles = -(-bucket.num_tokens * groups // tile) + bucket.num_seqs - 1
        sizes.append(tile_bytes(max(max_split_tiles, num_tiles), tile))
    # Alignment, and a little room, so that the next patch release does not overflow it.
    return -(-max(sizes) // MIB) * MIB + MIB


def query_tile(num_packed_queries: int, head_dim: int) -> int:
    """Rows of a tile that FlashInfer's `fa2` takes for so many queries, those of one KV head's group counted apart."""
    if num_packed_queries > 64 and head_dim < 256:
        return 128
    return 64 if num_packed_queries > 16 else 16


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
