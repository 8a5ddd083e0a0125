"""Products with weights in oneDNN's own layout, for float32 on a CPU: torch brings the library, but asks it for half
precision only.

Its operators for packed weights are Inductor's, and not public: `is_available` says whether this torch has them, and
`F.linear` is the plain twin. A product's code is made at its first number of rows (one to three milliseconds) and kept,
as many as 1,024 of them; so rows are padded to a number out of few.

Legend: ... leading dimensions, I inputs, O outputs.
"""

import torch
from torch import Tensor

# So many rows are exact; beyond, up to a seventh more are computed.
MAX_EXACT_ROWS = 16

# How many rows a weight is packed for: the layout is as good for any other number (docs/decisions.md).
_TYPICAL_ROWS = 32


def is_available() -> bool:
    """Whether this torch has the operators."""
    has_library: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_library and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def padded_rows(num_rows: int) -> int:
    """The number of rows that a product of `num_rows` is computed with: 8 different ones from each power of two to the
    next."""
    if num_rows <= MAX_EXACT_ROWS:
        return num_rows
    step = 1 << ((num_rows - 1).bit_length() - 4)
    return -(-num_rows // step) * step


class PackedWeight:
    """One weight [O, I], packed."""

    def __init__(self, weight: Tensor) -> None:
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _TYPICAL_ROWS)

    @property
    def nbytes(self) -> int:
        return self._packed.nbytes

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x @ weight.T + bias`: [..., I] -> [..., O]."""
        rows = x.flatten(0, -2) if x.dim() > 2 else x
        num_rows = len(rows)
        num_padded = padded_rows(num_rows)
        if num_padded > num_rows:
            padded = rows.new_empty((num_padded, rows.shape[1]))
            padded[:num_rows] = rows
            padded[num_rows:] = 0
            rows = padded
        product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, bias, "none", [], "")
        if num_padded > num_rows:
            product = product[:num_rows]
        return product.view(*x.shape[:-1], -1) if x.dim() > 2 else product
