"""The seams between the model and attention kernels: protocols and their data. Knows no scheduler and no requests.

Legend: T tokens of a step, B sequences, N blocks of a table, H heads, K KV heads, D head width, P patches, S segments.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class AttentionBucket:
    """A shape that a graph captures: `num_tokens` queries of at most `num_seqs` sequences, padding included. Where
    `is_mixed` is false each sequence has one query."""

    num_tokens: int
    num_seqs: int
    is_mixed: bool


@dataclass(frozen=True, kw_only=True)
class AttentionBatch:
    """One step's sequences, laid end to end: sequence b owns queries `query_start_loc[b]` .. `query_start_loc[b + 1]`,
    which are the last of its `seq_lens[b]` tokens. Slot of a token = block_id * block_size + offset in the block.

    Padding sequences have block tables of the null block 0: in a decode bucket each has one query and length 1; in a
    mixed one there is one, with the whole tail's queries. `block_tables_cpu` is the host's copy of the tables, valid
    until the next step is filled in; `bucket` says for which graph the step is, `None` for an eager one.
    """

    query_start_loc_cpu: NDArray[np.int32]  # [B + 1]
    seq_lens_cpu: NDArray[np.int32]  # [B]
    block_tables_BN: Tensor  # int32, on the device
    slot_mapping_T: Tensor  # int64, on the device
    block_tables_cpu: NDArray[np.int32] | None = None  # [B, N]
    bucket: AttentionBucket | None = None

    @property
    def is_decode(self) -> bool:
        """Every sequence has exactly one query."""
        return len(self.query_start_loc_cpu) - 1 == int(self.query_start_loc_cpu[-1])


class DecoderAttention(Protocol):
    """Causal attention of the decoder over cached keys and values.

    `plan` is called once a step, before the first layer; `forward` stores `k` and `v` and attends, once a layer.
    `anticipate` may be called once the step is on its way: host work for the step that most likely follows.
    """

    def plan(self, batch: AttentionBatch) -> None: ...

    def anticipate(self) -> None: ...

    def forward(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Attention output [T, H, D]; queries are scaled by D ** -0.5."""
        ...


@runtime_checkable
class PlacedAttention(Protocol):
    """Attention whose keys and values somebody else may store: `place`, then `attend`, is `forward`."""

    def place(self, layer: int) -> tuple[Tensor, Tensor]:
        """Where the planned step's keys and values of a layer belong: its view of the cache, as `KVLayers.layer` gives
        it, and the slot of each token, int64 [T]."""
        ...

    def attend(self, layer: int, q_THD: Tensor) -> Tensor:
        """Attention output [T, H, D]."""
        ...


class CacheAttention(DecoderAttention, Protocol):
    """Attention over the paged cache as a start puts it together."""

    @property
    def workspace_bytes(self) -> int:
        """Bytes on the device that are held from step to step, beside the cache: a row of the ledger."""
        ...

    def reserve(self, max_model_len: int) -> None:
        """Makes room for sequences of that many tokens, so that no step has to."""
        ...


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Neighbouring runs of patches that attend only within themselves. Empty segments (equal entries) are allowed.

    `cu_seqlens_S`: int32 [S + 1], ascending, from 0 to P. `max_seqlen`: no segment is longer.
    """

    cu_seqlens_S: Tensor
    max_seqlen: int


class EncoderAttention(Protocol):
    """Attention of the vision encoder within segments, without mask. `prepare` is called once a forward for each kind
    of segments; what it gives is handed to `forward` in each layer of that kind."""

    def prepare(self, segments: Segments) -> object: ...

    def forward(self, prepared: object, q_PHD: Tensor, k_PHD: Tensor, v_PHD: Tensor) -> Tensor:
        """Attention output [P, H, D]; queries are scaled by D ** -0.5."""
        ...


class KVLayers(Protocol):
    """A paged KV cache as attention sees it."""

    @property
    def block_size(self) -> int: ...

    def layer(self, index: int) -> torch.Tensor:
        """One layer's view [num_blocks, 2, block_size, K, D] (strided; dimension 1 is key, value)."""
        ...
