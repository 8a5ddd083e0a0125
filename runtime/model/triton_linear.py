"""Triton kernels for the decoder's matrices where a step has few rows. Knows shapes and tiles; knows no layers.

A product with one to eight rows does nothing but stream its weights, so each kernel is one pass over them, with all
that stands around the product folded in: the norm before it, bias, rotation, activation or residual after it.

    rotary_product   rotate(norm(x) @ W.T + bias)         queries, keys and values, the first two rotated
    swiglu_product   silu(norm(x) @ G.T) * (norm(x) @ U.T)
    residual_product residual + x @ W.T

The norm's weight is applied to `x` on the way, its scale to the sums at the end: `norm(x) @ W.T` is
`(x * weight) @ W.T / rms(x)`, and the squares are summed in the same pass. Sums are float32, each result is rounded
once. A program owns whole outputs, so that there is no second stage, and a row's sum takes the same order whatever the
other rows hold.

One row multiplies and adds; more rows go through the tensor cores, with the weights as the left side, since their 8
columns are the narrowest tile there. Where a kernel waits for the one before it (programmatic dependent launch, Hopper
and later), it has started by then, and with one row has asked for its first weights: they do not depend on anything.

Import this module only where its kernels run: Triton comes with CUDA builds of torch alone.

Legend: T rows, I inputs of a product, O outputs, F width of the MLP, H heads of queries, keys and values, E head width.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Rows that one tile of the tensor cores takes: the width of Hopper's and Ampere's narrowest instruction.
MAX_ROWS = 8


@dataclass(frozen=True, kw_only=True)
class Tile:
    """How one kernel cuts its work: outputs (or pairs of outputs) of a program, inputs of one turn of its loop, warps,
    and turns that are on their way at once. `uses_dot`: through the tensor cores, which more than one row needs."""

    block_outputs: int
    block_inputs: int
    num_warps: int
    num_stages: int = 1
    uses_dot: bool = False


@triton.jit
def _dot_pair(
    x_ptr,
    first_ptr,
    second_ptr,
    norm_ptr,
    outputs,
    is_output,
    num_rows,
    INPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_PAIR: tl.constexpr,
    WAITS: tl.constexpr,
):
    """Sums [BLOCK_OUTPUTS, COLUMNS] of two sets of weight rows, and squares [COLUMNS], through the tensor cores."""
    columns = tl.arange(0, COLUMNS)
    inputs = tl.arange(0, BLOCK_INPUTS)
    first = tl.zeros((BLOCK_OUTPUTS, COLUMNS), dtype=tl.float32)
    second = tl.zeros((BLOCK_OUTPUTS, COLUMNS), dtype=tl.float32)
    squares = tl.zeros((BLOCK_INPUTS, COLUMNS), dtype=tl.float32)
    places = outputs[:, None] * INPUTS + inputs[None, :]
    if WAITS:
        gdc_wait()
    for start in tl.range(0, INPUTS, BLOCK_INPUTS, num_stages=STAGES):
        is_input = start + inputs < INPUTS
        is_weight = is_output[:, None] & is_input[None, :]
        first_w = tl.load(first_ptr + start + places, mask=is_weight, other=0.0)
        x = tl.load(
            x_ptr + columns[None, :] * INPUTS + start + inputs[:, None],
            mask=is_input[:, None] & (columns < num_rows)[None, :],
            other=0.0,
        )
        if HAS_NORM:
            wide = x.to(tl.float32)
            squares += wide * wide
            scale = tl.load(norm_ptr + start + inputs, mask=is_input, other=0.0).to(tl.float32)
            x = (wide * scale[:, None]).to(x.dtype)
        first = tl.dot(first_w, x, first)
        if IS_PAIR:
            second_w = tl.load(second_ptr + start + places, mask=is_weight, other=0.0)
            second = tl.dot(second_w, x, second)
    return first, second, tl.sum(squares, axis=0)


@triton.jit
def _multiply_pair(
    x_ptr,
    first_ptr,
    second_ptr,
    norm_ptr,
    outputs,
    is_output,
    INPUTS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_PAIR: tl.constexpr,
    WAITS: tl.constexpr,
):
    """The same for one row, by multiplication: sums [BLOCK_OUTPUTS, 1], squares [1]."""
    inputs = tl.arange(0, BLOCK_INPUTS)
    first = tl.zeros((BLOCK_OUTPUTS, BLOCK_INPUTS), dtype=tl.float32)
    second = tl.zeros((BLOCK_OUTPUTS, BLOCK_INPUTS), dtype=tl.float32)
    squares = tl.zeros((BLOCK_INPUTS,), dtype=tl.float32)
    places = outputs[:, None] * INPUTS + inputs[None, :]
    is_weight = is_output[:, None] & (inputs < INPUTS)[None, :]
    next_first = tl.load(first_ptr + places, mask=is_weight, other=0.0)
    next_second = next_first
    if IS_PAIR:
        next_second = tl.load(second_ptr + places, mask=is_weight, other=0.0)
    if WAITS:
        gdc_wait()
    for start in tl.range(0, INPUTS, BLOCK_INPUTS):
        first_w, second_w = next_first, next_second
        if BLOCK_INPUTS < INPUTS:
            is_weight = is_output[:, None] & (start + BLOCK_INPUTS + inputs < INPUTS)[None, :]
            next_first = tl.load(first_ptr + start + BLOCK_INPUTS + places, mask=is_weight, other=0.0)
            if IS_PAIR:
                next_second = tl.load(second_ptr + start + BLOCK_INPUTS + places, mask=is_weight, other=0.0)
        is_input = start + inputs < INPUTS
        x = tl.load(x_ptr + start + inputs, mask=is_input, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += x * x
            x *= tl.load(norm_ptr + start + inputs, mask=is_input, other=0.0).to(tl.float32)
        first += first_w.to(tl.float32) * x[None, :]
        if IS_PAIR:
            second += second_w.to(tl.float32) * x[None, :]
    total = tl.sum(squares, axis=0) + tl.zeros((1,), dtype=tl.float32)
    return tl.sum(first, axis=1)[:, None], tl.sum(second, axis=1)[:, None], total


@triton.jit
def _sums(
    x_ptr,
    first_ptr,
    second_ptr,
    norm_ptr,
    outputs,
    is_output,
    num_rows,
    eps,
    INPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_PAIR: tl.constexpr,
    WAITS: tl.constexpr,
):
    """Both products [BLOCK_OUTPUTS, COLUMNS] of the rows, normalised where there is a norm. Without dot: one column."""
    if WAITS:
        gdc_launch_dependents()
    if COLUMNS == 1:
        first, second, squares = _multiply_pair(
            x_ptr, first_ptr, second_ptr, norm_ptr, outputs, is_output,
            INPUTS, BLOCK_OUTPUTS, BLOCK_INPUTS, HAS_NORM, IS_PAIR, WAITS,
        )  # fmt: skip
    else:
        first, second, squares = _dot_pair(
            x_ptr, first_ptr, second_ptr, norm_ptr, outputs, is_output, num_rows,
            INPUTS, COLUMNS, BLOCK_OUTPUTS, BLOCK_INPUTS, STAGES, HAS_NORM, IS_PAIR, WAITS,
        )  # fmt: skip
    if HAS_NORM:
        scale = tl.rsqrt(squares / INPUTS + eps)
        first *= scale[None, :]
        second *= scale[None, :]
    return first, second


@triton.jit(do_not_specialize=["num_rows"])
def _rotary_kernel(
    x_ptr, w_ptr, bias_ptr, norm_ptr, cos_ptr, sin_ptr, out_ptr, cache_ptr, slots_ptr, num_rows, block_stride, eps,
    NUM_HEADS: tl.constexpr, NUM_ROTATED: tl.constexpr, NUM_QUERY: tl.constexpr, HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, STORES: tl.constexpr,
    INPUTS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
    STAGES: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Pair p is elements `p % HALF` and `p % HALF + HALF` of head `p // HALF`. With `STORES` keys and values go to
    their slots of the cache, and `out` has queries only."""
    pairs = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    is_pair = pairs < NUM_HEADS * HALF
    heads, elements = pairs // HALF, pairs % HALF
    outputs = heads * 2 * HALF + elements
    first, second = _sums(
        x_ptr, w_ptr, w_ptr + HALF * INPUTS, norm_ptr, outputs, is_pair, num_rows, eps,
        INPUTS, COLUMNS, BLOCK_OUTPUTS, BLOCK_INPUTS, STAGES, True, True, WAITS,
    )  # fmt: skip
    first += tl.load(bias_ptr + outputs, mask=is_pair, other=0.0).to(tl.float32)[:, None]
    second += tl.load(bias_ptr + HALF + outputs, mask=is_pair, other=0.0).to(tl.float32)[:, None]
    rows = tl.arange(0, COLUMNS)
    is_row = rows < num_rows
    is_stored = is_pair[:, None] & is_row[None, :]
    is_rotated = is_stored & (heads < NUM_ROTATED)[:, None]
    cos = tl.load(cos_ptr + rows[None, :] * 2 * HALF + elements[:, None], mask=is_rotated, other=1.0)
    sin = tl.load(sin_ptr + rows[None, :] * HALF + elements[:, None], mask=is_rotated, other=0.0)
    one = (first * cos - second * sin).to(out_ptr.dtype.element_ty)
    other = (second * cos + first * sin).to(out_ptr.dtype.element_ty)
    if STORES:
        is_cached = is_stored & (heads >= NUM_QUERY)[:, None]
        is_value = (heads >= NUM_ROTATED).to(tl.int64)
        cached_heads = heads - NUM_QUERY - is_value * (NUM_ROTATED - NUM_QUERY)
        slots = tl.load(slots_ptr + rows, mask=is_row, other=0)
        row_width: tl.constexpr = (NUM_ROTATED - NUM_QUERY) * 2 * HALF
        within_block = is_value[:, None] * BLOCK_SIZE + (slots % BLOCK_SIZE)[None, :]
        starts = (slots // BLOCK_SIZE * block_stride)[None, :] + within_block * row_width
        cached = cache_ptr + starts + (cached_heads * 2 * HALF + elements)[:, None]
        tl.store(cached, one, mask=is_cached)
        tl.store(cached + HALF, other, mask=is_cached)
        is_stored = is_stored & (heads < NUM_QUERY)[:, None]
    out_heads: tl.constexpr = NUM_QUERY if STORES else NUM_HEADS
    places = out_ptr + rows[None, :] * (out_heads * 2 * HALF) + outputs[:, None]
    tl.store(places, one, mask=is_stored)
    tl.store(places + HALF, other, mask=is_stored)


@triton.jit(do_not_specialize=["num_rows"])
def _swiglu_kernel(
    x_ptr, w_ptr, norm_ptr, out_ptr, num_rows, eps,
    WIDTH: tl.constexpr,
    INPUTS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
    STAGES: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Output i is of weight rows i (gate) and `WIDTH + i` (up)."""
    outputs = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    is_output = outputs < WIDTH
    gate, up = _sums(
        x_ptr, w_ptr, w_ptr + WIDTH * INPUTS, norm_ptr, outputs, is_output, num_rows, eps,
        INPUTS, COLUMNS, BLOCK_OUTPUTS, BLOCK_INPUTS, STAGES, True, True, WAITS,
    )  # fmt: skip
    rows = tl.arange(0, COLUMNS)
    places = out_ptr + rows[None, :] * WIDTH + outputs[:, None]
    value = gate * tl.sigmoid(gate) * up
    tl.store(places, value.to(out_ptr.dtype.element_ty), mask=is_output[:, None] & (rows < num_rows)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _residual_kernel(
    x_ptr, w_ptr, residual_ptr, out_ptr, num_rows,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
    STAGES: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    outputs = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    is_output = outputs < OUTPUTS
    product, _ = _sums(
        x_ptr, w_ptr, w_ptr, w_ptr, outputs, is_output, num_rows, 0.0,
        INPUTS, COLUMNS, BLOCK_OUTPUTS, BLOCK_INPUTS, STAGES, False, False, WAITS,
    )  # fmt: skip
    rows = tl.arange(0, COLUMNS)
    is_stored = is_output[:, None] & (rows < num_rows)[None, :]
    places = rows[None, :] * OUTPUTS + outputs[:, None]
    residual = tl.load(residual_ptr + places, mask=is_stored, other=0.0).to(tl.float32)
    tl.store(out_ptr + places, (residual + product).to(out_ptr.dtype.element_ty), mask=is_stored)


@dataclass(frozen=True, kw_only=True)
class KeyValuePlace:
    """Where a layer's keys and values go: its view of the cache [num_blocks, 2, block_size, K, E], whose blocks are
    contiguous, and the slot of each row, int64 [T]."""

    cache: Tensor
    slots_T: Tensor


def rotary_product(
    x_TI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor,
    norm_I: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float,
    num_query: int,
    num_rotated: int,
    tile: Tile,
    waits: bool,
    place: KeyValuePlace | None = None,
) -> Tensor:
    """Queries, keys and values [T, H, E] of rows, where the first `num_rotated` heads are rotated; or, with a `place`
    for keys and values, queries alone.

    Args:
        cos, sin: float32 tables as `layers.rotary_tables` gives them, [T, 1, E] and [T, 1, E / 2].
        waits: launch as a dependent of the kernel before; for Hopper and later.
    """
    num_rows, num_inputs, head_dim = len(x_TI), x_TI.shape[1], cos.shape[-1]
    num_heads = len(weight_OI) // head_dim
    out = x_TI.new_empty((num_rows, num_heads if place is None else num_query, head_dim))
    _check(num_rows, tile, x_TI, weight_OI, bias_O, norm_I, cos, sin)
    block_size = 1
    if place is not None:
        assert place.cache[0].is_contiguous()
        assert len(place.slots_T) >= num_rows
        block_size = place.cache.shape[2]
    _rotary_kernel[(triton.cdiv(num_heads * head_dim // 2, tile.block_outputs),)](
        x_TI, weight_OI, bias_O, norm_I, cos, sin, out,
        out if place is None else place.cache, cos if place is None else place.slots_T,
        num_rows, 0 if place is None else place.cache.stride(0), eps,
        NUM_HEADS=num_heads, NUM_ROTATED=num_rotated, NUM_QUERY=num_query, HALF=head_dim // 2, BLOCK_SIZE=block_size,
        STORES=place is not None, INPUTS=num_inputs, **_meta(tile, waits),
    )  # fmt: skip
    return out


def swiglu_product(x_TI: Tensor, weight_OI: Tensor, norm_I: Tensor, *, eps: float, tile: Tile, waits: bool) -> Tensor:
    """The activated middle [T, F] of an MLP, `weight_OI` [2 F, I] being gate above up."""
    num_rows, num_inputs = x_TI.shape
    width = len(weight_OI) // 2
    out = x_TI.new_empty((num_rows, width))
    _check(num_rows, tile, x_TI, weight_OI, norm_I)
    _swiglu_kernel[(triton.cdiv(width, tile.block_outputs),)](
        x_TI, weight_OI, norm_I, out, num_rows, eps, WIDTH=width, INPUTS=num_inputs, **_meta(tile, waits)
    )
    return out


def residual_product(x_TI: Tensor, weight_OI: Tensor, residual_TO: Tensor, *, tile: Tile, waits: bool) -> Tensor:
    """`residual + x @ weight.T`, [T, O]."""
    num_rows, num_inputs = x_TI.shape
    out = torch.empty_like(residual_TO)
    _check(num_rows, tile, x_TI, weight_OI, residual_TO)
    _residual_kernel[(triton.cdiv(len(weight_OI), tile.block_outputs),)](
        x_TI, weight_OI, residual_TO, out, num_rows,
        OUTPUTS=len(weight_OI), INPUTS=num_inputs, **_meta(tile, waits),
    )  # fmt: skip
    return out


def _check(num_rows: int, tile: Tile, *tensors: Tensor) -> None:
    assert 1 <= num_rows <= (MAX_ROWS if tile.uses_dot else 1), (num_rows, tile)
    for tensor in tensors:
        assert tensor.is_contiguous(), tensor.shape
        assert tensor.numel() < 2**31, tensor.shape


def _meta(tile: Tile, waits: bool) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "COLUMNS": MAX_ROWS if tile.uses_dot else 1,
        "BLOCK_OUTPUTS": tile.block_outputs,
        "BLOCK_INPUTS": tile.block_inputs,
        "STAGES": tile.num_stages,
        "WAITS": waits,
        "num_warps": tile.num_warps,
    }
    # The interpreter knows no launches.
    return meta | {"launch_pdl": True} if waits else meta
