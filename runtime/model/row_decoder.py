"""The text decoder for a step of one row, in NumPy: most steps of a CPU that serves one request at a time.

Such a step is some 200 operators on a few hundred numbers, and some 30 products of a row with a matrix. NumPy's
operators cost a third to a tenth of torch's, and its OpenBLAS reads the matrices faster than the MKL that torch brings
(docs/decisions.md). The weights are the decoder's own, seen as arrays. Any other step, and the plain twin, is
`TextDecoder`'s.

Legend: D hidden, F width of the MLP, H heads, K KV heads, G heads to a KV head, E head width, A = H + K, V vocabulary.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.model.attention import DecoderAttention
from runtime.model.layers import EagerRMSNorm, RMSNorm
from runtime.model.qwen2_5_vl_text import DecoderLayer, TextDecoder
from runtime.model.row_attention import RowAttention

Array = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layer:
    """A layer's weights, products as [inputs, outputs]."""

    index: int
    input_norm: Array
    qkv: Array
    qkv_bias: Array
    out: Array
    post_norm: Array
    gate_up: Array
    down: Array

    @classmethod
    def of(cls, layer: DecoderLayer) -> "_Layer":
        assert layer.qkv.bias is not None
        return cls(
            index=layer.index,
            input_norm=norm_weight(layer.input_norm),
            qkv=_matrix(layer.qkv.weight),
            qkv_bias=layer.qkv.bias.data.numpy(),
            out=_matrix(layer.out.weight),
            post_norm=norm_weight(layer.post_norm),
            gate_up=_matrix(layer.mlp.gate_up.weight),
            down=_matrix(layer.mlp.down.weight),
        )


class RowDecoder:
    """A `Decoder` around a `TextDecoder` in float32 on a CPU: one row goes through NumPy, where its attention can."""

    def __init__(self, decoder: TextDecoder) -> None:
        config = decoder.config
        self.decoder = decoder
        self._layers = [_Layer.of(layer) for layer in decoder.layers]
        self._norm = norm_weight(decoder.norm)
        self._head_DV = _matrix(decoder.head_VD)
        self._axes: NDArray[np.int64] = decoder.frequency_axes.numpy()
        self._frequencies: Array = decoder.inverse_frequencies.numpy()
        self._floor = config.hidden_size * config.rms_norm_eps

        heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self._scale_A11: Array = np.ones((heads + kv_heads, 1, 1), np.float32)
        self._scale_A11[:heads] = width**-0.5
        # One row's values, written anew in each layer, and how operators see them.
        self._hidden: Array = np.empty(config.hidden_size, np.float32)
        self._normed: Array = np.empty_like(self._hidden)
        self._delta: Array = np.empty_like(self._hidden)
        self._qkv: Array = np.empty((heads + 2 * kv_heads) * width, np.float32)
        num_rotated = (heads + kv_heads) * width
        halves = self._qkv[:num_rotated].reshape(heads + kv_heads, 2, width // 2)
        self._halves_A2E, self._swapped_A2E = halves, halves[:, ::-1]
        self._rotated_A2E: Array = np.empty_like(halves)
        self._turned_A2E: Array = np.empty_like(halves)
        rotated = self._rotated_A2E.reshape(-1)
        self._q_KGE = rotated[: heads * width].reshape(kv_heads, -1, width)
        self._k, self._v = rotated[heads * width :], self._qkv[num_rotated:]
        self._attended: Array = np.empty(heads * width, np.float32)
        self._attended_KGE = self._attended.reshape(kv_heads, -1, width)
        self._gate_up: Array = np.empty(2 * config.intermediate_size, np.float32)
        self._gate, self._up = np.split(self._gate_up, 2)
        self._activated: Array = np.empty_like(self._gate)

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays that are kept from step to step."""
        kept = (self._hidden, self._normed, self._delta, self._qkv, self._rotated_A2E, self._turned_A2E)
        return sum(array.nbytes for array in (*kept, self._attended, self._gate_up, self._activated))

    def embed(self, token_ids_T: Tensor) -> Tensor:
        return self.decoder.embed(token_ids_T)

    def forward(
        self, embeds_TD: Tensor, positions_3T: Tensor, attention: DecoderAttention, rows_S: Tensor | None = None
    ) -> Tensor:
        if len(embeds_TD) != 1 or not isinstance(attention, RowAttention) or not attention.can_attend_row:
            return self.decoder.forward(embeds_TD, positions_3T, attention, rows_S)
        # exp(-x) of a gate far below zero is infinite, and the gate then 0, as it should.
        with np.errstate(over="ignore"):
            return torch.from_numpy(self._forward(embeds_TD.numpy()[0], positions_3T.numpy()[:, 0], attention))

    def logits(self, hidden_SD: Tensor) -> Tensor:
        if len(hidden_SD) != 1:
            return self.decoder.logits(hidden_SD)
        return torch.from_numpy(np.dot(hidden_SD.numpy(), self._head_DV))

    def _forward(self, embeds: Array, positions_3: NDArray[np.int64], attention: RowAttention) -> Array:
        """The hidden row [1, D] after the last norm."""
        cos_A1E, sin_A2E = self._rotation(positions_3)
        hidden, normed, delta = self._hidden, self._normed, self._delta
        halves, swapped, rotated, turned = self._halves_A2E, self._swapped_A2E, self._rotated_A2E, self._turned_A2E
        hidden[:] = embeds
        for layer in self._layers:
            self._normalise(hidden, layer.input_norm, normed)
            np.dot(normed, layer.qkv, out=self._qkv)
            np.add(self._qkv, layer.qkv_bias, out=self._qkv)
            np.multiply(halves, cos_A1E, out=rotated)
            np.multiply(swapped, sin_A2E, out=turned)
            np.add(rotated, turned, out=rotated)
            attention.attend(layer.index, self._q_KGE, self._k, self._v, self._attended_KGE)
            np.dot(self._attended, layer.out, out=delta)
            np.add(hidden, delta, out=hidden)
            self._normalise(hidden, layer.post_norm, normed)
            np.dot(normed, layer.gate_up, out=self._gate_up)
            self._activate()
            np.dot(self._activated, layer.down, out=delta)
            np.add(hidden, delta, out=hidden)
        # A new array: the caller may keep it.
        last = np.empty((1, len(hidden)), np.float32)
        self._normalise(hidden, self._norm, last[0])
        return last

    def _rotation(self, positions_3: NDArray[np.int64]) -> tuple[Array, Array]:
        """Cosines [A, 1, E / 2] and signed sines [A, 2, E / 2]; those of queries carry attention's scale."""
        angles = positions_3.astype(np.float32)[self._axes] * self._frequencies
        sin = np.sin(angles)
        return np.cos(angles) * self._scale_A11, np.stack((-sin, sin)) * self._scale_A11

    def _normalise(self, x: Array, weight: Array, target: Array) -> None:
        """RMSNorm; the weight holds a factor sqrt(D), see `EagerRMSNorm`."""
        np.multiply(x, 1.0 / math.sqrt(np.dot(x, x) + self._floor), out=target)
        np.multiply(target, weight, out=target)

    def _activate(self) -> None:
        """SwiGLU: `gate / (1 + exp(-gate)) * up`."""
        activated = self._activated
        np.negative(self._gate, out=activated)
        np.exp(activated, out=activated)
        np.add(activated, 1.0, out=activated)
        np.divide(self._gate, activated, out=activated)
        np.multiply(activated, self._up, out=activated)


def _matrix(weight: Tensor) -> Array:
    """A weight [outputs, inputs] as an array [inputs, outputs] over the same memory."""
    array: Array = weight.data.t().numpy()
    return array


def norm_weight(norm: RMSNorm) -> Array:
    """The weight [D] of a norm, with the factor that `EagerRMSNorm` says."""
    assert isinstance(norm, EagerRMSNorm), "only float32 on a CPU has rows in NumPy"
    array: Array = norm.weight.data.numpy()
    return array
