"""One decoder layer with random weights and a step for it, for the tests of what stands in for it."""

import torch
from torch import Tensor

from runtime.checkpoint import TextConfig
from runtime.model.layers import Place, rotary_tables
from runtime.model.qwen2_5_vl_text import DecoderLayer

# Sizes that no tile divides.
ODD = TextConfig(
    hidden_size=96,
    intermediate_size=200,
    num_hidden_layers=1,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=32,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    mrope_section=(4, 6, 6),
    vocab_size=64,
    max_position_embeddings=64,
    tie_word_embeddings=True,
)


def filled_layer(config: TextConfig, place: Place) -> DecoderLayer:
    """A layer in half precision, whose outputs are of the size of its inputs."""
    layer = DecoderLayer(config, 0, **place)
    torch.manual_seed(0)
    for parameter in layer.parameters():
        noise = torch.randn(parameter.shape)
        parameter.data.copy_(noise if noise.dim() == 1 else noise * noise.shape[1] ** -0.5)
    return layer


def step(config: TextConfig, place: Place, num_rows: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden rows, attended ones, and tables of rotation."""
    torch.manual_seed(1)
    hidden = torch.randn(num_rows, config.hidden_size).to(**place)
    attended = torch.randn(num_rows, config.num_attention_heads, config.head_dim).to(**place)
    return hidden, attended, *rotary_tables(torch.randn(num_rows, 1, config.head_dim // 2).to(place["device"]))
