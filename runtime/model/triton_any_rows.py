"""The decoder's layers in a step of any number of rows: torch's products, and two Triton kernels for what stands
between them. Its plain twin is the layers themselves (`DecoderLayer.before` and `after`).

Without a graph a step of few rows is bound by its launches, so that what counts is how many operators a layer has: nine
here, each of them one launch that costs microseconds. Inductor fuses as much, but to enter what it compiled costs more
than a layer's launches together, and torch's own operators for rotation and activation are a dozen (docs/decisions.md).

    rotate_and_store   rotates queries in their place, keys into the cache; values into the cache
    swiglu             silu(gate) * up

Import this module only where its kernels run: Triton comes with CUDA builds of torch alone.

Legend: T rows, D hidden, F width of the MLP, H heads of queries, keys and values, E head width, K KV heads.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.model.attention import DecoderAttention, PlacedAttention
from runtime.model.layers import rotary_tables
from runtime.model.qwen2_5_vl_text import DecoderLayer, QueryKeyValue, wanted_rows

SWIGLU_BLOCK = 1024


class TritonAnyRows:
    """The parts of decoder layers around attention, for rows of half precision."""

    def forward(
        self,
        layers: Sequence[DecoderLayer],
        hidden_TD: Tensor,
        cos: Tensor,
        sin: Tensor,
        attention: DecoderAttention,
        rows_S: Tensor | None = None,
    ) -> Tensor:
        """Rows [T, D] after the last layer, or [S, D] of `rows_S`. Keys and values are stored on the way, where
        attention says where."""
        # Asking a protocol costs as much as an operator: once a step.
        placed = attention if isinstance(attention, PlacedAttention) else None
        for index, layer in enumerate(layers):
            qkv_THE = self._qkv(layer, hidden_TD)
            if placed is not None:
                cache, slots_T = placed.place(layer.index)
                rotate_and_store(qkv_THE, cos, sin, num_query=layer.num_heads, cache=cache, slots_T=slots_T)
                attended_THE = placed.attend(layer.index, qkv_THE[:, : layer.num_heads])
            else:
                attended_THE = attention.forward(layer.index, *self._rotated(layer, qkv_THE, cos, sin))
            if layer is layers[-1] and rows_S is not None:
                hidden_TD, attended_THE = wanted_rows(hidden_TD, rows_S), wanted_rows(attended_THE, rows_S)
            # The embeddings stay as they are: a graph reads them again.
            hidden_TD = self._after(layer, hidden_TD, attended_THE, is_inplace=index > 0)
        return hidden_TD

    def before(self, layer: DecoderLayer, hidden_TD: Tensor, cos: Tensor, sin: Tensor) -> QueryKeyValue:
        """As `DecoderLayer.before`; the three lie in one tensor, so that one kernel can store keys and values."""
        return self._rotated(layer, self._qkv(layer, hidden_TD), cos, sin)

    def after(self, layer: DecoderLayer, hidden_TD: Tensor, attended_THE: Tensor) -> Tensor:
        """As `DecoderLayer.after`."""
        return self._after(layer, hidden_TD, attended_THE, is_inplace=False)

    def warm_up(self, layer: DecoderLayer) -> None:
        """Runs each kernel, with and without a place for keys and values, for one row and for several."""
        for num_rows in (1, 2):
            hidden_TD = layer.out.weight.new_zeros((num_rows, layer.out.weight.shape[0]))
            angles = hidden_TD.new_zeros((num_rows, 1, layer.head_dim // 2), dtype=torch.float32)
            cos, sin = rotary_tables(angles)
            q_THE, _, _ = self.before(layer, hidden_TD, cos, sin)
            rotate_and_store(
                self._qkv(layer, hidden_TD),
                cos,
                sin,
                num_query=layer.num_heads,
                cache=hidden_TD.new_zeros((2, 2, 16, layer.num_kv_heads, layer.head_dim)),
                slots_T=torch.arange(num_rows, device=hidden_TD.device),
            )
            self.after(layer, hidden_TD, q_THE.contiguous())

    def _qkv(self, layer: DecoderLayer, hidden_TD: Tensor) -> Tensor:
        rows = layer.qkv.forward(layer.input_norm.forward(hidden_TD))
        return rows.view(len(hidden_TD), -1, layer.head_dim)

    def _rotated(self, layer: DecoderLayer, qkv_THE: Tensor, cos: Tensor, sin: Tensor) -> QueryKeyValue:
        num_rotated = layer.num_heads + layer.num_kv_heads
        rotate(qkv_THE, cos, sin, num_rotated=num_rotated)
        return qkv_THE[:, : layer.num_heads], qkv_THE[:, layer.num_heads : num_rotated], qkv_THE[:, num_rotated:]

    def _after(self, layer: DecoderLayer, hidden_TD: Tensor, attended_THE: Tensor, *, is_inplace: bool) -> Tensor:
        attended_TD = attended_THE.reshape(len(hidden_TD), -1)
        # A product that adds the residual: in place it is one kernel, else torch copies the residual first.
        if is_inplace:
            hidden_TD.addmm_(attended_TD, layer.out.weight.t())
        else:
            hidden_TD = torch.addmm(hidden_TD, attended_TD, layer.out.weight.t())
        middle_TF = swiglu(layer.mlp.gate_up.forward(layer.post_norm.forward(hidden_TD)))
        return hidden_TD.addmm_(middle_TF, layer.mlp.down.weight.t())


class Launcher:
    """Launches one kernel. Once it is compiled for a set of constants, further launches go to what was compiled, past
    the look at every argument by which Triton finds it: that costs more than the launch.

    Triton compiles for pointers at multiples of 16 bytes, and for integers that are multiples of 16, apart from others:
    so the constants must say all that distinguishes the latter, and pointers are looked at here.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[tuple[object, ...], Any] = {}

    def launch(
        self, grid: tuple[int, int, int], tensors: Sequence[Tensor], constants: tuple[int | bool, ...], *rest: int
    ) -> None:
        """The kernel's arguments are `tensors`, then `rest`, then `constants`, those of the compiler's."""
        key = (tensors[0].dtype, tensors[0].device, rest, constants)
        is_aligned = not any(tensor.data_ptr() % 16 for tensor in tensors)
        compiled = self._compiled.get(key) if is_aligned else None
        if compiled is not None:
            compiled[grid](*tensors, *rest, *constants)
            return
        compiled = self._kernel[grid](*tensors, *rest, *constants)  # None where Triton interprets
        if is_aligned:
            self._compiled[key] = compiled


@triton.jit
def _rotary_kernel(
    qkv_ptr, cos_ptr, sin_ptr, cache_ptr, slots_ptr, block_stride,
    NUM_HEADS: tl.constexpr, NUM_ROTATED: tl.constexpr, NUM_QUERY: tl.constexpr, HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, STORES: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Program t owns row t. With `STORES` keys and values go to their slot of the cache, and queries alone stay."""
    row = tl.program_id(0).to(tl.int64)
    heads, elements = tl.arange(0, BLOCK_HEADS)[:, None], tl.arange(0, BLOCK_HALF)[None, :]
    is_element = (heads < NUM_HEADS) & (elements < HALF)
    is_rotated = is_element & (heads < NUM_ROTATED)
    places = qkv_ptr + row * (NUM_HEADS * 2 * HALF) + heads * 2 * HALF + elements
    first = tl.load(places, mask=is_element, other=0.0).to(tl.float32)
    second = tl.load(places + HALF, mask=is_element, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + row * 2 * HALF + elements, mask=is_rotated, other=1.0)
    sin = tl.load(sin_ptr + row * HALF + elements, mask=is_rotated, other=0.0)
    one = (first * cos - second * sin).to(qkv_ptr.dtype.element_ty)
    other = (second * cos + first * sin).to(qkv_ptr.dtype.element_ty)
    is_kept = is_rotated
    if STORES:
        is_cached = is_element & (heads >= NUM_QUERY)
        is_value = (heads >= NUM_ROTATED).to(tl.int64)
        cached_heads = heads - NUM_QUERY - is_value * (NUM_ROTATED - NUM_QUERY)
        slot = tl.load(slots_ptr + row)
        row_width: tl.constexpr = (NUM_ROTATED - NUM_QUERY) * 2 * HALF
        within_block = is_value * BLOCK_SIZE + slot % BLOCK_SIZE
        starts = slot // BLOCK_SIZE * block_stride + within_block * row_width
        cached = cache_ptr + starts + cached_heads * 2 * HALF + elements
        tl.store(cached, one, mask=is_cached)
        tl.store(cached + HALF, other, mask=is_cached)
        is_kept = is_element & (heads < NUM_QUERY)
    tl.store(places, one, mask=is_kept)
    tl.store(places + HALF, other, mask=is_kept)


@triton.jit
def _swiglu_kernel(gate_up_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Program (t, b) owns block b of row t; a row is gates, then ups."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < WIDTH
    places = gate_up_ptr + row * 2 * WIDTH + columns
    gate = tl.load(places, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(places + WIDTH, mask=is_column, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * WIDTH + columns, value.to(out_ptr.dtype.element_ty), mask=is_column)


_ROTARY = Launcher(_rotary_kernel)
_SWIGLU = Launcher(_swiglu_kernel)


def rotate_and_store(
    qkv_THE: Tensor, cos: Tensor, sin: Tensor, *, num_query: int, cache: Tensor, slots_T: Tensor
) -> None:
    """Rotates the queries of rows in their place, and writes rotated keys, and values, to their slots of a layer's
    cache. What stands in the place of keys and values afterwards means nothing.

    Args:
        qkv_THE: contiguous; queries, then keys, then values.
        cos, sin: float32 tables as `layers.rotary_tables` gives them, [T, 1, E] and [T, 1, E / 2].
        cache: [num_blocks, 2, block_size, K, E], whose blocks are contiguous. `slots_T`: int64, at least T.
    """
    _, _, block_size, num_kv_heads, head_dim = cache.shape
    row = num_kv_heads * head_dim
    assert cache.stride()[1:] == (block_size * row, row, head_dim, 1), "a block is not contiguous"
    assert len(slots_T) >= len(qkv_THE)
    num_rotated = num_query + (qkv_THE.shape[1] - num_query) // 2
    _launch_rotary(qkv_THE, cos, sin, cache, slots_T, num_query=num_query, num_rotated=num_rotated, stores=True)


def rotate(qkv_THE: Tensor, cos: Tensor, sin: Tensor, *, num_rotated: int) -> None:
    """Rotates the first `num_rotated` heads of rows in their place; else as `rotate_and_store`."""
    _launch_rotary(qkv_THE, cos, sin, qkv_THE, cos, num_query=num_rotated, num_rotated=num_rotated, stores=False)


def swiglu(gate_up_TF: Tensor) -> Tensor:
    """`silu(gate) * up`, [T, F], of contiguous rows [T, 2 F] of gates, then ups."""
    assert gate_up_TF.is_contiguous()
    num_rows, width = len(gate_up_TF), gate_up_TF.shape[1] // 2
    out_TF = gate_up_TF.new_empty((num_rows, width))
    _SWIGLU.launch((num_rows, -(-width // SWIGLU_BLOCK), 1), (gate_up_TF, out_TF), (width, SWIGLU_BLOCK))
    return out_TF


def _launch_rotary(
    qkv_THE: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    slots_T: Tensor,
    *,
    num_query: int,
    num_rotated: int,
    stores: bool,
) -> None:
    num_rows, num_heads, head_dim = qkv_THE.shape
    assert qkv_THE.is_contiguous()
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    _ROTARY.launch(
        (num_rows, 1, 1),
        (qkv_THE, cos, sin, cache, slots_T),
        (
            num_heads,
            num_rotated,
            num_query,
            head_dim // 2,
            cache.shape[2] if stores else 1,
            stores,
            _power_of_two(num_heads),
            _power_of_two(head_dim // 2),
        ),
        cache.stride(0),
    )


def _power_of_two(number: int) -> int:
    """The next one, or the number itself."""
    return 1 << (number - 1).bit_length()
