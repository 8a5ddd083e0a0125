"""Compares the Triton kernels for steps of few rows with the layers, in Triton's interpreter. A process of its own:
`TRITON_INTERPRET=1` must be set before Triton is imported."""

import torch

from runtime.model.few_rows import FewRowsLayers
from runtime.model.layers import Place
from tests.unit.runtime.model.few_rows_layers import ODD, filled_layer, step

# The interpreter multiplies in NumPy, which has no bfloat16.
PLACE: Place = {"dtype": torch.float16, "device": torch.device("cpu")}


def kernels_agree_with_the_layer(few_rows: FewRowsLayers, num_rows: int) -> None:
    layer = filled_layer(ODD, PLACE)
    hidden, attended, cos, sin = step(ODD, num_rows, PLACE)
    ours = (*few_rows.before(layer, hidden, cos, sin), few_rows.after(layer, hidden, attended))
    theirs = (*layer.before(hidden, cos, sin), layer.after(hidden, attended))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=5e-3, atol=5e-3)


def a_row_does_not_depend_on_those_beside_it(few_rows: FewRowsLayers) -> None:
    layer = filled_layer(ODD, PLACE)
    hidden, attended, cos, sin = step(ODD, 8, PLACE)
    other = hidden.clone()
    other[3:] = 7
    alone = few_rows.after(layer, hidden[:3], attended[:3])
    assert torch.equal(few_rows.after(layer, other, attended)[:3], alone)
    q_THE, _, _ = few_rows.before(layer, hidden[:3], cos[:3], sin[:3])
    assert torch.equal(few_rows.before(layer, other, cos, sin)[0][:3], q_THE)


if __name__ == "__main__":
    kernels = FewRowsLayers(waits=False)
    for count in (1, 2, 5, 8):
        kernels_agree_with_the_layer(kernels, count)
    a_row_does_not_depend_on_those_beside_it(kernels)
    print("agreed")
