"""Keeps sampling within grammars: masks of a step's sequences, filled on the host and applied to logits on the device.

One copy to the device a step, of one bit a token, and only for sequences that have a grammar. On a GPU the host fills
the masks while the device still runs the forward. Knows no sampling parameters and no schedule.

Legend: S sequences that sample in this step, C of them with a grammar, V vocabulary, W words of 32 bits, B bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runtime.processing.grammar import Matcher
from runtime.processing.grammar_compiler import GrammarCompiler


@dataclass(frozen=True, kw_only=True)
class TokenMasks:
    """Which tokens may come next, on the device.

    `positions_C`: of the sequences with a grammar among those that sample; `packed_CB`: uint8, bit `i % 8` of byte
    `i // 8` is that of token `i`.
    """

    positions_C: Tensor
    packed_CB: Tensor

    def apply(self, logits_SV: Tensor) -> Tensor:
        """A copy of the logits, with minus infinity for what no grammar allows."""
        forbidden_CV = unpack_bits(self.packed_CB, logits_SV.shape[-1]).logical_not_()
        if len(self.positions_C) == len(logits_SV):
            return logits_SV.masked_fill(forbidden_CV, float("-inf"))
        masked_CV = logits_SV.index_select(0, self.positions_C).masked_fill_(forbidden_CV, float("-inf"))
        return logits_SV.index_copy(0, self.positions_C, masked_CV)


class GrammarMasks:
    """Fills masks for at most `num_rows` sequences at once, in buffers that are made once."""

    def __init__(self, compiler: GrammarCompiler, *, num_rows: int, device: torch.device) -> None:
        self._compiler = compiler
        self._device = device
        # int32, as the matchers want it; pinned, so that the copy does not wait for the device.
        is_on_host = device.type == "cpu"
        self._packed_cpu_NW = torch.zeros((num_rows, compiler.num_words), dtype=torch.int32, pin_memory=not is_on_host)
        self._packed_NW = self._packed_cpu_NW if is_on_host else torch.zeros_like(self._packed_cpu_NW, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return self._packed_NW.nbytes

    def matcher(self, grammar: str) -> Matcher:
        """A matcher at the beginning of a grammar, which is compiled here if nobody did so before.

        Raises:
            GrammarError: it cannot be served.
        """
        return self._compiler.matcher(grammar)

    def fill(self, matchers: Sequence[Matcher | None]) -> TokenMasks | None:
        """The masks of a step's sequences, `None` if none of them has a grammar. Valid until the next call."""
        positions = [position for position, matcher in enumerate(matchers) if matcher is not None]
        if not positions:
            return None
        packed_cpu_CW = self._packed_cpu_NW[: len(positions)]
        self._compiler.fill_masks([matcher for matcher in matchers if matcher is not None], packed_cpu_CW.numpy())
        packed_CW = self._packed_NW[: len(positions)]
        if packed_CW.device != packed_cpu_CW.device:
            packed_CW.copy_(packed_cpu_CW, non_blocking=True)
        positions_C = torch.from_numpy(np.array(positions, dtype=np.int64)).to(self._device, non_blocking=True)
        return TokenMasks(positions_C=positions_C, packed_CB=packed_CW.view(torch.uint8))


def unpack_bits(packed_CB: Tensor, num_bits: int) -> Tensor:
    """Bits [C, num_bits] as booleans: `i` is bit `i % 8` of byte `i // 8`, as NumPy unpacks with the order "little"."""
    # Made on the device: a list of bits would be copied there, and the step would wait for it.
    bits_8 = torch.arange(8, dtype=torch.uint8, device=packed_CB.device)
    return (packed_CB.unsqueeze(-1) >> bits_8).bitwise_and_(1).view(torch.bool).flatten(1)[:, :num_bits]
