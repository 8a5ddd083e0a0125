"""Building blocks that both towers share, and how a checkpoint's tensors reach them. Knows no model family.

Modules hold no random initialisation: their memory is uninitialised until the loader has written every target.

Legend: ... leading dimensions, I inputs, O outputs, D hidden or head width, F width of the MLP.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.model.packed import PackedWeight


@dataclass(frozen=True, kw_only=True)
class WeightTarget:
    """Where one tensor of a checkpoint goes: the shape it must have, and what writes it (casting to our type)."""

    shape: tuple[int, ...]
    write: Callable[[Tensor], object]

    @classmethod
    def into(cls, place: Tensor) -> "WeightTarget":
        """A target that copies into `place`, a parameter or a part of one."""
        return cls(shape=tuple(place.shape), write=place.copy_)


WeightTargets: TypeAlias = dict[str, WeightTarget]


class Place(TypedDict):
    """Where a module's weights live, and in which type."""

    dtype: torch.dtype
    device: torch.device


class Linear(nn.Module):
    """`x @ weight.T + bias`, weight [O, I].

    In float32 on a CPU, weights with more outputs than inputs are laid out column by column: a product with one to
    four rows then takes 0.4-0.9 of the time, and with many rows no longer (docs/decisions.md). Values are the same.
    `pack` is for the same place.
    """

    # Set by `pack`: the weight for products of several rows, or of any if it is the only one.
    packed: PackedWeight | None = None
    is_only_packed = False

    def __init__(self, in_features: int, out_features: int, *, bias: bool, **place: Unpack[Place]) -> None:
        super().__init__()
        self.weight = matrix(out_features, in_features, **place)
        self.bias = nn.Parameter(torch.empty(out_features, **place), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        if self.packed is not None and (self.is_only_packed or len(x) > 1):
            return self.packed.product(x, self.bias)
        return F.linear(x, self.weight, self.bias)

    def pack(self, *, keep: bool) -> None:
        """Packs the weight, once it is loaded. `keep`: and keeps it as it is, for products of one row."""
        self.packed = PackedWeight(self.weight, has_bias=self.bias is not None)
        self.is_only_packed = not keep
        if not keep:
            self.weight = nn.Parameter(self.weight.new_empty((0, self.weight.shape[1])), requires_grad=False)

    def targets(self, prefix: str) -> WeightTargets:
        """The tensors `prefix.weight` and, where there is one, `prefix.bias`."""
        return self.split_targets({prefix: self.weight.shape[0]})

    def split_targets(self, parts: dict[str, int]) -> WeightTargets:
        """For a projection fused from several: names and outputs of the parts, in their order in the rows."""
        targets: WeightTargets = {}
        start = 0
        for prefix, num_outputs in parts.items():
            rows = slice(start, start + num_outputs)
            targets[f"{prefix}.weight"] = WeightTarget.into(self.weight.data[rows])
            if self.bias is not None:
                targets[f"{prefix}.bias"] = WeightTarget.into(self.bias.data[rows])
            start += num_outputs
        return targets


def matrix(num_rows: int, num_columns: int, **place: Unpack[Place]) -> nn.Parameter:
    """An uninitialised matrix [num_rows, num_columns], laid out as `Linear` says."""
    if is_eager_float32(place) and num_rows > num_columns:
        return nn.Parameter(torch.empty(num_columns, num_rows, **place).t(), requires_grad=False)
    return nn.Parameter(torch.empty(num_rows, num_columns, **place), requires_grad=False)


def is_eager_float32(place: Place) -> bool:
    """Float32 on a CPU: operators run one by one, and each costs microseconds."""
    return place["device"].type == "cpu" and place["dtype"] == torch.float32


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x ** 2) + eps) * weight` (arXiv:1910.07467), through torch's operator, which a compiler fuses."""

    def __init__(self, dim: int, *, eps: float, **place: Unpack[Place]) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim, **place), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def targets(self, prefix: str) -> WeightTargets:
        return {f"{prefix}.weight": WeightTarget.into(self.weight.data)}


class EagerRMSNorm(RMSNorm):
    """The same norm in four small operators instead of torch's eight, for float32 on a CPU: half of the time
    (docs/decisions.md). With `n = |x|`: `x / hypot(n, sqrt(D * eps)) * (weight * sqrt(D))`; `weight` holds the product.
    """

    floor: Tensor

    def __init__(self, dim: int, *, eps: float, **place: Unpack[Place]) -> None:
        super().__init__(dim, eps=eps, **place)
        self.scale = math.sqrt(dim)
        self.register_buffer("floor", torch.tensor(math.sqrt(dim * eps), **place), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x.div(norm.hypot_(self.floor)).mul_(self.weight)

    def targets(self, prefix: str) -> WeightTargets:
        def write(weight: Tensor) -> None:
            self.weight.data.copy_(weight).mul_(self.scale)

        return {f"{prefix}.weight": WeightTarget(shape=tuple(self.weight.shape), write=write)}


def rms_norm(dim: int, *, eps: float, **place: Unpack[Place]) -> RMSNorm:
    """The faster of the two norms for this place."""
    return (EagerRMSNorm if is_eager_float32(place) else RMSNorm)(dim, eps=eps, **place)


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))` (arXiv:2002.05202), gate and up in one product.

    `multiple`: the MLP's width is padded with zeros to a multiple of it, which changes no result: published models are
    3420 wide, for which cuBLAS has no good kernel (docs/decisions.md).
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        multiple: int = 1,
        **place: Unpack[Place],
    ) -> None:
        super().__init__()
        self.intermediate_size = intermediate_size
        self.padded_size = -(-intermediate_size // multiple) * multiple
        self.gate_up = Linear(hidden_size, 2 * self.padded_size, bias=bias, **place)
        self.down = Linear(self.padded_size, hidden_size, bias=bias, **place)
        if self.padded_size > intermediate_size:
            self.gate_up.weight.data.zero_()
            self.down.weight.data.zero_()
            if self.gate_up.bias is not None:
                self.gate_up.bias.data.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        gate, up = self.gate_up.forward(x).chunk(2, dim=-1)
        return self.down.forward(F.silu(gate).mul_(up))

    def targets(self, prefix: str) -> WeightTargets:
        targets = self.down.targets(f"{prefix}.down_proj")
        targets[f"{prefix}.down_proj.weight"] = WeightTarget.into(self.down.weight.data[:, : self.intermediate_size])
        for name, start in (("gate_proj", 0), ("up_proj", self.padded_size)):
            rows = slice(start, start + self.intermediate_size)
            targets[f"{prefix}.{name}.weight"] = WeightTarget.into(self.gate_up.weight.data[rows])
            if self.gate_up.bias is not None:
                targets[f"{prefix}.{name}.bias"] = WeightTarget.into(self.gate_up.bias.data[rows])
        return targets


def inverse_frequencies(dim: int, theta: float, *, device: torch.device) -> Tensor:
    """`theta ** (-2 i / dim)` for i < dim / 2, float32 [dim / 2] (arXiv:2104.09864)."""
    # On the CPU whatever the device: powers differ between devices in the last bit, and positions multiply it.
    return (1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)).to(device)


def rotary_tables(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Float32 [..., D / 2] -> cosines [..., D] and sines [..., D / 2] of a rotation of the pairs (i, i + D / 2)."""
    cos = angles.cos()
    return torch.cat((cos, cos), dim=-1), angles.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [..., D] by tables that broadcast to it, in float32; gives x's type."""
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    # One result and no other temporary: on a CPU, fresh pages cost more than the arithmetic (docs/decisions.md).
    rotated = wide * cos
    rotated_first, rotated_second = rotated.chunk(2, dim=-1)
    rotated_first.addcmul_(second, sin, value=-1)
    rotated_second.addcmul_(first, sin)
    return rotated.to(x.dtype)
