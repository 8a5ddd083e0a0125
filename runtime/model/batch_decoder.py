"""The text decoder for a step of a few rows, between NumPy and oneDNN: most steps of a CPU that serves several requests
at a time, and short prompts.

What `row_decoder` is for one row, with products that go through packed weights (docs/decisions.md). Where each row is
the next token of another sequence, attention is NumPy's too. The plain twin, and any larger step, is `TextDecoder`'s.

Legend: B rows, R rows that products are computed with (the others are padding), D hidden, H heads, K KV heads, G heads
to a KV head, E head width, A = H + K.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from runtime.model.attention import DecoderAttention
from runtime.model.layers import Linear
from runtime.model.packed import ROWS, PackedWeight
from runtime.model.qwen2_5_vl_text import DecoderLayer
from runtime.model.row_attention import RowAttention
from runtime.model.row_decoder import Array, RowDecoder, norm_weight

# Beyond, what operators cost no longer shows beside what they compute.
MAX_ROWS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layer:
    """A layer's weights."""

    index: int
    input_norm: Array
    qkv: PackedWeight
    qkv_bias: Tensor
    out: PackedWeight
    post_norm: Array
    gate_up: PackedWeight
    down: PackedWeight

    @classmethod
    def of(cls, layer: DecoderLayer) -> "_Layer":
        assert layer.qkv.bias is not None
        return cls(
            index=layer.index,
            input_norm=norm_weight(layer.input_norm),
            qkv=_packed(layer.qkv),
            qkv_bias=layer.qkv.bias.data,
            out=_packed(layer.out),
            post_norm=norm_weight(layer.post_norm),
            gate_up=_packed(layer.mlp.gate_up),
            down=_packed(layer.mlp.down),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Buffers:
    """The front R rows of the step's arrays, and how operators see them. Products read tensors over the same memory."""

    hidden_RD: Array
    hidden_R1D: Array
    hidden_RD1: Array
    square_R11: Array
    square_R1: Array
    normed_RD: Array
    normed: Tensor
    cos_RA2E: Array
    sin_RA2E: Array
    rotated_RA2E: Array
    turned_RA2E: Array
    q_RKGE: Array
    k_RF: Array
    attended_RKGE: Array
    attended: Tensor


class BatchDecoder:
    """A `Decoder` around a `RowDecoder`, whose `TextDecoder` has its products packed."""

    def __init__(self, others: RowDecoder) -> None:
        decoder = others.decoder
        config = decoder.config
        self._others, self._text = others, decoder
        self._layers = [_Layer.of(layer) for layer in decoder.layers]
        self._norm = norm_weight(decoder.norm)
        self._axes: NDArray[np.int64] = decoder.frequency_axes.numpy()
        self._frequencies: Array = decoder.inverse_frequencies.numpy()
        self._floor = config.hidden_size * config.rms_norm_eps

        hidden, width = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._heads, self._kv_heads, self._num_rotated = heads, kv_heads, (heads + kv_heads) * width
        # Queries carry attention's scale where attention is NumPy's.
        self._no_scale_A1: Array = np.ones((heads + kv_heads, 1), np.float32)
        self._scale_A1 = self._no_scale_A1.copy()
        self._scale_A1[:heads] = width**-0.5
        rotated = (MAX_ROWS, heads + kv_heads, 2, width // 2)
        # Padding rows go through the same arithmetic, and so must hold numbers.
        self._arrays: dict[str, Array] = {
            "hidden": np.zeros((MAX_ROWS, hidden), np.float32),
            "square": np.zeros((MAX_ROWS, 1, 1), np.float32),
            "normed": np.zeros((MAX_ROWS, hidden), np.float32),
            "cos": np.zeros(rotated, np.float32),
            "sin": np.zeros(rotated, np.float32),
            "rotated": np.zeros(rotated, np.float32),
            "turned": np.zeros(rotated, np.float32),
            "attended": np.zeros((MAX_ROWS, heads * width), np.float32),
        }
        self._buffers = {rows: self._front(rows) for rows in ROWS if rows <= MAX_ROWS}

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays that are kept from step to step, those for one row among them."""
        return self._others.num_bytes + sum(array.nbytes for array in self._arrays.values())

    def embed(self, token_ids_T: Tensor) -> Tensor:
        return self._others.embed(token_ids_T)

    def forward(
        self, embeds_TD: Tensor, positions_3T: Tensor, attention: DecoderAttention, rows_S: Tensor | None = None
    ) -> Tensor:
        if not 1 < len(embeds_TD) <= MAX_ROWS or not isinstance(attention, RowAttention):
            return self._others.forward(embeds_TD, positions_3T, attention, rows_S)
        return self._forward(embeds_TD.numpy(), positions_3T.numpy(), attention, rows_S)

    def logits(self, hidden_SD: Tensor) -> Tensor:
        return self._others.logits(hidden_SD)

    def _forward(
        self, embeds_BD: Array, positions_3B: NDArray[np.int64], attention: RowAttention, rows_S: Tensor | None
    ) -> Tensor:
        """The hidden rows [B, D], or [S, D], after the last norm."""
        num_rows = len(embeds_BD)
        buffers = self._buffers[next(rows for rows in ROWS if rows >= num_rows)]
        hidden, rotated, turned = buffers.hidden_RD, buffers.rotated_RA2E, buffers.turned_RA2E
        cos, sin = buffers.cos_RA2E, buffers.sin_RA2E
        is_numpy = attention.can_attend_rows
        self._write_rotation(positions_3B, buffers, self._scale_A1 if is_numpy else self._no_scale_A1)
        q_BKGE, k_BF = buffers.q_RKGE[:num_rows], buffers.k_RF[:num_rows]
        attended_BKGE = buffers.attended_RKGE[:num_rows]
        last = self._layers[-1]
        hidden[:num_rows] = embeds_BD
        hidden[num_rows:] = 0
        for layer in self._layers:
            self._normalise(buffers, layer.input_norm, buffers.normed_RD)
            qkv = layer.qkv.multiply(buffers.normed, layer.qkv_bias).numpy()
            halves = qkv[:, : self._num_rotated].reshape(rotated.shape)
            np.multiply(halves, cos, out=rotated)
            np.multiply(halves[:, :, ::-1], sin, out=turned)
            np.add(rotated, turned, out=rotated)
            v_BF = qkv[:num_rows, self._num_rotated :]
            if is_numpy:
                attention.attend_rows(layer.index, q_BKGE, k_BF, v_BF, attended_BKGE)
            else:
                buffers.attended[:num_rows] = self._attend(attention, layer.index, q_BKGE, k_BF, v_BF)
            if layer is last and rows_S is not None:
                wanted = (torch.from_numpy(hidden).index_select(0, rows_S), buffers.attended.index_select(0, rows_S))
                return self._text.norm.forward(self._text.layers[-1].after(*wanted))
            np.add(hidden, layer.out.multiply(buffers.attended, None).numpy(), out=hidden)
            self._normalise(buffers, layer.post_norm, buffers.normed_RD)
            gate, up = layer.gate_up.multiply(buffers.normed, None).chunk(2, dim=-1)
            np.add(hidden, layer.down.multiply(F.silu(gate).mul_(up), None).numpy(), out=hidden)
        # A new array: the caller may keep it.
        last_RD = np.empty_like(hidden)
        self._normalise(buffers, self._norm, last_RD)
        return torch.from_numpy(last_RD[:num_rows])

    def _attend(self, attention: RowAttention, layer: int, q_BKGE: Array, k_BF: Array, v_BF: Array) -> Tensor:
        """Rows [B, H * E] of torch's attention, for steps with several tokens of a sequence."""
        num_rows, width = len(k_BF), q_BKGE.shape[-1]
        q_BHE, k_BKE, v_BKE = (torch.from_numpy(x).view(num_rows, -1, width) for x in (q_BKGE, k_BF, v_BF))
        return attention.forward(layer, q_BHE, k_BKE, v_BKE).view(num_rows, -1)

    def _front(self, rows: int) -> _Buffers:
        arrays = {name: array[:rows] for name, array in self._arrays.items()}
        hidden, normed, rotated, attended = (arrays[name] for name in ("hidden", "normed", "rotated", "attended"))
        flat = rotated.reshape(rows, -1)
        width = rotated.shape[2] * rotated.shape[3]
        heads = (rows, self._kv_heads, -1, width)
        return _Buffers(
            hidden_RD=hidden,
            hidden_R1D=hidden[:, None, :],
            hidden_RD1=hidden[:, :, None],
            square_R11=arrays["square"],
            square_R1=arrays["square"][:, 0],
            normed_RD=normed,
            normed=torch.from_numpy(normed),
            cos_RA2E=arrays["cos"],
            sin_RA2E=arrays["sin"],
            rotated_RA2E=rotated,
            turned_RA2E=arrays["turned"],
            q_RKGE=flat[:, : self._heads * width].reshape(heads),
            k_RF=flat[:, self._heads * width :],
            attended_RKGE=attended.reshape(heads),
            attended=torch.from_numpy(attended),
        )

    def _write_rotation(self, positions_3B: NDArray[np.int64], buffers: _Buffers, scale_A1: Array) -> None:
        """Cosines, and sines whose first half is negative: `x * cos + (halves swapped) * sin` rotates."""
        num_rows = positions_3B.shape[1]
        angles_BE = positions_3B.T.astype(np.float32)[:, self._axes] * self._frequencies
        np.multiply(np.cos(angles_BE)[:, None, None], scale_A1[:, None], out=buffers.cos_RA2E[:num_rows])
        sin_BAE = np.sin(angles_BE)[:, None] * scale_A1
        np.negative(sin_BAE, out=buffers.sin_RA2E[:num_rows, :, 0])
        buffers.sin_RA2E[:num_rows, :, 1] = sin_BAE

    def _normalise(self, buffers: _Buffers, weight: Array, target: Array) -> None:
        """RMSNorm; the weight holds a factor sqrt(D), see `EagerRMSNorm`."""
        np.matmul(buffers.hidden_R1D, buffers.hidden_RD1, out=buffers.square_R11)
        norm = buffers.square_R1
        np.add(norm, self._floor, out=norm)
        np.sqrt(norm, out=norm)
        np.divide(buffers.hidden_RD, norm, out=target)
        np.multiply(target, weight, out=target)


def _packed(linear: Linear) -> PackedWeight:
    assert linear.packed is not None, "the products are not packed"
    return linear.packed
