"""The network as it is trained: dense batches in which all pictures of one place have one size.

The same mathematics and parameter names as the published Qwen2.5-VL checkpoints (arXiv:2502.13923), laid out
so that window attention is a reshape and every shape is static within a batch. Knows nothing of serving.

Letters: B batch, K pictures a conversation, N patches of a picture, U = N / 4 merged units, T tokens, C
channels.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PATCH, MERGE, FRAMES = 14, 2, 2
UNIT = PATCH * MERGE  # pixels a side of one merged unit
IMAGE_MEAN = (0.48145466, 0.4578275, 0.40821073)  # CLIP's, as the family's processor
IMAGE_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """Sizes of the network; the names are those of the published configuration."""

    vocab_size: int = 1536
    hidden_size: int = 256
    intermediate_size: int = 704
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    mrope_section: tuple[int, int, int] = (8, 12, 12)
    rope_theta: float = 10_000.0
    vision_hidden_size: int = 192
    vision_intermediate_size: int = 576
    vision_depth: int = 7
    vision_num_heads: int = 3
    fullatt_block_indexes: tuple[int, ...] = (2, 4, 6)
    window_size: int = 112

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


@dataclass(frozen=True, kw_only=True)
class WindowPlan:
    """Order of a picture's merged units in which windows of one size lie side by side."""

    unit_order: Tensor  # [U] raster index of the unit at each place
    place_of_unit: Tensor  # [U] its inverse
    groups: tuple[tuple[int, int], ...]  # (windows, patches a window), in order; their products sum to N
    cos_N1D: Tensor  # rotary positions of the patches, in this order
    sin_N1D: Tensor


@functools.lru_cache(maxsize=512)
def window_plan(rows: int, columns: int, window_units: int, head_dim: int, device: torch.device) -> WindowPlan:
    """Windows of a grid of `rows` x `columns` merged units, anchored at the top left.

    A A B     A: whole windows; B: the right edge's; C: the bottom edge's; D: the corner's.
    A A B     Windows of one group have one size, so the group is a reshape.
    C C D
    """
    raster = torch.arange(rows * columns).view(rows, columns)
    order, groups = [], []
    row_parts = [
        (0, rows - rows % window_units, window_units),
        (rows - rows % window_units, rows, rows % window_units),
    ]
    column_parts = [
        (0, columns - columns % window_units, window_units),
        (columns - columns % window_units, columns, columns % window_units),
    ]
    for top, bottom, high in row_parts:
        for left, right, wide in column_parts:
            if bottom == top or right == left:
                continue
            part = raster[top:bottom, left:right]
            part = part.view((bottom - top) // high, high, (right - left) // wide, wide).transpose(1, 2)
            order.append(part.reshape(-1))
            groups.append((part.shape[0] * part.shape[1], high * wide * MERGE * MERGE))
    unit_order = torch.cat(order)
    place_of_unit = torch.argsort(unit_order)
    inner = torch.arange(MERGE)
    rows_N = ((unit_order // columns)[:, None] * MERGE + inner.repeat_interleave(MERGE)).reshape(-1)
    columns_N = ((unit_order % columns)[:, None] * MERGE + inner.repeat(MERGE)).reshape(-1)
    rates = 10_000.0 ** -(torch.arange(0, head_dim // 2, 2, dtype=torch.float32) / (head_dim // 2))
    angles = torch.cat((rows_N[:, None] * rates, columns_N[:, None] * rates), dim=-1)
    angles = torch.cat((angles, angles), dim=-1)[:, None]
    return WindowPlan(
        unit_order=unit_order.to(device),
        place_of_unit=place_of_unit.to(device),
        groups=tuple(groups),
        cos_N1D=angles.cos().to(device),
        sin_N1D=angles.sin().to(device),
    )


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), 1e-6)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on the last axis of x; cos and sin broadcast over heads."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x.float() * cos + turned * sin).to(x.dtype)


class GatedMLP(nn.Module):
    def __init__(self, size: int, inner: int, *, bias: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=bias)
        self.up_proj = nn.Linear(size, inner, bias=bias)
        self.down_proj = nn.Linear(inner, size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class VisionAttention(nn.Module):
    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.qkv = nn.Linear(config.vision_hidden_size, 3 * config.vision_hidden_size)
        self.proj = nn.Linear(config.vision_hidden_size, config.vision_hidden_size)


class VisionBlock(nn.Module):
    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.num_heads = config.vision_num_heads
        self.norm1 = RMSNorm(config.vision_hidden_size)
        self.norm2 = RMSNorm(config.vision_hidden_size)
        self.attn = VisionAttention(config)
        self.mlp = GatedMLP(config.vision_hidden_size, config.vision_intermediate_size, bias=True)

    def project(self, x_BNC: Tensor, cos_N1D: Tensor, sin_N1D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, N, heads, D], rotated."""
        batch, patches, channels = x_BNC.shape
        qkv = self.attn.qkv(self.norm1(x_BNC)).view(batch, patches, 3, self.num_heads, channels // self.num_heads)
        q, k = rotated(qkv[:, :, :2], cos_N1D[:, None], sin_N1D[:, None]).unbind(2)
        return q, k, qkv[:, :, 2]

    def finish(self, x_BNC: Tensor, attended_BNC: Tensor) -> Tensor:
        x_BNC = x_BNC + self.attn.proj(attended_BNC)
        out: Tensor = x_BNC + self.mlp(self.norm2(x_BNC))
        return out

    def forward(self, x_BNC: Tensor, cos_N1D: Tensor, sin_N1D: Tensor, groups: Sequence[tuple[int, int]]) -> Tensor:
        q, k, v = self.project(x_BNC, cos_N1D, sin_N1D)
        return self.finish(x_BNC, grouped_attention(q, k, v, groups))


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, groups: Sequence[tuple[int, int]]) -> Tensor:
    """Attention within windows; q, k, v [B, N, heads, D] -> [B, N, heads * D]."""
    batch, _, heads, dim = q.shape
    parts, start = [], 0
    for windows, length in groups:
        end = start + windows * length
        q_w, k_w, v_w = (
            (x[:, start:end] if len(groups) > 1 else x).reshape(batch * windows, length, heads, dim).transpose(1, 2)
            for x in (q, k, v)
        )
        out = F.scaled_dot_product_attention(q_w, k_w, v_w)
        parts.append(out.transpose(1, 2).reshape(batch, windows * length, heads * dim))
        start = end
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


class PatchMerger(nn.Module):
    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        inner = config.vision_hidden_size * MERGE * MERGE
        self.ln_q = RMSNorm(config.vision_hidden_size)
        self.mlp = nn.Sequential(nn.Linear(inner, inner), nn.GELU(), nn.Linear(inner, config.hidden_size))

    def forward(self, x_BNC: Tensor) -> Tensor:
        batch, patches, channels = x_BNC.shape
        units = self.ln_q(x_BNC).view(batch, patches // MERGE**2, channels * MERGE**2)
        out: Tensor = self.mlp(units)
        return out


class PatchEmbed(nn.Module):
    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.proj = nn.Conv3d(3, config.vision_hidden_size, (FRAMES, PATCH, PATCH), (FRAMES, PATCH, PATCH), bias=False)

    def forward(self, patches: Tensor) -> Tensor:
        """patches [..., 588] of a still picture: both frames are the same, so their weights add up."""
        return F.linear(patches, self.proj.weight.sum(2).flatten(1))


class VisionTower(nn.Module):
    scale: Tensor
    shift: Tensor

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config)
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.vision_depth))
        self.merger = PatchMerger(config)
        scale = torch.tensor([255 * std for std in IMAGE_STD])
        self.register_buffer("scale", 1 / scale, persistent=False)
        self.register_buffer("shift", -torch.tensor([255 * mean for mean in IMAGE_MEAN]) / scale, persistent=False)

    def patches(self, pixels_BHWC: Tensor, unit_order: Tensor) -> Tensor:
        """Normalised patches [B, N, 588] of uint8 pixels, units in `unit_order`."""
        batch, height, width, _ = pixels_BHWC.shape
        rows, columns = height // UNIT, width // UNIT
        x = pixels_BHWC.float() * self.scale + self.shift
        x = x.view(batch, rows, MERGE, PATCH, columns, MERGE, PATCH, 3)
        x = x.permute(0, 1, 4, 2, 5, 7, 3, 6).reshape(batch, rows * columns, MERGE**2 * 3 * PATCH**2)
        return x[:, unit_order].view(batch, rows * columns * MERGE**2, 3 * PATCH**2)

    def forward(self, pixels_BHWC: Tensor) -> Tensor:
        """[B, H, W, 3] uint8, sides multiples of 28 -> [B, U, C_text], units in raster order."""
        config, device = self.config, pixels_BHWC.device
        rows, columns = pixels_BHWC.shape[1] // UNIT, pixels_BHWC.shape[2] // UNIT
        dim = config.vision_hidden_size // config.vision_num_heads
        plan = window_plan(rows, columns, config.window_size // UNIT, dim, device)
        x = self.patch_embed(self.patches(pixels_BHWC, plan.unit_order))
        whole = ((1, x.shape[1]),)
        for index, block in enumerate(self.blocks):
            x = block(x, plan.cos_N1D, plan.sin_N1D, whole if index in config.fullatt_block_indexes else plan.groups)
        merged: Tensor = self.merger(x)
        return merged.index_select(1, plan.place_of_unit)


class TextAttention(nn.Module):
    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * self.dim)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.dim)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.dim)
        self.o_proj = nn.Linear(config.num_attention_heads * self.dim, config.hidden_size, bias=False)

    def forward(self, x_BTC: Tensor, cos_BT1D: Tensor, sin_BT1D: Tensor) -> Tensor:
        batch, tokens, _ = x_BTC.shape
        q = rotated(self.q_proj(x_BTC).view(batch, tokens, -1, self.dim), cos_BT1D, sin_BT1D).transpose(1, 2)
        k = rotated(self.k_proj(x_BTC).view(batch, tokens, -1, self.dim), cos_BT1D, sin_BT1D).transpose(1, 2)
        v = self.v_proj(x_BTC).view(batch, tokens, -1, self.dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, tokens, -1))
        return projected


class TextLayer(nn.Module):
    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size)
        self.self_attn = TextAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, bias=False)

    def forward(self, x_BTC: Tensor, cos_BT1D: Tensor, sin_BT1D: Tensor) -> Tensor:
        x_BTC = x_BTC + self.self_attn(self.input_layernorm(x_BTC), cos_BT1D, sin_BT1D)
        out: Tensor = x_BTC + self.mlp(self.post_attention_layernorm(x_BTC))
        return out


class TextDecoder(nn.Module):
    rates: Tensor
    axis: Tensor

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(TextLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size)
        steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        axis = torch.repeat_interleave(torch.arange(3), torch.tensor(config.mrope_section))
        self.register_buffer("rates", config.rope_theta**-steps, persistent=False)
        self.register_buffer("axis", axis, persistent=False)

    def forward(self, x_BTC: Tensor, positions_3BT: Tensor) -> Tensor:
        angles = positions_3BT.float()[self.axis].movedim(0, -1) * self.rates  # [B, T, D / 2]
        angles = torch.cat((angles, angles), dim=-1)[:, :, None]
        cos, sin = angles.cos(), angles.sin()
        for layer in self.layers:
            x_BTC = layer(x_BTC, cos, sin)
        normed: Tensor = self.norm(x_BTC)
        return normed


class Network(nn.Module):
    """Vision tower and decoder; `state_dict` has the published names, and the head is the embedding."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config
        self.visual = VisionTower(config)
        self.model = TextDecoder(config)
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                fan_in = parameter[0].numel()
                nn.init.normal_(parameter, std=0.02 if "embed_tokens" in name else fan_in**-0.5)
                if name.endswith(("o_proj.weight", "down_proj.weight", "attn.proj.weight")):
                    parameter.data.mul_(0.3)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(
        self,
        pixels: Sequence[Tensor],
        token_ids_BT: Tensor,
        positions_3BT: Tensor,
        image_index: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [B, T, C] of conversations whose k-th pictures are `pixels[k]` [B, H_k, W_k, 3], uint8."""
        units = self.encode(pixels) if pixels else None
        return self.decode(units, token_ids_BT, positions_3BT, image_index)

    def encode(self, pixels: Sequence[Tensor]) -> Tensor:
        """Merged units [B, U, C] of conversations whose k-th pictures are `pixels[k]` [B, H_k, W_k, 3], uint8."""
        return torch.cat([self.visual(picture) for picture in pixels], dim=1)

    def decode(
        self,
        units_BUC: Tensor | None,
        token_ids_BT: Tensor,
        positions_3BT: Tensor,
        image_index: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [B, T, C].

        `image_index` [B * U] says for every unit of a conversation's pictures, in order, its place in the
        flattened [B * T]; B * T itself drops the unit, for conversations without a picture.
        """
        table = self.model.embed_tokens.weight
        x_BTC = table.index_select(0, token_ids_BT.flatten()).view(*token_ids_BT.shape, -1)
        if units_BUC is not None:
            assert image_index is not None, "pictures need their places"
            flat = x_BTC.to(units_BUC.dtype).flatten(0, 1)
            flat = torch.cat((flat, torch.zeros_like(flat[:1])))
            # A copy by index: its backward gathers, where a gather's would add up atomically.
            flat = flat.index_copy(0, image_index, units_BUC.flatten(0, 1))
            x_BTC = flat[:-1].view(x_BTC.shape)
        hidden: Tensor = self.model(x_BTC, positions_3BT)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight.to(hidden.dtype))
