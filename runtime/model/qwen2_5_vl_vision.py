"""The vision encoder of Qwen2.5-VL with its projector: pixels to rows of the decoder's width (arXiv:2502.13923).

Knows no files and no budgets. Everything data-dependent comes in `EncoderInputs`, so that a forward has the shapes of
its inputs alone, reads nothing back, and can be captured in a graph.

Legend: P patches, C values of a patch (channels * side * side), T output tokens, M patches of a token, D hidden,
H heads, E head width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias, Unpack

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from runtime.checkpoint import ProcessorConfig, VisionConfig
from runtime.model.attention import EncoderAttention, Segments
from runtime.model.compiled import compiled
from runtime.model.layers import (
    Linear,
    Place,
    SwiGLU,
    WeightTarget,
    WeightTargets,
    apply_rotary,
    inverse_frequencies,
    rms_norm,
    rotary_tables,
)
from runtime.model.vision_layout import EncoderLayout

QueryKeyValue: TypeAlias = tuple[Tensor, Tensor, Tensor]  # [P, H, E] each
Between: TypeAlias = Callable[
    ["VisionBlock", "VisionBlock", Tensor, Tensor, Tensor, Tensor], tuple[Tensor, QueryKeyValue]
]

NORM_EPS = 1e-6
ROPE_THETA = 10_000.0


@dataclass(frozen=True, kw_only=True)
class EncoderInputs:
    """One forward's inputs, on the encoder's device; see `EncoderLayout` for what the indices mean.

    `patches_PC`: uint8, in merge blocks, channel-major, as `patchify` gives them.
    """

    patches_PC: Tensor
    position_ids_P2: Tensor
    window_index_T: Tensor
    reverse_index_T: Tensor
    full: Segments
    windows: Segments


def encoder_inputs(patches_PC: Tensor, layout: EncoderLayout, *, device: torch.device) -> EncoderInputs:
    """Inputs for an eager forward: the layout's arrays as tensors on `device`."""

    def tensor(array: NDArray[np.int32] | NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    assert len(patches_PC) == len(layout.position_ids_P2), "patches do not fill the layout"
    return EncoderInputs(
        patches_PC=patches_PC.to(device),
        position_ids_P2=tensor(layout.position_ids_P2),
        window_index_T=tensor(layout.window_index_T),
        reverse_index_T=tensor(layout.reverse_index_T),
        full=Segments(cu_seqlens_S=tensor(layout.cu_seqlens), max_seqlen=layout.max_seqlen),
        windows=Segments(cu_seqlens_S=tensor(layout.cu_window_seqlens), max_seqlen=layout.max_window_seqlen),
    )


def patch_grid(pixels_HWC: Tensor, patch_size: int, merge_size: int) -> Tensor:
    """A view of an image uint8 [height, width, 3] whose elements come in the order of its patches' values: [rows,
    columns, merge_size, merge_size, 3, patch_size, patch_size]."""
    height, width, channels = pixels_HWC.shape
    unit = patch_size * merge_size
    assert height % unit == width % unit == 0, f"image of {height} x {width} pixels, not in steps of {unit}"
    blocks = pixels_HWC.view(height // unit, merge_size, patch_size, width // unit, merge_size, patch_size, channels)
    return blocks.permute(0, 3, 1, 4, 6, 2, 5)


def patchify(pixels_HWC: Tensor, patch_size: int, merge_size: int) -> Tensor:
    """An image uint8 [height, width, 3] cut into patches uint8 [P, 3 * patch_size ** 2], in merge blocks."""
    return patch_grid(pixels_HWC, patch_size, merge_size).reshape(-1, pixels_HWC.shape[2] * patch_size**2)


class VisionEncoder(nn.Module):
    """Patches to output rows.

    Pixels are normalised here, in float32: `(x / 255 - mean) / std`. Images repeat their frame in time, so the patch
    embedding's kernel is summed over the frames at load, and is one product.
    """

    pixel_scale_C: Tensor
    pixel_shift_C: Tensor
    inverse_frequencies: Tensor

    def __init__(
        self,
        config: VisionConfig,
        processor: ProcessorConfig,
        attention: EncoderAttention,
        *,
        mlp_multiple: int = 1,
        **place: Unpack[Place],
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype, device = place["dtype"], place["device"]
        self.attention = attention
        values = config.in_channels * config.patch_size**2
        head_dim = config.hidden_size // config.num_heads
        self.patch_embed = Linear(values, config.hidden_size, bias=False, **place)
        self.blocks = tuple(VisionBlock(config, mlp_multiple=mlp_multiple, **place) for _ in range(config.depth))
        self.registered_blocks = nn.ModuleList(self.blocks)
        self.merger = PatchMerger(config, **place)
        scale, shift = _normalisation(processor, config.patch_size**2)
        self.register_buffer("pixel_scale_C", scale.to(device), persistent=False)
        self.register_buffer("pixel_shift_C", shift.to(device), persistent=False)
        self.register_buffer(
            "inverse_frequencies", inverse_frequencies(head_dim // 2, ROPE_THETA, device=device), persistent=False
        )
        self.between: Between = between

    def compile_layers(self) -> None:
        """Runs what lies between two attentions through Inductor from now on: one function, which serves every block
        and every budget."""
        self.between = compiled(between)

    def forward(self, inputs: EncoderInputs) -> Tensor:
        """Rows [T, out_hidden_size] in the images' order, padding last, in the encoder's type."""
        window_index = inputs.window_index_T
        patches = _permute(inputs.patches_PC, window_index)
        pixels = torch.addcmul(self.pixel_shift_C, patches.float(), self.pixel_scale_C)
        hidden_PD = self.patch_embed.forward(pixels.to(self.dtype))

        positions = _permute(inputs.position_ids_P2, window_index)
        angles = (positions.float().unsqueeze(-1) * self.inverse_frequencies).flatten(1)
        cos, sin = rotary_tables(angles[:, None, None, :])

        full = self.attention.prepare(inputs.full)
        windows = self.attention.prepare(inputs.windows)
        prepared = [
            full if index in self.config.fullatt_block_indexes else windows for index in range(len(self.blocks))
        ]
        qkv = self.blocks[0].before(hidden_PD, cos, sin)
        for segments, (block, following) in zip(prepared, pairwise(self.blocks), strict=False):
            attended_PHE = self.attention.forward(segments, *qkv)
            hidden_PD, qkv = self.between(block, following, hidden_PD, attended_PHE, cos, sin)
        hidden_PD = self.blocks[-1].after(hidden_PD, self.attention.forward(prepared[-1], *qkv))
        return self.merger.forward(hidden_PD).index_select(0, inputs.reverse_index_T)

    def targets(self, prefix: str) -> WeightTargets:
        """Where a checkpoint's tensors go, by published name."""
        targets = {f"{prefix}.patch_embed.proj.weight": self._kernel_target()}
        for index, block in enumerate(self.blocks):
            targets |= block.targets(f"{prefix}.blocks.{index}")
        return targets | self.merger.targets(f"{prefix}.merger")

    def _kernel_target(self) -> WeightTarget:
        config = self.config
        side = config.patch_size

        def write(kernel: Tensor) -> None:
            self.patch_embed.weight.data.copy_(kernel.float().sum(dim=2).flatten(1))

        shape = (config.hidden_size, config.in_channels, config.temporal_patch_size, side, side)
        return WeightTarget(shape=shape, write=write)


class VisionBlock(nn.Module):
    """Attention within segments, then a gated MLP, each behind a norm and around a residual."""

    def __init__(self, config: VisionConfig, *, mlp_multiple: int, **place: Unpack[Place]) -> None:
        super().__init__()
        width = config.hidden_size
        self.num_heads = config.num_heads
        self.norm1 = rms_norm(width, eps=NORM_EPS, **place)
        self.norm2 = rms_norm(width, eps=NORM_EPS, **place)
        self.qkv = Linear(width, 3 * width, bias=True, **place)
        self.proj = Linear(width, width, bias=True, **place)
        self.mlp = SwiGLU(width, config.intermediate_size, bias=True, multiple=mlp_multiple, **place)

    def before(self, hidden_PD: Tensor, cos: Tensor, sin: Tensor) -> QueryKeyValue:
        """Queries and keys, rotated, and values."""
        qkv = self.qkv.forward(self.norm1.forward(hidden_PD)).view(len(hidden_PD), 3, self.num_heads, -1)
        rotated = apply_rotary(qkv[:, :2], cos, sin)
        return rotated[:, 0], rotated[:, 1], qkv[:, 2]

    def after(self, hidden_PD: Tensor, attended_PHE: Tensor) -> Tensor:
        """The block's output [P, D]."""
        hidden_PD = hidden_PD + self.proj.forward(attended_PHE.reshape(hidden_PD.shape))
        return hidden_PD + self.mlp.forward(self.norm2.forward(hidden_PD))

    def targets(self, prefix: str) -> WeightTargets:
        return {
            **self.norm1.targets(f"{prefix}.norm1"),
            **self.norm2.targets(f"{prefix}.norm2"),
            **self.qkv.targets(f"{prefix}.attn.qkv"),
            **self.proj.targets(f"{prefix}.attn.proj"),
            **self.mlp.targets(f"{prefix}.mlp"),
        }


def between(
    block: VisionBlock, following: VisionBlock, hidden_PD: Tensor, attended_PHE: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, QueryKeyValue]:
    """From one block's attention to the next one's: all that a compiler can fuse, residual and next norm too."""
    hidden_PD = block.after(hidden_PD, attended_PHE)
    return hidden_PD, following.before(hidden_PD, cos, sin)


class PatchMerger(nn.Module):
    """The projector: M neighbouring patches become one row of the decoder's width."""

    def __init__(self, config: VisionConfig, **place: Unpack[Place]) -> None:
        super().__init__()
        self.width = config.hidden_size * config.spatial_merge_size**2
        self.norm = rms_norm(config.hidden_size, eps=NORM_EPS, **place)
        self.inner = Linear(self.width, self.width, bias=True, **place)
        self.outer = Linear(self.width, config.out_hidden_size, bias=True, **place)

    def forward(self, hidden_PD: Tensor) -> Tensor:
        """[P, D] -> [T, out_hidden_size]."""
        blocks = self.norm.forward(hidden_PD).view(-1, self.width)
        return self.outer.forward(F.gelu(self.inner.forward(blocks)))

    def targets(self, prefix: str) -> WeightTargets:
        return {
            **self.norm.targets(f"{prefix}.ln_q"),
            **self.inner.targets(f"{prefix}.mlp.0"),
            **self.outer.targets(f"{prefix}.mlp.2"),
        }


def _permute(rows_PX: Tensor, window_index_T: Tensor) -> Tensor:
    """Rows of patches [P, X] in the order of their tokens' permutation."""
    return rows_PX.reshape(len(window_index_T), -1).index_select(0, window_index_T).view(rows_PX.shape)


def _normalisation(processor: ProcessorConfig, values_per_channel: int) -> tuple[Tensor, Tensor]:
    """Scale and shift [C] such that `x * scale + shift` is `(x / 255 - mean) / std`, channel-major."""
    mean = torch.tensor(processor.image_mean, dtype=torch.float64)
    std = torch.tensor(processor.image_std, dtype=torch.float64)
    scale = (1 / (255 * std)).repeat_interleave(values_per_channel)
    shift = (-mean / std).repeat_interleave(values_per_channel)
    return scale.float(), shift.float()
