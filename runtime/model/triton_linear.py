"""Triton kernels for the decoder's matrices in a step of one row. Knows shapes and tiles; knows no layers.

A product with one row does nothing but stream its weights, so each kernel is one pass over them, with all that stands
around the product folded in: the norm before it, bias, rotation, activation or residual after it.

    rotary_product   rotate(norm(x) @ W.T + bias)         queries, keys and values, the first two rotated
    swiglu_product   silu(norm(x) @ G.T) * (norm(x) @ U.T)
    residual_product residual + x @ W.T

The norm's weight is applied to `x` on the way, its scale to the sums at the end: `norm(x) @ W.T` is
`(x * weight) @ W.T / rms(x)`, and the squares are summed in the same pass. Sums are float32, each result is rounded
once. A program owns whole outputs, so that there is no second stage.

Where a kernel waits for the one before it (programmatic dependent launch, Hopper and later), it has started by then,
and has asked for its first weights: they do not depend on anything.

Import this module only where its kernels run: Triton comes with CUDA builds of torch alone.

Legend: I inputs of a product, O outputs, F width of the MLP, H heads of queries, keys and values, E head width, T slots
of a step.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@dataclass(frozen=True, kw_only=True)
class Tile:
    """How one kernel cuts its work: outputs (or pairs of outputs) of a program, inputs of one turn of its loop, and
    warps."""

    block_outputs: int
    block_inputs: int
    num_warps: int


@triton.jit
def _sums(
    x_ptr,
    first_ptr,
    second_ptr,
    norm_ptr,
    outputs,
    is_output,
    eps,
    INPUTS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_PAIR: tl.constexpr,
    WAITS: tl.constexpr,
):
    """The row's products [BLOCK_OUTPUTS] with two sets of weight rows, the row normalised where there is a norm."""
    if WAITS:
        gdc_launch_dependents()
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
    first_sums, second_sums = tl.sum(first, axis=1), tl.sum(second, axis=1)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=0) / INPUTS + eps)
        first_sums *= scale
        second_sums *= scale
    return first_sums, second_sums


@triton.jit
def _rotary_kernel(
    x_ptr, w_ptr, bias_ptr, norm_ptr, cos_ptr, sin_ptr, out_ptr, cache_ptr, slot_ptr, block_stride, eps,
    NUM_HEADS: tl.constexpr, NUM_ROTATED: tl.constexpr, NUM_QUERY: tl.constexpr, HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, STORES: tl.constexpr,
    INPUTS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Pair p is elements `p % HALF` and `p % HALF + HALF` of head `p // HALF`. With `STORES` keys and values go to
    their slot of the cache, and `out` has queries only."""
    pairs = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    is_pair = pairs < NUM_HEADS * HALF
    heads, elements = pairs // HALF, pairs % HALF
    outputs = heads * 2 * HALF + elements
    first, second = _sums(
        x_ptr, w_ptr, w_ptr + HALF * INPUTS, norm_ptr, outputs, is_pair, eps,
        INPUTS, BLOCK_OUTPUTS, BLOCK_INPUTS, True, True, WAITS,
    )  # fmt: skip
    first += tl.load(bias_ptr + outputs, mask=is_pair, other=0.0).to(tl.float32)
    second += tl.load(bias_ptr + HALF + outputs, mask=is_pair, other=0.0).to(tl.float32)
    is_rotated = is_pair & (heads < NUM_ROTATED)
    cos = tl.load(cos_ptr + elements, mask=is_rotated, other=1.0)
    sin = tl.load(sin_ptr + elements, mask=is_rotated, other=0.0)
    one = (first * cos - second * sin).to(out_ptr.dtype.element_ty)
    other = (second * cos + first * sin).to(out_ptr.dtype.element_ty)
    is_stored = is_pair
    if STORES:
        is_cached = is_pair & (heads >= NUM_QUERY)
        is_value = (heads >= NUM_ROTATED).to(tl.int64)
        cached_heads = heads - NUM_QUERY - is_value * (NUM_ROTATED - NUM_QUERY)
        slot = tl.load(slot_ptr)
        row_width: tl.constexpr = (NUM_ROTATED - NUM_QUERY) * 2 * HALF
        within_block = is_value * BLOCK_SIZE + slot % BLOCK_SIZE
        starts = slot // BLOCK_SIZE * block_stride + within_block * row_width
        cached = cache_ptr + starts + cached_heads * 2 * HALF + elements
        tl.store(cached, one, mask=is_cached)
        tl.store(cached + HALF, other, mask=is_cached)
        is_stored = is_pair & (heads < NUM_QUERY)
    tl.store(out_ptr + outputs, one, mask=is_stored)
    tl.store(out_ptr + outputs + HALF, other, mask=is_stored)


@triton.jit
def _swiglu_kernel(
    x_ptr, w_ptr, norm_ptr, out_ptr, eps,
    WIDTH: tl.constexpr,
    INPUTS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Output i is of weight rows i (gate) and `WIDTH + i` (up)."""
    outputs = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    is_output = outputs < WIDTH
    gate, up = _sums(
        x_ptr, w_ptr, w_ptr + WIDTH * INPUTS, norm_ptr, outputs, is_output, eps,
        INPUTS, BLOCK_OUTPUTS, BLOCK_INPUTS, True, True, WAITS,
    )  # fmt: skip
    value = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + outputs, value.to(out_ptr.dtype.element_ty), mask=is_output)


@triton.jit
def _residual_kernel(
    x_ptr, w_ptr, residual_ptr, out_ptr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    outputs = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    is_output = outputs < OUTPUTS
    product, _ = _sums(
        x_ptr, w_ptr, w_ptr, w_ptr, outputs, is_output, 0.0,
        INPUTS, BLOCK_OUTPUTS, BLOCK_INPUTS, False, False, WAITS,
    )  # fmt: skip
    residual = tl.load(residual_ptr + outputs, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out_ptr + outputs, (residual + product).to(out_ptr.dtype.element_ty), mask=is_output)


@dataclass(frozen=True, kw_only=True)
class KeyValuePlace:
    """Where a layer's keys and values go: its view of the cache [num_blocks, 2, block_size, K, E], whose blocks are
    contiguous, and the row's slot, the first of these, int64."""

    cache: Tensor
    slots_T: Tensor


def rotary_product(
    x_1I: Tensor,
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
    """Queries, keys and values [1, H, E] of a row, where the first `num_rotated` heads are rotated; or, with a `place`
    for keys and values, queries alone.

    Args:
        cos, sin: float32 tables as `layers.rotary_tables` gives them, [1, 1, E] and [1, 1, E / 2].
        waits: launch as a dependent of the kernel before; for Hopper and later.
    """
    num_inputs, head_dim = x_1I.shape[1], cos.shape[-1]
    num_heads = len(weight_OI) // head_dim
    out = x_1I.new_empty((1, num_heads if place is None else num_query, head_dim))
    _check(x_1I, weight_OI, bias_O, norm_I, cos, sin)
    block_size = 1
    if place is not None:
        assert place.cache[0].is_contiguous()
        assert len(place.slots_T) > 0
        block_size = place.cache.shape[2]
    _rotary_kernel[(triton.cdiv(num_heads * head_dim // 2, tile.block_outputs),)](
        x_1I, weight_OI, bias_O, norm_I, cos, sin, out,
        out if place is None else place.cache, cos if place is None else place.slots_T,
        0 if place is None else place.cache.stride(0), eps,
        NUM_HEADS=num_heads, NUM_ROTATED=num_rotated, NUM_QUERY=num_query, HALF=head_dim // 2, BLOCK_SIZE=block_size,
        STORES=place is not None, INPUTS=num_inputs, **_meta(tile, waits),
    )  # fmt: skip
    return out


def swiglu_product(x_1I: Tensor, weight_OI: Tensor, norm_I: Tensor, *, eps: float, tile: Tile, waits: bool) -> Tensor:
    """The activated middle [1, F] of an MLP, `weight_OI` [2 F, I] being gate above up."""
    width = len(weight_OI) // 2
    out = x_1I.new_empty((1, width))
    _check(x_1I, weight_OI, norm_I)
    _swiglu_kernel[(triton.cdiv(width, tile.block_outputs),)](
        x_1I, weight_OI, norm_I, out, eps, WIDTH=width, INPUTS=x_1I.shape[1], **_meta(tile, waits)
    )
    return out


def residual_product(x_1I: Tensor, weight_OI: Tensor, residual_1O: Tensor, *, tile: Tile, waits: bool) -> Tensor:
    """`residual + x @ weight.T`, [1, O]."""
    out = torch.empty_like(residual_1O)
    _check(x_1I, weight_OI, residual_1O)
    _residual_kernel[(triton.cdiv(len(weight_OI), tile.block_outputs),)](
        x_1I, weight_OI, residual_1O, out, OUTPUTS=len(weight_OI), INPUTS=x_1I.shape[1], **_meta(tile, waits)
    )
    return out


def _check(x_1I: Tensor, *others: Tensor) -> None:
    assert len(x_1I) == 1, x_1I.shape
    for tensor in (x_1I, *others):
        assert tensor.is_contiguous(), tensor.shape
        assert tensor.numel() < 2**31, tensor.shape


def _meta(tile: Tile, waits: bool) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "BLOCK_OUTPUTS": tile.block_outputs,
        "BLOCK_INPUTS": tile.block_inputs,
        "WAITS": waits,
        "num_warps": tile.num_warps,
    }
    # The interpreter knows no launches.
    return meta | {"launch_pdl": True} if waits else meta
