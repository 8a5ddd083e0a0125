"""Runs the part of a tower between two attentions through Inductor. Knows Dynamo's rules, and no model.

Attention stays outside: kernels of its own, with host work of their own, that no compiler looks into. What is compiled
takes layers as arguments, so that one compilation serves all layers, and the number of rows is left open, so that it
serves all buckets: two compilations in all, since Dynamo treats one row as a shape of its own. Inductor's own graphs
stay off: ours hold the attention too.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

ResultT = TypeVar("ResultT")

# What stands between two layers has these two first, then tensors whose first dimension is rows.
NUM_LAYERS_GIVEN = 2


def compiled(function: Callable[..., ResultT], *, backend: str = "inductor") -> Callable[..., ResultT]:
    """`function`, a free function of two layers and some tensors with as many rows each, compiled at its first call.

    `backend`: of Dynamo's; tests take one that compiles nothing.
    """
    # Without a break, or it fails: a break would compile pieces and recompile them for each layer.
    run = torch.compile(function, backend=backend, fullgraph=True)

    def call(*arguments: object) -> ResultT:
        for tensor in arguments[NUM_LAYERS_GIVEN:]:
            assert isinstance(tensor, Tensor)
            if tensor.shape[0] > 1:
                torch._dynamo.mark_dynamic(tensor, 0)
        return run(*arguments)

    return call
