"""Puts the executor together over a KV cache: buffers, graph sets, encoder, attention, runner. Measures nothing.

A start assembles once; with `kv_backing` `torch` it does so twice, as the KV cache's addresses are others then.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from runtime.checkpoint import ModelConfig
from runtime.config import EngineConfig, ResolvedConfig
from runtime.executor.batch import StepBuffers
from runtime.executor.decoder_program import DecoderInputs, attention_bucket, step_max_seqs
from runtime.executor.embedding_store import EmbeddingStore
from runtime.executor.encode_ahead import AheadEncoder
from runtime.executor.encoder_runner import EncoderProgram, EncoderRunner, StaticEncoderInputs
from runtime.executor.grammar_masks import GrammarMasks
from runtime.executor.graph_backend import GraphBackend
from runtime.executor.graphs import (
    GraphSet,
    decoder_buckets,
    encoder_buckets,
    should_capture_decoder,
    should_capture_encoder,
    should_run_ahead,
)
from runtime.executor.kv_cache import KVCache
from runtime.executor.model_runner import ModelRunner
from runtime.model.attention import CacheAttention
from runtime.model.backends import Choice, Kernels, build_attention
from runtime.model.batch_decoder import BatchDecoder
from runtime.model.flashinfer_attention import AttentionLimits
from runtime.model.layers import Linear
from runtime.model.loader import LoadedModel
from runtime.model.qwen2_5_vl_text import TextDecoder
from runtime.model.row_decoder import RowDecoder
from runtime.processing.grammar_compiler import GrammarCompiler
from runtime.stats import GraphFamilyInfo

log = logging.getLogger(__name__)


class Site(Protocol):
    """Where the executor stands."""

    @property
    def torch_device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype:
        """Of weights, KV cache and embeddings."""
        ...

    @property
    def max_shared_encoder_tokens(self) -> int | None:
        """Output tokens of the pictures that are encoded together; `None`: all that there is room for."""
        ...

    def encodes_ahead(self, config: EngineConfig) -> bool:
        """Whether pictures are encoded beside the steps."""
        ...

    def graph_backends(self, config: EngineConfig, *, counted: Sequence[Tensor]) -> tuple[GraphBackend, GraphBackend]:
        """The encoder's and the decoder's. `counted`: buffers that have a row of the ledger already."""
        ...


@dataclass(kw_only=True)
class EncoderParts:
    """The vision side: what encoder-only mode consists of."""

    weight_bytes: int
    linears: tuple[Linear, ...]
    encoder: EncoderRunner
    store: EmbeddingStore

    def capture_encoder(self) -> None:
        """Captures and tests the encoder's buckets, if it has any: they bake no address of the KV cache."""
        with torch.inference_mode():
            self.encoder.graphs.capture(self.encoder.program)


@dataclass(kw_only=True)
class Parts(EncoderParts):
    """What the executor is made of."""

    runner: ModelRunner
    # What encodes beside the steps, if they do not.
    ahead: AheadEncoder | None
    attention: CacheAttention
    decoder_graphs: GraphSet[DecoderInputs]
    max_mixed_tokens: int
    # Of what the shorter ways for few rows keep from step to step.
    row_bytes: int

    @property
    def ahead_bytes(self) -> int:
        """What may wait for steps that was encoded beside them."""
        return 0 if self.ahead is None else self.ahead.max_bytes

    def capture_decoder(self) -> None:
        """Captures and tests the decoder's buckets, if it has any, at the KV cache's addresses."""
        with torch.inference_mode():
            program = self.runner.decoder_program(max_mixed_tokens=self.max_mixed_tokens)
            self.decoder_graphs.capture(program)

    @property
    def graph_sets(self) -> tuple[GraphSet[Any], GraphSet[Any]]:
        """Both families, the encoder's first."""
        return self.encoder.graphs, self.decoder_graphs

    @property
    def segment_bytes(self) -> int:
        """What the private pools of both families hold."""
        return sum(graphs.segment_bytes for graphs in self.graph_sets)

    def graph_infos(self) -> tuple[GraphFamilyInfo, GraphFamilyInfo]:
        """Both families, with all that they took reserved."""
        return tuple(  # type: ignore[return-value]
            graphs.info(reserved_bytes=graphs.graph_bytes) for graphs in self.graph_sets
        )


def assemble_encoder(
    config: ResolvedConfig,
    model_config: ModelConfig,
    model: LoadedModel,
    site: Site,
    kernels: Kernels,
    backend: GraphBackend,
) -> EncoderParts:
    """The vision side, with its buffers in place and a graph set that holds nothing yet."""
    engine = config.engine
    supports_graphs = _can_capture(kernels.encoder_attention, backend)
    encoder_graphs: GraphSet[StaticEncoderInputs] = GraphSet(
        "encoder",
        encoder_buckets(config),
        backend=backend if should_capture_encoder(engine, encoder_supports_graphs=supports_graphs) else None,
        strict=engine.strict_graphs,
    )
    store = EmbeddingStore(
        capacity_tokens=config.encoder_cache_tokens,
        hidden=model_config.text.hidden_size,
        dtype=site.dtype,
        device=site.torch_device,
    )
    encoder = EncoderRunner(
        EncoderProgram(model.vision, model_config.vision, site.torch_device),
        encoder_graphs,
        store,
        max_eager_tokens=max(config.max_tokens_per_image, *config.encoder_graph_budgets),
    )
    return EncoderParts(weight_bytes=model.weight_bytes, linears=model.linears, encoder=encoder, store=store)


def assemble(
    config: ResolvedConfig,
    model_config: ModelConfig,
    model: LoadedModel,
    site: Site,
    kernels: Kernels,
    kv: KVCache,
    grammars: GrammarCompiler,
) -> Parts:
    """Everything of the executor, with its buffers at their final addresses, and graph sets that hold nothing yet."""
    engine, device = config.engine, site.torch_device
    assert model.text is not None, "only the encoder was loaded"
    decoder_ladder = decoder_buckets(config)
    buffers = StepBuffers(
        max_tokens=engine.max_num_batched_tokens,
        max_seqs=step_max_seqs(engine.max_num_seqs, decoder_ladder),
        max_blocks=-(-config.max_model_len // engine.block_size),
        block_size=engine.block_size,
        device=device,
    )
    encoder_backend, decoder_backend = site.graph_backends(engine, counted=buffers.tensors())
    vision = assemble_encoder(config, model_config, model, site, kernels, encoder_backend)
    has_graphs = should_capture_decoder(engine) and _can_capture(kernels.attention, decoder_backend)
    decoder_graphs: GraphSet[DecoderInputs] = GraphSet(
        "decoder",
        decoder_ladder,
        backend=decoder_backend if has_graphs else None,
        strict=engine.strict_graphs,
    )
    attention = build_attention(
        kernels.attention,
        kv,
        num_layers=model_config.text.num_hidden_layers,
        limits=AttentionLimits(
            num_heads=model_config.text.num_attention_heads,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            buckets=tuple(attention_bucket(bucket) for bucket in decoder_graphs.buckets),
        ),
        facts=kernels.facts,
        one_row=kernels.one_row,
    )
    decoder = _decoder(model.text, kernels)
    ahead: AheadEncoder | None = None
    if site.encodes_ahead(engine):
        ahead = AheadEncoder(
            vision.encoder,
            vision.store,
            max_held_tokens=config.encoder_cache_tokens,
            max_shared_tokens=site.max_shared_encoder_tokens or config.encoder_cache_tokens,
        )
    runner = ModelRunner(
        decoder=decoder,
        attention=attention,
        encoder=vision.encoder if ahead is None else ahead,
        store=vision.store,
        buffers=buffers,
        max_num_seqs=engine.max_num_seqs,
        max_model_len=config.max_model_len,
        vocab_size=model_config.text.vocab_size,
        pixels_per_token_side=model_config.vision.pixels_per_token_side,
        seed=engine.seed,
        device=device,
        grammars=GrammarMasks(grammars, num_rows=engine.max_num_seqs, device=device),
        runs_ahead=should_run_ahead(engine, device),
    )
    return Parts(
        weight_bytes=model.weight_bytes,
        linears=model.linears,
        runner=runner,
        ahead=ahead,
        encoder=vision.encoder,
        store=vision.store,
        attention=attention,
        decoder_graphs=decoder_graphs,
        max_mixed_tokens=max((bucket.tokens for bucket in decoder_graphs.buckets if bucket.is_mixed), default=0),
        row_bytes=0 if isinstance(decoder, TextDecoder) else decoder.num_bytes,
    )


def _decoder(text: TextDecoder, kernels: Kernels) -> TextDecoder | RowDecoder | BatchDecoder:
    """The text decoder, with shorter ways for few rows around it where there are such."""
    if kernels.one_row.backend != "numpy":
        return text
    return BatchDecoder(RowDecoder(text)) if text.packed_head is not None else RowDecoder(text)


def _can_capture(choice: Choice, backend: GraphBackend) -> bool:
    """Whether a forward with this attention can be part of this backend's graphs: emulated ones are eager calls."""
    if choice.can_capture or backend.replays_eagerly:
        return True
    log.warning("no graphs: this attention reads the host", extra={"backend": choice.backend, "reason": choice.reason})
    return False
