"""The decoder's layers in steps of few rows, as four Triton kernels around each attention. Its plain twin is the layers
themselves (`DecoderLayer.before` and `after`); knows which tile each product takes.

A step of one to eight rows is bound by reading the weights, which cuBLAS does at a third to three quarters of the
memory's bandwidth, with a kernel of Inductor's before and after each product (docs/decisions.md).

Import this module only where its kernels run, as `triton_linear`.

Legend: T tokens of a step, D hidden, H heads, K KV heads, E head width.
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

# By product: for one row, and for two to eight (docs/decisions.md).
ONE_ROW = {
    "rotary": Tile(block_outputs=4, block_inputs=2048, num_warps=4),
    "swiglu": Tile(block_outputs=4, block_inputs=2048, num_warps=4),
    "out": Tile(block_outputs=2, block_inputs=2048, num_warps=4),
    "down": Tile(block_outputs=8, block_inputs=1024, num_warps=8),
}
SOME_ROWS = {
    "rotary": Tile(block_outputs=32, block_inputs=256, num_warps=2, num_stages=3, uses_dot=True),
    "swiglu": Tile(block_outputs=32, block_inputs=256, num_warps=2, num_stages=3, uses_dot=True),
    "out": Tile(block_outputs=16, block_inputs=256, num_warps=1, num_stages=4, uses_dot=True),
    "down": Tile(block_outputs=16, block_inputs=256, num_warps=1, num_stages=4, uses_dot=True),
}


class FewRowsLayers:
    """The parts of decoder layers around attention, for at most `max_rows` rows of half precision.

    `waits`: whether kernels start as dependents of those before them; for Hopper and later.
    """

    # From two rows on cuBLAS is faster: a layer's products take 54 us there, and 59 to 75 in these kernels.
    max_rows = 1

    def __init__(self, *, waits: bool) -> None:
        self._waits = waits

    def forward(
        self,
        layers: Sequence[DecoderLayer],
        hidden_TD: Tensor,
        cos: Tensor,
        sin: Tensor,
        attention: DecoderAttention,
    ) -> Tensor:
        """Rows [T, D] after the last layer. Keys and values are stored on the way, where attention says where."""
        for layer in layers:
            if isinstance(attention, PlacedAttention):
                cache, slots_T = attention.place(layer.index)
                place = KeyValuePlace(cache=cache, slots_T=slots_T)
                attended_THE = attention.attend(layer.index, self._rotated(layer, hidden_TD, cos, sin, place))
            else:
                attended_THE = attention.forward(layer.index, *self.before(layer, hidden_TD, cos, sin))
            hidden_TD = self.after(layer, hidden_TD, attended_THE)
        return hidden_TD

    def before(self, layer: DecoderLayer, hidden_TD: Tensor, cos: Tensor, sin: Tensor) -> QueryKeyValue:
        """As `DecoderLayer.before`; the three lie in one tensor, so that one kernel can store keys and values."""
        qkv = self._rotated(layer, hidden_TD, cos, sin, None)
        num_rotated = layer.num_heads + layer.num_kv_heads
        return qkv[:, : layer.num_heads], qkv[:, layer.num_heads : num_rotated], qkv[:, num_rotated:]

    def after(self, layer: DecoderLayer, hidden_TD: Tensor, attended_THE: Tensor) -> Tensor:
        """As `DecoderLayer.after`."""
        attended_TD = attended_THE.reshape(len(hidden_TD), -1)
        hidden_TD = residual_product(
            attended_TD, layer.out.weight, hidden_TD, tile=self._tile("out", hidden_TD), waits=self._waits
        )
        middle_TF = swiglu_product(
            hidden_TD,
            layer.mlp.gate_up.weight,
            layer.post_norm.weight,
            eps=layer.post_norm.eps,
            tile=self._tile("swiglu", hidden_TD),
            waits=self._waits,
        )
        tile = self._tile("down", hidden_TD)
        return residual_product(middle_TF, layer.mlp.down.weight, hidden_TD, tile=tile, waits=self._waits)

    def warm_up(self, layer: DecoderLayer) -> None:
        """Runs each kernel for one row and for several, with and without a place for keys and values."""
        width, head_dim, num_kv_heads = layer.out.weight.shape[0], layer.head_dim, layer.num_kv_heads
        for num_rows in range(1, min(2, self.max_rows) + 1):
            hidden_TD = layer.out.weight.new_zeros((num_rows, width))
            cos, sin = rotary_tables(hidden_TD.new_zeros((num_rows, 1, head_dim // 2), dtype=torch.float32))
            q_THE, _, _ = self.before(layer, hidden_TD, cos, sin)
            place = KeyValuePlace(
                cache=hidden_TD.new_zeros((2, 2, 16, num_kv_heads, head_dim)),
                slots_T=torch.arange(num_rows, device=hidden_TD.device),
            )
            self._rotated(layer, hidden_TD, cos, sin, place)
            self.after(layer, hidden_TD, q_THE.contiguous())

    def _rotated(
        self, layer: DecoderLayer, hidden_TD: Tensor, cos: Tensor, sin: Tensor, place: KeyValuePlace | None
    ) -> Tensor:
        assert layer.qkv.bias is not None
        return rotary_product(
            hidden_TD,
            layer.qkv.weight,
            layer.qkv.bias,
            layer.input_norm.weight,
            cos,
            sin,
            eps=layer.input_norm.eps,
            num_query=layer.num_heads,
            num_rotated=layer.num_heads + layer.num_kv_heads,
            tile=self._tile("rotary", hidden_TD),
            waits=self._waits,
            place=place,
        )

    def _tile(self, product: str, hidden_TD: Tensor) -> Tile:
        return (ONE_ROW if len(hidden_TD) == 1 else SOME_ROWS)[product]
