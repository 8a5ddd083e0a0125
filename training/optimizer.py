"""Muon for the matrices inside the blocks, AdamW for everything else, and the learning rate's course."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn


class MatrixMomentum:
    """Muon: momentum whose matrices are made nearly orthogonal (https://kellerjordan.github.io/posts/muon).

    Steps are scaled by 0.2 * sqrt(the longer side), so that one learning rate suits both optimizers
    (arXiv:2502.16982).
    Matrices of one shape are worked on together. Momentum is kept in bfloat16.
    """

    def __init__(self, parameters: Iterable[Tensor], *, momentum: float = 0.95, weight_decay: float = 0.02) -> None:
        self.momentum, self.weight_decay = momentum, weight_decay
        groups: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        for parameter in parameters:
            groups[tuple(parameter.shape)].append(parameter)
        self.groups = list(groups.values())
        self.buffers = [
            torch.zeros((len(group), *group[0].shape), dtype=torch.bfloat16, device=group[0].device)
            for group in self.groups
        ]

    @torch.no_grad()
    def step(self, learning_rate: Tensor) -> None:
        """One update from the parameters' gradients; `learning_rate` is a scalar on the device."""
        for group, buffer in zip(self.groups, self.buffers, strict=True):
            gradient = torch.stack(gradients_of(group))
            buffer.copy_(buffer.float().lerp_(gradient, 1 - self.momentum))
            update = orthogonal(gradient.lerp(buffer.float(), self.momentum))
            scale = 0.2 * max(update.shape[-2:]) ** 0.5
            torch._foreach_mul_(group, 1 - learning_rate * self.weight_decay)
            torch._foreach_sub_(group, list((update.float() * (learning_rate * scale)).unbind(0)))

    def state(self) -> list[Tensor]:
        return self.buffers

    def load_state(self, buffers: list[Tensor]) -> None:
        for mine, theirs in zip(self.buffers, buffers, strict=True):
            mine.copy_(theirs)


class Adam:
    """Adam (arXiv:1412.6980) whose rate and bias corrections are scalars on the device, so that a step can be
    captured.
    """

    def __init__(self, parameters: Sequence[Tensor], shares: list[float], *, betas: tuple[float, float]) -> None:
        """`shares` scales the learning rate of each parameter."""
        self.parameters, self.shares, self.betas = list(parameters), shares, betas
        self.means = [torch.zeros_like(parameter) for parameter in parameters]
        self.squares = [torch.zeros_like(parameter) for parameter in parameters]

    @torch.no_grad()
    def step(self, learning_rate: Tensor, correction: Tensor) -> None:
        """One update; `correction` is sqrt(1 - beta2^t) / (1 - beta1^t)."""
        gradients = gradients_of(self.parameters)
        torch._foreach_lerp_(self.means, gradients, 1 - self.betas[0])
        torch._foreach_mul_(self.squares, self.betas[1])
        torch._foreach_addcmul_(self.squares, gradients, gradients, 1 - self.betas[1])
        denominators = torch._foreach_sqrt(self.squares)
        torch._foreach_add_(denominators, 1e-8)
        updates = torch._foreach_div(self.means, denominators)
        torch._foreach_mul_(updates, self.shares)
        torch._foreach_mul_(updates, learning_rate * correction)
        torch._foreach_sub_(self.parameters, updates)

    def state(self) -> list[Tensor]:
        return [*self.means, *self.squares]

    def load_state(self, tensors: list[Tensor]) -> None:
        for mine, theirs in zip(self.state(), tensors, strict=True):
            mine.copy_(theirs)


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The gradients, which all of them must have."""
    gradients = []
    for parameter in parameters:
        assert parameter.grad is not None, parameter.shape
        gradients.append(parameter.grad)
    return gradients


def orthogonal(matrices: Tensor, steps: int = 5) -> Tensor:
    """About the nearest orthogonal matrix to each of [G, rows, columns], by a quintic Newton-Schulz
    iteration.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x: Tensor = matrices.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    nearest: Tensor = x.mT if is_tall else x
    return nearest


def split_parameters(network: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    """Matrices of blocks and merger; the patch embedding; and the rest (token embedding, norms, biases)."""
    matrices, patches, rest = [], [], []
    for name, parameter in network.named_parameters():
        if "patch_embed" in name:
            patches.append(parameter)
        elif parameter.dim() == 2 and "embed" not in name:
            matrices.append(parameter)
        else:
            rest.append(parameter)
    return matrices, patches, rest


def learning_rate(step: int, share: float, *, peak: float, warmup: int, decay: float) -> float:
    """Warm-up over `warmup` steps, a plateau, and over the last `decay` of the run a straight line to nearly
    zero.

    `share` is how much of the run's time is spent, 0 to 1.
    """
    rate = peak * min(1.0, (step + 1) / warmup)
    return rate * min(1.0, max((1 - share) / decay, 0.01))
