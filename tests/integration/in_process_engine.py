"""An engine in this process, put together from its parts so that a test chooses every size. Used by golden tests.

`build_engine` does the same with a memory plan in between; here the KV cache has as many blocks as the test says.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.checkpoint import ModelConfig, read_model_config, read_processor_config
from runtime.config import EngineConfig, ResolvedConfig, resolve_config
from runtime.executor.batch import StepBuffers
from runtime.executor.decoder_program import DecoderInputs, attention_bucket, step_max_seqs
from runtime.executor.embedding_store import EmbeddingStore
from runtime.executor.encoder_runner import EncoderProgram, EncoderRunner, StaticEncoderInputs
from runtime.executor.grammar_masks import GrammarMasks
from runtime.executor.graph_backend import EmulatedBackend
from runtime.executor.graphs import GraphSet, decoder_buckets, encoder_buckets, should_run_ahead
from runtime.executor.kv_cache import KVCache, kv_layout
from runtime.executor.model_runner import ModelRunner
from runtime.model import packed
from runtime.model.attention import CacheAttention
from runtime.model.batch_decoder import BatchDecoder
from runtime.model.flashinfer_attention import AttentionLimits
from runtime.model.loader import LoadedModel, load_model
from runtime.model.row_attention import RowAttention
from runtime.model.row_decoder import RowDecoder
from runtime.model.sdpa import PagedSdpaAttention
from runtime.processing.grammar_compiler import GrammarCompiler
from runtime.request import Request, RequestOutput
from runtime.scheduler.output import SchedulerOutput
from runtime.scheduler.scheduler import Scheduler
from runtime.stats import EngineStats

CPU = torch.device("cpu")


@dataclass
class InProcessEngine:
    """Scheduler and runner, stepped by hand. `outputs` has every token of every request that ended."""

    scheduler: Scheduler
    runner: ModelRunner
    store: EmbeddingStore
    encoder_graphs: GraphSet[StaticEncoderInputs]
    decoder_graphs: GraphSet[DecoderInputs]
    steps: list[SchedulerOutput] = field(default_factory=list)

    def add(self, request: Request, pixels: Sequence[NDArray[np.uint8]] = ()) -> None:
        self.scheduler.add(request)
        self.runner.add(request, pixels)

    def step(self) -> list[RequestOutput]:
        output = self.scheduler.schedule()
        self.steps.append(output)
        outputs = self.scheduler.update(output, self.runner.run(output))
        self.scheduler.check_integrity()
        self.store.check_integrity()
        return outputs

    def finish(self) -> dict[str, list[int]]:
        """Steps until nothing is left; token ids by request."""
        tokens: dict[str, list[int]] = {}
        while self.scheduler.has_work:
            for output in self.step():
                assert output.error is None, output.error
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        return tokens

    @property
    def stats(self) -> EngineStats:
        stats = EngineStats()
        self.scheduler.write_stats(stats)
        return stats


class EngineFactory:
    """Loads a checkpoint once, and puts engines around it."""

    def __init__(self, directory: Path) -> None:
        self.config: ModelConfig = read_model_config(directory)
        self._processor = read_processor_config(directory)
        self.grammars = GrammarCompiler.from_checkpoint(
            directory, vocab_size=self.config.text.vocab_size, eos_token_ids=self.config.eos_token_ids
        )
        self._model: LoadedModel = load_model(directory, self.config, dtype=torch.float32, device=CPU)
        self._packed: LoadedModel = load_model(directory, self.config, dtype=torch.float32, device=CPU)
        if packed.is_available():
            self._packed.pack_products()

    def build(
        self,
        *,
        num_blocks: int = 256,
        make_attention: Callable[[KVCache, AttentionLimits], CacheAttention] | None = None,
        has_numpy_rows: bool = True,
        **settings: object,
    ) -> InProcessEngine:
        """`settings`: fields of `EngineConfig`; graphs are off unless they say otherwise. `has_numpy_rows`: as a start
        on one thread has them."""
        engine = EngineConfig(**{"max_model_len": 1024, "enforce_eager": True, **settings})  # type: ignore[arg-type]
        resolved = resolve_config(engine, self.config, self._processor)
        text, vision = self.config.text, self.config.vision
        buckets = () if engine.enforce_eager else decoder_buckets(resolved)
        max_mixed_tokens = max((bucket.tokens for bucket in buckets if bucket.is_mixed), default=0)
        kv = KVCache(kv_layout(text, torch.float32, engine.block_size), num_blocks)
        sdpa = RowAttention if has_numpy_rows else PagedSdpaAttention
        attention: CacheAttention = sdpa(kv, num_layers=text.num_hidden_layers)
        if make_attention is not None:
            limits = AttentionLimits(
                num_heads=text.num_attention_heads,
                max_num_seqs=engine.max_num_seqs,
                max_num_batched_tokens=engine.max_num_batched_tokens,
                max_model_len=resolved.max_model_len,
                buckets=tuple(attention_bucket(bucket) for bucket in buckets),
            )
            attention = make_attention(kv, limits)
        store = EmbeddingStore(
            capacity_tokens=resolved.encoder_cache_tokens,
            hidden=text.hidden_size,
            dtype=torch.float32,
            device=CPU,
        )
        encoder_graphs = self._encoder_graphs(resolved)
        runner = ModelRunner(
            decoder=self._numpy_decoder() if has_numpy_rows else self._model.text,
            attention=attention,
            encoder=EncoderRunner(
                EncoderProgram(self._model.vision, vision, CPU),
                encoder_graphs,
                store,
                max_eager_tokens=resolved.max_tokens_per_image,
            ),
            store=store,
            buffers=StepBuffers(
                max_tokens=engine.max_num_batched_tokens,
                max_seqs=step_max_seqs(engine.max_num_seqs, buckets),
                max_blocks=-(-resolved.max_model_len // engine.block_size),
                block_size=engine.block_size,
                device=CPU,
            ),
            max_num_seqs=engine.max_num_seqs,
            max_model_len=resolved.max_model_len,
            vocab_size=text.vocab_size,
            pixels_per_token_side=vision.pixels_per_token_side,
            seed=engine.seed,
            device=CPU,
            grammars=GrammarMasks(self.grammars, num_rows=engine.max_num_seqs, device=CPU),
            runs_ahead=should_run_ahead(engine, CPU),
        )
        decoder_graphs: GraphSet[DecoderInputs] = GraphSet(
            "decoder", buckets, backend=EmulatedBackend() if buckets else None, strict=True
        )
        if buckets:
            with torch.inference_mode():
                decoder_graphs.capture(runner.decoder_program(max_mixed_tokens=max_mixed_tokens))
        runner.use_graphs(decoder_graphs)
        scheduler = Scheduler.from_config(
            resolved,
            eos_token_ids=self.config.eos_token_ids,
            num_blocks=num_blocks,
            allocates_ahead=should_run_ahead(engine, CPU),
        )
        return InProcessEngine(scheduler, runner, store, encoder_graphs, decoder_graphs)

    def _numpy_decoder(self) -> RowDecoder | BatchDecoder:
        """As a start puts it together, packed products included where torch has them."""
        assert self._packed.text is not None
        rows = RowDecoder(self._packed.text)
        return BatchDecoder(rows) if packed.is_available() else rows

    def _encoder_graphs(self, resolved: ResolvedConfig) -> GraphSet[StaticEncoderInputs]:
        if resolved.engine.enforce_eager:
            return GraphSet("encoder", (), backend=None)
        graphs: GraphSet[StaticEncoderInputs] = GraphSet(
            "encoder", encoder_buckets(resolved), backend=EmulatedBackend(), strict=True
        )
        with torch.inference_mode():
            graphs.capture(EncoderProgram(self._model.vision, self.config.vision, CPU))
        return graphs
