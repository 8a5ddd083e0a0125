"""The text decoder of Qwen2.5-VL: token rows to hidden rows to logits (arXiv:2502.13923; positions: arXiv:2409.12191).

Knows no cache and no requests: attention over cached tokens is behind `DecoderAttention`, and a step's tokens lie end
to end without a batch dimension.

Legend: T tokens of a step, S rows to sample, D hidden, V vocabulary, H heads, K KV heads, E head width.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol, TypeAlias, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.checkpoint import TextConfig
from runtime.model.attention import DecoderAttention
from runtime.model.compiled import compiled
from runtime.model.layers import (
    Linear,
    Place,
    SwiGLU,
    WeightTarget,
    WeightTargets,
    apply_rotary,
    inverse_frequencies,
    matrix,
    rms_norm,
    rotary_tables,
)
from runtime.model.packed import PackedWeight

QueryKeyValue: TypeAlias = tuple[Tensor, Tensor, Tensor]  # [T, H, E], [T, K, E], [T, K, E]
Between: TypeAlias = Callable[
    ["DecoderLayer", "DecoderLayer", Tensor, Tensor, Tensor, Tensor], tuple[Tensor, QueryKeyValue]
]


class LayerKernels(Protocol):
    """Kernels that stand in for the layers."""

    def warm_up(self, layer: "DecoderLayer") -> None:
        """Compiles and loads everything, by running it: a step must not."""
        ...

    def forward(
        self,
        layers: Sequence["DecoderLayer"],
        hidden_TD: Tensor,
        cos: Tensor,
        sin: Tensor,
        attention: DecoderAttention,
        rows_S: Tensor | None = None,
    ) -> Tensor:
        """Rows [T, D] after the last layer, or [S, D] of `rows_S`."""
        ...


class TextDecoder(nn.Module):
    """Embedding, layers, last norm and head. With tied embeddings the head is the embedding's table."""

    frequency_axes: Tensor
    inverse_frequencies: Tensor

    def __init__(self, config: TextConfig, **place: Unpack[Place]) -> None:
        super().__init__()
        self.config = config
        device = place["device"]
        self.embedding_VD = matrix(config.vocab_size, config.hidden_size, **place)
        self.layers = tuple(DecoderLayer(config, index, **place) for index in range(config.num_hidden_layers))
        self.registered_layers = nn.ModuleList(self.layers)
        self.norm = rms_norm(config.hidden_size, eps=config.rms_norm_eps, **place)
        self.head_VD = (
            self.embedding_VD if config.tie_word_embeddings else matrix(config.vocab_size, config.hidden_size, **place)
        )
        # Axis (time, height, width) that turns each frequency: mrope_section says how many in a row.
        axes = torch.arange(3).repeat_interleave(torch.tensor(config.mrope_section))
        frequencies = inverse_frequencies(config.head_dim, config.rope_theta, device=device)
        self.register_buffer("frequency_axes", axes.to(device), persistent=False)
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)
        self.between: Between = between
        # None: the layers' own.
        self.one_row_kernels: LayerKernels | None = None
        self.any_rows_kernels: LayerKernels | None = None
        self.packed_head: PackedWeight | None = None

    def compile_layers(self) -> None:
        """Runs what lies between two attentions through Inductor from now on: one function for every layer."""
        self.between = compiled(between)

    def use_kernels(self, *, row: LayerKernels | None, rows: LayerKernels | None) -> None:
        """Runs steps of one row through `row` from now on, and those of more, or all, through `rows`."""
        for kernels in (row, rows):
            if kernels is not None:
                kernels.warm_up(self.layers[0])
        self.one_row_kernels, self.any_rows_kernels = row or rows, rows

    @property
    def product_bytes(self) -> int:
        """Bytes of the weights of all products."""
        linears = [module for module in self.modules() if isinstance(module, Linear)]
        return self.head_VD.nbytes + sum(linear.weight.nbytes for linear in linears)

    def pack_products(self) -> None:
        """Packs the weights of all products, and keeps them as they are too; see `Linear.pack`."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack(keep=True)
        self.packed_head = PackedWeight(self.head_VD, has_bias=False)

    def embed(self, token_ids_T: Tensor) -> Tensor:
        """Rows [T, D] of tokens [T]."""
        return self.embedding_VD.index_select(0, token_ids_T)

    def forward(
        self,
        embeds_TD: Tensor,
        positions_3T: Tensor,
        attention: DecoderAttention,
        rows_S: Tensor | None = None,
    ) -> Tensor:
        """Hidden rows [T, D] after the last norm, or [S, D] of `rows_S`. `attention.plan` was called for this step.

        Args:
            embeds_TD: rows of tokens, those of images replaced by the encoder's.
            positions_3T: positions along time, height and width; equal for text.
            rows_S: the rows that are wanted, at least one; the last layer is spared its MLP for the others.
        """
        # Tokens first, so that a token's table lies in one piece.
        angles = positions_3T.t().float().index_select(1, self.frequency_axes) * self.inverse_frequencies
        cos, sin = rotary_tables(angles.unsqueeze(1))
        hidden_TD = embeds_TD
        kernels = self.one_row_kernels if len(embeds_TD) == 1 else self.any_rows_kernels
        if kernels is not None:
            return self.norm.forward(kernels.forward(self.layers, hidden_TD, cos, sin, attention, rows_S))
        qkv = self.layers[0].before(hidden_TD, cos, sin)
        for layer, following in pairwise(self.layers):
            attended_THE = attention.forward(layer.index, *qkv)
            hidden_TD, qkv = self.between(layer, following, hidden_TD, attended_THE, cos, sin)
        last = self.layers[-1]
        attended_THE = attention.forward(last.index, *qkv)
        return self.norm.forward(last.after(wanted_rows(hidden_TD, rows_S), wanted_rows(attended_THE, rows_S)))

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """Float32 [S, V] of rows that `forward` gave."""
        if self.packed_head is not None and len(hidden_SD) > 1:
            return self.packed_head.product(hidden_SD, None)
        return F.linear(hidden_SD, self.head_VD).float()

    def targets(self) -> WeightTargets:
        """Where a checkpoint's tensors go, by published name."""
        targets = {"model.embed_tokens.weight": WeightTarget.into(self.embedding_VD.data)}
        for index, layer in enumerate(self.layers):
            targets |= layer.targets(f"model.layers.{index}")
        targets |= self.norm.targets("model.norm")
        if not self.config.tie_word_embeddings:
            targets["lm_head.weight"] = WeightTarget.into(self.head_VD.data)
        return targets


def wanted_rows(x: Tensor, rows_S: Tensor | None) -> Tensor:
    """Those rows of `x`; `None`: all."""
    return x if rows_S is None else x.index_select(0, rows_S)


class DecoderLayer(nn.Module):
    """Causal attention, then a gated MLP, each behind a norm and around a residual; q, k and v in one product."""

    def __init__(self, config: TextConfig, index: int, **place: Unpack[Place]) -> None:
        super().__init__()
        width = config.hidden_size
        self.index = index
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        num_outputs = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        self.input_norm = rms_norm(width, eps=config.rms_norm_eps, **place)
        self.post_norm = rms_norm(width, eps=config.rms_norm_eps, **place)
        self.qkv = Linear(width, num_outputs, bias=True, **place)
        self.out = Linear(self.num_heads * self.head_dim, width, bias=False, **place)
        self.mlp = SwiGLU(width, config.intermediate_size, bias=False, **place)

    def before(self, hidden_TD: Tensor, cos: Tensor, sin: Tensor) -> QueryKeyValue:
        """Queries and keys, rotated, and values."""
        num_tokens, num_rotated = len(hidden_TD), self.num_heads + self.num_kv_heads
        qkv = self.qkv.forward(self.input_norm.forward(hidden_TD)).view(num_tokens, -1, self.head_dim)
        rotated = apply_rotary(qkv[:, :num_rotated], cos, sin)
        if torch.compiler.is_compiling():
            # In one tensor, so that one kernel can store keys and values: free where the copy is fused.
            q_THE, k_TKE, v_TKE = torch.cat((rotated, qkv[:, num_rotated:]), dim=1).split(  # type: ignore[no-untyped-call]
                (self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1
            )
            return q_THE, k_TKE, v_TKE
        return rotated[:, : self.num_heads], rotated[:, self.num_heads :], qkv[:, num_rotated:]

    def after(self, hidden_TD: Tensor, attended_THE: Tensor) -> Tensor:
        """The layer's output [T, D]."""
        hidden_TD = hidden_TD + self.out.forward(attended_THE.reshape(len(hidden_TD), -1))
        return hidden_TD + self.mlp.forward(self.post_norm.forward(hidden_TD))

    def targets(self, prefix: str) -> WeightTargets:
        kv_outputs = self.num_kv_heads * self.head_dim
        return {
            **self.input_norm.targets(f"{prefix}.input_layernorm"),
            **self.post_norm.targets(f"{prefix}.post_attention_layernorm"),
            **self.qkv.split_targets(
                {
                    f"{prefix}.self_attn.q_proj": self.num_heads * self.head_dim,
                    f"{prefix}.self_attn.k_proj": kv_outputs,
                    f"{prefix}.self_attn.v_proj": kv_outputs,
                }
            ),
            **self.out.targets(f"{prefix}.self_attn.o_proj"),
            **self.mlp.targets(f"{prefix}.mlp"),
        }


def between(
    layer: DecoderLayer, following: DecoderLayer, hidden_TD: Tensor, attended_THE: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, QueryKeyValue]:
    """From one layer's attention to the next one's: all that a compiler can fuse, residual and next norm too."""
    hidden_TD = layer.after(hidden_TD, attended_THE)
    return hidden_TD, following.before(hidden_TD, cos, sin)
