"""Compares the decoder's Triton kernels with the layers, in Triton's interpreter. A process of its own:
`TRITON_INTERPRET=1` must be set before Triton is imported."""

import torch
from torch import Tensor

from runtime.model.attention import AttentionBatch
from runtime.model.layers import Place
from runtime.model.triton_any_rows import TritonAnyRows
from runtime.model.triton_one_row import TritonOneRow
from tests.unit.runtime.model.filled_layer import ODD, filled_layer, step

# The interpreter multiplies in NumPy, which has no bfloat16.
PLACE: Place = {"dtype": torch.float16, "device": torch.device("cpu")}


BLOCK_SIZE = 3


class Sums:
    """In the place of attention: queries plus keys and values as the cache has them, which is block-major."""

    def __init__(self, slots_T: Tensor) -> None:
        self.slots_T = slots_T
        self.blocks = torch.zeros(5, 2, 2, BLOCK_SIZE, ODD.num_key_value_heads, ODD.head_dim, dtype=torch.float16)

    def plan(self, batch: AttentionBatch) -> None: ...

    def anticipate(self) -> None: ...

    def forward(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        blocks_T, offsets_T = self.slots_T // BLOCK_SIZE, self.slots_T % BLOCK_SIZE
        self.blocks[blocks_T, layer, 0, offsets_T] = k_TKD
        self.blocks[blocks_T, layer, 1, offsets_T] = v_TKD
        return self.sums(layer, q_THD)

    def sums(self, layer: int, q_THD: Tensor) -> Tensor:
        blocks_T, offsets_T = self.slots_T // BLOCK_SIZE, self.slots_T % BLOCK_SIZE
        keys, values = (self.blocks[blocks_T, layer, kind, offsets_T] for kind in range(2))
        return (q_THD + 2 * keys + 3 * values).contiguous()


class PlacedSums(Sums):
    def place(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.blocks[:, layer], self.slots_T

    def attend(self, layer: int, q_THD: Tensor) -> Tensor:
        return self.sums(layer, q_THD)


def kernels_agree_with_the_layer(kernels: TritonOneRow | TritonAnyRows, num_rows: int) -> None:
    layer = filled_layer(ODD, PLACE)
    hidden, attended, cos, sin = step(ODD, PLACE, num_rows)
    ours = (*kernels.before(layer, hidden, cos, sin), kernels.after(layer, hidden, attended))
    theirs = (*layer.before(hidden, cos, sin), layer.after(hidden, attended))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=5e-3, atol=5e-3)


def layers_agree_around_attention(kernels: TritonOneRow | TritonAnyRows, attention: Sums) -> None:
    """Two layers around an attention that reads its cache; `PlacedSums` leaves storing to the kernels."""
    layers = [filled_layer(ODD, PLACE) for _ in range(2)]
    layers[1].index = 1
    num_rows = len(attention.slots_T)
    hidden, _, cos, sin = step(ODD, PLACE, num_rows)
    given = hidden.clone()
    plain = Sums(attention.slots_T)
    expected = hidden
    for layer in layers:
        expected = layer.after(expected, plain.forward(layer.index, *layer.before(expected, cos, sin)))
    found = kernels.forward(layers, hidden, cos, sin, attention)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(attention.blocks, plain.blocks, rtol=5e-3, atol=5e-3)
    assert torch.equal(hidden, given)
    wanted = torch.tensor([num_rows - 1, 0])[:num_rows]
    some = kernels.forward(layers, hidden, cos, sin, attention, wanted)
    torch.testing.assert_close(some, expected[wanted], rtol=2e-2, atol=2e-2)
    assert all(int((layer[:, 0].abs().sum((-1, -2)) > 0).sum()) == num_rows for layer in plain.blocks.unbind(1))


if __name__ == "__main__":
    row, rows = TritonOneRow(waits=False), TritonAnyRows()
    kernels_agree_with_the_layer(row, 1)
    for slot in (0, BLOCK_SIZE, 5 * BLOCK_SIZE - 1):
        layers_agree_around_attention(row, Sums(torch.tensor([slot])))
        layers_agree_around_attention(row, PlacedSums(torch.tensor([slot])))
    for count in (1, 2, 5):
        kernels_agree_with_the_layer(rows, count)
        slots = torch.tensor([5 * BLOCK_SIZE - 1, 0, BLOCK_SIZE, 4, 7][:count])
        layers_agree_around_attention(rows, Sums(slots))
        layers_agree_around_attention(rows, PlacedSums(slots))
    for kernels in (row, rows):
        kernels.warm_up(filled_layer(ODD, PLACE))
    print("agreed")
