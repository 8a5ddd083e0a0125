"""Building blocks against their formulas, and fast forms against plain ones."""

import pytest
import torch
import torch.nn.functional as F

from runtime.model.layers import (
    EagerRMSNorm,
    Linear,
    Place,
    RMSNorm,
    SwiGLU,
    apply_rotary,
    inverse_frequencies,
    rms_norm,
    rotary_tables,
)

FLOAT32 = Place(dtype=torch.float32, device=torch.device("cpu"))
BFLOAT16 = Place(dtype=torch.bfloat16, device=torch.device("cpu"))


def fill(module: Linear | RMSNorm | SwiGLU, prefix: str = "x") -> dict[str, torch.Tensor]:
    weights = {name: torch.randn(target.shape) for name, target in module.targets(prefix).items()}
    for name, target in module.targets(prefix).items():
        target.write(weights[name])
    return weights


@pytest.mark.parametrize("dim", [48, 64])
def test_both_norms_equal_the_formula(dim: int) -> None:
    x = torch.randn(5, dim) * 3
    for norm in (RMSNorm(dim, eps=1e-6, **FLOAT32), EagerRMSNorm(dim, eps=1e-6, **FLOAT32)):
        weight = fill(norm)["x.weight"]
        expected = x / torch.sqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * weight

        torch.testing.assert_close(norm(x).double(), expected, rtol=1e-5, atol=1e-6)


def test_norms_of_zeros_are_zeros() -> None:
    norm = EagerRMSNorm(16, eps=1e-6, **FLOAT32)
    fill(norm)

    assert not norm(torch.zeros(2, 16)).any()


def test_norm_is_chosen_by_place() -> None:
    assert isinstance(rms_norm(8, eps=1e-6, **FLOAT32), EagerRMSNorm)
    assert not isinstance(rms_norm(8, eps=1e-6, **BFLOAT16), EagerRMSNorm)


@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(8, 24), (24, 8)])
@pytest.mark.parametrize("place", [FLOAT32, BFLOAT16])
def test_linear_gives_the_same_in_both_layouts(num_inputs: int, num_outputs: int, place: Place) -> None:
    linear = Linear(num_inputs, num_outputs, bias=True, **place)
    weights = {name: weight.to(place["dtype"]) for name, weight in fill(linear).items()}
    x = torch.randn(3, num_inputs, dtype=place["dtype"])

    torch.testing.assert_close(linear(x), F.linear(x, weights["x.weight"], weights["x.bias"]))


def test_fused_projection_equals_its_parts() -> None:
    fused = Linear(8, 4 + 6 + 2, bias=True, **FLOAT32)
    targets = fused.split_targets({"q": 4, "k": 6, "v": 2})
    weights = {name: torch.randn(target.shape) for name, target in targets.items()}
    for name, target in targets.items():
        target.write(weights[name])
    x = torch.randn(3, 8)

    parts = [F.linear(x, weights[f"{part}.weight"], weights[f"{part}.bias"]) for part in "qkv"]

    torch.testing.assert_close(fused(x), torch.cat(parts, dim=-1))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("multiple", [1, 128])
def test_fused_and_padded_mlp_equals_the_separate_one(bias: bool, multiple: int) -> None:
    mlp = SwiGLU(16, 100, bias=bias, multiple=multiple, **FLOAT32)
    weights = fill(mlp)
    x = torch.randn(3, 16)

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weights[f"x.{name}.weight"], weights.get(f"x.{name}.bias"))

    expected = linear("down_proj", F.silu(linear("gate_proj", x)) * linear("up_proj", x))

    torch.testing.assert_close(mlp(x), expected, rtol=1e-5, atol=1e-4)
    assert mlp.padded_size == (128 if multiple == 128 else 100)


def test_rotation_turns_pairs_by_their_angles() -> None:
    angles = torch.tensor([[0.0, torch.pi / 2]])
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])

    rotated = apply_rotary(x, *rotary_tables(angles))

    torch.testing.assert_close(rotated, torch.tensor([[1.0, -4.0, 3.0, 2.0]]))


def test_rotation_works_in_float32_and_keeps_the_type() -> None:
    x = torch.randn(4, 2, 16, dtype=torch.bfloat16)
    angles = torch.arange(4)[:, None, None] * 1000.0 * inverse_frequencies(16, 1e4, device=torch.device("cpu"))
    tables = rotary_tables(angles)

    rotated = apply_rotary(x, *tables)

    assert rotated.dtype == torch.bfloat16
    assert torch.equal(rotated, apply_rotary(x.float(), *tables).bfloat16())
