"""Products with weights in oneDNN's own layout, for float32 on a CPU: torch brings the library, but asks it for half
precision only.

Its operators for packed weights are Inductor's, and not public: `is_available` says whether this torch has them, and
`F.linear` is the plain twin. A product's code is made at its first number of rows, takes one to three milliseconds and
half a MB, and stays: so there are few such numbers, all of them made with the weight, before memory is read.

Legend: ... leading dimensions, I inputs, O outputs.
"""

import torch
from torch import Tensor

# Products are computed with these numbers of rows, one after the other where there are more.
ROWS = (2, 4, 8, 16, 32, 96, 128, 256)

# What one more product costs, in rows, with what it takes to put the results together.
_PIECE_ROWS = 10

# How many rows a weight is packed for: the layout is as good for any other number (docs/decisions.md).
_TYPICAL_ROWS = 32


def is_available() -> bool:
    """Whether this torch has the operators."""
    has_library: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_library and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _cheapest() -> tuple[tuple[int, ...], ...]:
    """For each number of rows below the largest of `ROWS`, the pieces that cost least, large ones first."""
    cheapest: list[tuple[int, ...]] = [()]
    for num_rows in range(1, ROWS[-1]):
        choices = [(rows, *cheapest[max(0, num_rows - rows)]) for rows in reversed(ROWS)]
        cheapest.append(min(choices, key=lambda pieces: sum(pieces) + _PIECE_ROWS * len(pieces)))
    return tuple(cheapest)


_CHEAPEST = _cheapest()


def pieces_of(num_rows: int) -> list[int]:
    """The numbers of rows that a product of `num_rows` is computed with; the last may have room for more rows."""
    return [ROWS[-1]] * (num_rows // ROWS[-1]) + list(_CHEAPEST[num_rows % ROWS[-1]])


class PackedWeight:
    """One weight [O, I], packed."""

    def __init__(self, weight: Tensor, *, has_bias: bool) -> None:
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _TYPICAL_ROWS)
        num_outputs, num_inputs = weight.shape
        bias = weight.new_zeros(num_outputs) if has_bias else None
        for rows in ROWS:
            self.multiply(weight.new_zeros((rows, num_inputs)), bias)

    @property
    def nbytes(self) -> int:
        return self._packed.nbytes

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x @ weight.T + bias`: [..., I] -> [..., O]."""
        rows = x.flatten(0, -2) if x.dim() > 2 else x
        num_rows = len(rows)
        pieces = pieces_of(num_rows)
        num_padded = sum(pieces)
        if num_padded > num_rows:
            padded = rows.new_empty((num_padded, rows.shape[1]))
            padded[:num_rows] = rows
            padded[num_rows:] = 0
            rows = padded
        if len(pieces) == 1:
            product = self.multiply(rows, bias)
        else:
            product = torch.cat([self.multiply(piece, bias) for piece in torch.split(rows, pieces)])
        if num_padded > num_rows:
            product = product[:num_rows]
        return product.view(*x.shape[:-1], -1) if x.dim() > 2 else product

    def multiply(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """`product` of a number of rows that is one of `ROWS`."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, bias, "none", [], "")
        return product
