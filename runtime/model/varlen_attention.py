"""Encoder attention through torch's `varlen_attn` (FlashAttention over segments): the CUDA path.

Reads nothing on the host: segments stay in their buffers on the device, and only the longest possible one is a number.
So a forward can be captured, and serves other segments in the same graph. Serves half precision, and heads of any
width that is a multiple of 8 (the published towers' are 80 wide), which FlashInfer's paged kernels do not.

Legend: P patches, H heads, D head width.
"""

import logging

from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from runtime.model.attention import Segments

# It tells its backend at each call.
logging.getLogger("torch.nn.attention.varlen").setLevel(logging.WARNING)


class VarlenEncoderAttention:
    """Attention within segments; empty ones cost a thread block that ends at once."""

    def prepare(self, segments: Segments) -> object:
        """The segments as they are."""
        return segments

    def forward(self, prepared: object, q_PHD: Tensor, k_PHD: Tensor, v_PHD: Tensor) -> Tensor:
        """Attention output [P, H, D] within each segment."""
        assert isinstance(prepared, Segments)
        bounds, longest = prepared.cu_seqlens_S, prepared.max_seqlen
        output = varlen_attn(q_PHD, k_PHD, v_PHD, bounds, bounds, longest, longest)
        assert isinstance(output, Tensor)
        return output
