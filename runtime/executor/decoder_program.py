"""The decoder as the graph set captures it: a bucket's static inputs, its forward, and contents for the self-test.

Knows the decoder's interface and the step's buffers; knows no requests. Two kinds of bucket:

    decode   every sequence has one token and samples; the embedding of tokens is inside of the graph
    mixed    prefills too; embeddings, with image rows in their places, are an input, and so is which tokens sample

Host work of attention (`plan`) happens outside of a graph, before each capture and replay.

Legend: T tokens, D hidden width, S sequences that sample, V vocabulary, B sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from runtime.executor.batch import StepBuffers
from runtime.executor.graphs import Bucket, SelfTestFill
from runtime.executor.kv_cache import NULL_BLOCK
from runtime.model.attention import AttentionBatch, AttentionBucket, DecoderAttention


class Decoder(Protocol):
    """The text decoder of a model family, as the executor uses it."""

    def embed(self, token_ids_T: Tensor) -> Tensor:
        """Embeddings [T, D]."""
        ...

    def forward(
        self, embeds_TD: Tensor, positions_3T: Tensor, attention: DecoderAttention, rows_S: Tensor | None = None
    ) -> Tensor:
        """Hidden states after the last norm: [T, D], or [S, D] of the rows that are wanted."""
        ...

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """float32 [S, V]."""
        ...


@dataclass(frozen=True, kw_only=True)
class DecoderInputs:
    """Front parts of the step's buffers. Buckets share storage, so the graphs of a family pay for it once.

    `embeds_TD` is there in mixed buckets only.
    """

    token_ids_T: Tensor
    positions_3T: Tensor
    slot_mapping_T: Tensor
    block_tables_BM: Tensor
    logits_index_S: Tensor
    embeds_TD: Tensor | None

    def tensors(self) -> Sequence[Tensor]:
        plain = (
            self.token_ids_T,
            self.positions_3T,
            self.slot_mapping_T,
            self.block_tables_BM,
            self.logits_index_S,
        )
        return plain if self.embeds_TD is None else (*plain, self.embeds_TD)


class DecoderProgram:
    """What the decoder's `GraphSet` captures. Reads the step's buffers, writes to the null block in self-tests."""

    def __init__(
        self, decoder: Decoder, attention: DecoderAttention, buffers: StepBuffers, *, max_mixed_tokens: int
    ) -> None:
        """`max_mixed_tokens`: size of the largest mixed bucket, 0 if there is none."""
        self._decoder = decoder
        self._attention = attention
        self._buffers = buffers
        self._embeds_TD: Tensor | None = None
        if max_mixed_tokens:
            one_D = decoder.embed(buffers.token_ids_T.device[:1])
            self._embeds_TD = one_D.new_zeros((max_mixed_tokens, one_D.shape[-1]))

    def allocate(self, bucket: Bucket) -> DecoderInputs:
        inputs = self._inputs(bucket)
        self.fill_for_self_test(bucket, inputs, "small")
        return inputs

    def forward(self, bucket: Bucket, inputs: DecoderInputs) -> Tensor:
        """Logits [bucket.max_items, V] of a mixed bucket, [bucket.tokens, V] of a decode bucket."""
        if inputs.embeds_TD is None:
            embeds_TD = self._decoder.embed(inputs.token_ids_T)
            return self._decoder.logits(self._decoder.forward(embeds_TD, inputs.positions_3T, self._attention))
        hidden_TD = self._decoder.forward(inputs.embeds_TD, inputs.positions_3T, self._attention)
        return self._decoder.logits(hidden_TD.index_select(0, inputs.logits_index_S))

    def fill_for_self_test(self, bucket: Bucket, inputs: DecoderInputs, fill: SelfTestFill) -> None:
        """Sequences on the null block. Tokens that share a slot have equal keys and values in every layer, so that the
        order in which a device writes them does not matter: in a mixed bucket all tokens are the same one, in a decode
        bucket sequence i is token `i % block_size` of one and the same text."""
        buffers, block_size, num_tokens = self._buffers, self._buffers.block_size, bucket.tokens
        buffers.begin_fill()
        slots = np.arange(num_tokens) % block_size
        if bucket.is_mixed:
            lengths = [num_tokens] if fill == "large" or num_tokens == 1 else [1, num_tokens - 1]
            counts = np.array(lengths, dtype=np.int32)
            seq_lens, text = counts, np.full(num_tokens, 1 if fill == "small" else 2)
            positions = np.zeros(num_tokens, dtype=np.int64)
        else:
            if fill == "small":
                slots[1:] = 0
            counts = np.ones(num_tokens, dtype=np.int32)
            seq_lens, text, positions = (slots + 1).astype(np.int32), slots + 1, slots
        buffers.token_ids_T.host[:num_tokens] = text
        buffers.positions_3T.host[:, :num_tokens] = positions
        buffers.slot_mapping_T.host[:num_tokens] = NULL_BLOCK * block_size + slots
        buffers.block_tables_BM.host[: len(counts)] = NULL_BLOCK
        buffers.logits_index_S.host[:] = 0
        buffers.upload(num_tokens=num_tokens, num_seqs=len(counts))
        if inputs.embeds_TD is not None:
            inputs.embeds_TD.copy_(self._decoder.embed(inputs.token_ids_T))
        self._attention.plan(
            AttentionBatch(
                query_start_loc_cpu=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
                seq_lens_cpu=seq_lens,
                block_tables_BN=inputs.block_tables_BM[: len(counts)],
                slot_mapping_T=inputs.slot_mapping_T,
                block_tables_cpu=buffers.block_tables_BM.host[: len(counts)],
                bucket=attention_bucket(bucket),
            )
        )

    def _inputs(self, bucket: Bucket) -> DecoderInputs:
        buffers, tokens = self._buffers, bucket.tokens
        num_seqs = attention_bucket(bucket).num_seqs
        return DecoderInputs(
            token_ids_T=buffers.token_ids_T.device[:tokens],
            positions_3T=buffers.positions_3T.device[:, :tokens],
            slot_mapping_T=buffers.slot_mapping_T.device[:tokens],
            block_tables_BM=buffers.block_tables_BM.device[:num_seqs],
            logits_index_S=buffers.logits_index_S.device[: bucket.max_items],
            embeds_TD=self._embeds_TD[:tokens] if bucket.is_mixed and self._embeds_TD is not None else None,
        )


def attention_bucket(bucket: Bucket) -> AttentionBucket:
    """A bucket as attention knows it. A mixed one has one more sequence than items: the padding of its tail."""
    num_seqs = bucket.max_items + 1 if bucket.is_mixed else bucket.tokens
    return AttentionBucket(num_tokens=bucket.tokens, num_seqs=num_seqs, is_mixed=bucket.is_mixed)


def step_max_seqs(max_num_seqs: int, buckets: Sequence[Bucket]) -> int:
    """Sequences that the step's buffers need: real ones, or a bucket's, and the padding of a mixed tail."""
    return max([max_num_seqs, *(bucket.max_items for bucket in buckets)]) + 1
