"""Weights made up on the device from a seed, for measurements without a checkpoint. Knows names, no architecture.

The layers' matrices are drawn wider than a training's initialisation, and biases and norms at random: with a default
initialisation a random model gives one token whatever it sees, and a comparison of tokens passes whatever is broken.
The factors are those of the tests' checkpoints (docs/decisions.md).
"""

import torch

from runtime.model.layers import WeightTargets

# Deviation of transformers' initialisation, and how much wider the layers' matrices are.
INITIAL_DEVIATION = 0.02
TEXT_FACTOR = 3.0
VISION_FACTOR = 2.0
SMALL_DEVIATION = 0.1


def fill_randomly(targets: WeightTargets, *, dtype: torch.dtype, device: torch.device, seed: int) -> None:
    """Writes every target, in the order of their names: the same seed gives the same weights on the same device."""
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name in sorted(targets):
            target = targets[name]
            values = torch.empty(target.shape, dtype=dtype, device=device)
            mean, deviation = _distribution(name, len(target.shape))
            target.write(values.normal_(mean, deviation, generator=generator))
            del values
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _distribution(name: str, num_dims: int) -> tuple[float, float]:
    """Mean and deviation: norms about 1, biases about 0, layers' matrices wider than embedding and head."""
    if name.endswith(".bias"):
        return 0.0, SMALL_DEVIATION
    if num_dims == 1:
        return 1.0, SMALL_DEVIATION
    if ".layers." in name:
        return 0.0, INITIAL_DEVIATION * TEXT_FACTOR
    if name.startswith("visual."):
        return 0.0, INITIAL_DEVIATION * VISION_FACTOR
    return 0.0, INITIAL_DEVIATION
