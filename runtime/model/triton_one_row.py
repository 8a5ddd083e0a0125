"""The decoder's layers in a step of one row, as four Triton kernels around each attention. Its plain twin is the layers
themselves (`DecoderLayer.before` and `after`); knows which tile each product takes.

A step of one row is bound by reading the weights, which cuBLAS does at a third to three quarters of the memory's
bandwidth, with a kernel of Inductor's before and after each product (docs/decisions.md). From two rows on cuBLAS is the
faster one.

Import this module only where its kernels run, as `triton_linear`.

Legend: D hidden, H heads, K KV heads, E head width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.model.attention import DecoderAttention, PlacedAttention
from runtime.model.layers import rotary_tables
from runtime.model.qwen2_5_vl_text import DecoderLayer, QueryKeyValue
from runtime.model.triton_linear import (
    KeyValuePlace,
    Tile,
    residual_product,
    rotary_product,
    swiglu_product,
)

# Measured on compute capability 9.0 (docs/decisions.md).
ROTARY = Tile(block_outputs=4, block_inputs=2048, num_warps=4)
SWIGLU = Tile(block_outputs=4, block_inputs=2048, num_warps=4)
OUT = Tile(block_outputs=2, block_inputs=2048, num_warps=4)
DOWN = Tile(block_outputs=8, block_inputs=1024, num_warps=8)


class TritonOneRow:
    """The parts of decoder layers around attention, for one row of half precision.

    `waits`: whether kernels start as dependents of those before them; for Hopper and later.
    """

    def __init__(self, *, waits: bool) -> None:
        self._waits = waits

    def forward(
        self,
        layers: Sequence[DecoderLayer],
        hidden_1D: Tensor,
        cos: Tensor,
        sin: Tensor,
        attention: DecoderAttention,
        rows_S: Tensor | None = None,
    ) -> Tensor:
        """The row [1, D] after the last layer, which is the one of `rows_S`. Keys and values are stored on the way,
        where attention says where."""
        for layer in layers:
            if isinstance(attention, PlacedAttention):
                cache, slots_T = attention.place(layer.index)
                place = KeyValuePlace(cache=cache, slots_T=slots_T)
                attended_1HE = attention.attend(layer.index, self._rotated(layer, hidden_1D, cos, sin, place))
            else:
                attended_1HE = attention.forward(layer.index, *self.before(layer, hidden_1D, cos, sin))
            hidden_1D = self.after(layer, hidden_1D, attended_1HE)
        return hidden_1D

    def before(self, layer: DecoderLayer, hidden_1D: Tensor, cos: Tensor, sin: Tensor) -> QueryKeyValue:
        """As `DecoderLayer.before`; the three lie in one tensor, so that one kernel can store keys and values."""
        qkv = self._rotated(layer, hidden_1D, cos, sin, None)
        num_rotated = layer.num_heads + layer.num_kv_heads
        return qkv[:, : layer.num_heads], qkv[:, layer.num_heads : num_rotated], qkv[:, num_rotated:]

    def after(self, layer: DecoderLayer, hidden_1D: Tensor, attended_1HE: Tensor) -> Tensor:
        """As `DecoderLayer.after`."""
        attended_1D = attended_1HE.reshape(1, -1)
        hidden_1D = residual_product(attended_1D, layer.out.weight, hidden_1D, tile=OUT, waits=self._waits)
        middle_1F = swiglu_product(
            hidden_1D,
            layer.mlp.gate_up.weight,
            layer.post_norm.weight,
            eps=layer.post_norm.eps,
            tile=SWIGLU,
            waits=self._waits,
        )
        return residual_product(middle_1F, layer.mlp.down.weight, hidden_1D, tile=DOWN, waits=self._waits)

    def warm_up(self, layer: DecoderLayer) -> None:
        """Runs each kernel, with and without a place for keys and values."""
        head_dim = layer.head_dim
        hidden_1D = layer.out.weight.new_zeros((1, layer.out.weight.shape[0]))
        cos, sin = rotary_tables(hidden_1D.new_zeros((1, 1, head_dim // 2), dtype=torch.float32))
        q_1HE, _, _ = self.before(layer, hidden_1D, cos, sin)
        place = KeyValuePlace(
            cache=hidden_1D.new_zeros((2, 2, 16, layer.num_kv_heads, head_dim)),
            slots_T=torch.arange(1, device=hidden_1D.device),
        )
        self._rotated(layer, hidden_1D, cos, sin, place)
        self.after(layer, hidden_1D, q_1HE.contiguous())

    def _rotated(
        self, layer: DecoderLayer, hidden_1D: Tensor, cos: Tensor, sin: Tensor, place: KeyValuePlace | None
    ) -> Tensor:
        assert layer.qkv.bias is not None
        return rotary_product(
            hidden_1D,
            layer.qkv.weight,
            layer.qkv.bias,
            layer.input_norm.weight,
            cos,
            sin,
            eps=layer.input_norm.eps,
            num_query=layer.num_heads,
            num_rotated=layer.num_heads + layer.num_kv_heads,
            tile=ROTARY,
            waits=self._waits,
            place=place,
        )
