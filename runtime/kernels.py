"""Which kernels an engine runs, chosen once: attention of both sides, and whether layers are compiled. Builds none.

Knows settings and the checkpoint; why a kernel is chosen is `runtime.model.backends`'s knowledge.
"""

import logging
from dataclasses import dataclass

import torch

from runtime.checkpoint import ModelConfig
from runtime.config import EngineConfig, ResolvedConfig
from runtime.executor.decoder_program import attention_bucket
from runtime.executor.graphs import Bucket
from runtime.executor.kv_cache import KVCache
from runtime.model.attention import CacheAttention, EncoderAttention
from runtime.model.backends import (
    Choice,
    DeviceFacts,
    build_attention,
    build_encoder_attention,
    choose_attention,
    choose_encoder_attention,
    should_compile,
)
from runtime.model.flashinfer_attention import AttentionLimits

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The choices, and what they were made from."""

    attention: Choice
    encoder_attention: Choice
    is_compiled: bool
    facts: DeviceFacts
    model: ModelConfig

    @classmethod
    def choose(cls, config: EngineConfig, model: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> "Kernels":
        """Logs what was chosen and why.

        Raises:
            ConfigError: what was asked for cannot run here.
        """
        facts = DeviceFacts.of(device)
        attention = choose_attention(config.attention_backend, facts=facts, dtype=dtype, text=model.text)
        encoder = choose_encoder_attention(
            config.encoder_attention_backend, facts=facts, dtype=dtype, vision=model.vision
        )
        for side, choice in (("decoder", attention), ("encoder", encoder)):
            log.info("attention", extra={"side": side, "backend": choice.backend, "reason": choice.reason})
        return cls(
            attention=attention,
            encoder_attention=encoder,
            is_compiled=should_compile(config.compile, facts=facts),
            facts=facts,
            model=model,
        )

    def build_encoder_attention(self) -> EncoderAttention:
        """The encoder's attention."""
        return build_encoder_attention(self.encoder_attention)

    def build_attention(self, config: ResolvedConfig, kv: KVCache, buckets: tuple[Bucket, ...]) -> CacheAttention:
        """The decoder's attention over `kv`, with all the memory that it will ever hold.

        `buckets`: those of the decoder's graphs, emulated ones included; they plan by bucket too.
        """
        limits = AttentionLimits(
            num_heads=self.model.text.num_attention_heads,
            max_num_seqs=config.engine.max_num_seqs,
            max_num_batched_tokens=config.engine.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            buckets=tuple(attention_bucket(bucket) for bucket in buckets),
        )
        num_layers = self.model.text.num_hidden_layers
        return build_attention(self.attention, kv, num_layers=num_layers, limits=limits, facts=self.facts)
