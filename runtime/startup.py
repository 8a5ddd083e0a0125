"""Builds an engine: the boot flow on one screen, each phase timed and logged. Knows the order of things, and no steps.

The plan is made of what was measured here, in this process: nothing is extrapolated.
"""

import logging
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch

from runtime.checkpoint import ModelConfig, locate_model, read_model_config, read_processor_config
from runtime.config import ConfigError, EngineConfig, ReserveGraphMemory, ResolvedConfig, resolve_config
from runtime.engine import Engine
from runtime.executor.batch import StepBuffers
from runtime.executor.decoder_program import DecoderInputs, step_max_seqs
from runtime.executor.device import CpuDevice, Device, allowed_cpus
from runtime.executor.embedding_store import EmbeddingStore
from runtime.executor.encoder_runner import EncoderProgram, EncoderRunner, StaticEncoderInputs
from runtime.executor.grammar_masks import GrammarMasks
from runtime.executor.graph_backend import EmulatedBackend
from runtime.executor.graphs import (
    GraphSet,
    decoder_buckets,
    encoder_buckets,
    should_capture_decoder,
    should_capture_encoder,
)
from runtime.executor.kv_cache import AnonymousMapping, KVCache, KVLayout, kv_layout
from runtime.executor.memory import KVRequest, MeasuredRows, MemoryPlan, plan_memory
from runtime.executor.model_runner import ModelRunner
from runtime.executor.profile import run_worst_step
from runtime.model.loader import LoadedModel, load_model
from runtime.model.sdpa import PagedSdpaAttention
from runtime.processing.grammar_compiler import GrammarCompiler
from runtime.scheduler.scheduler import Scheduler
from runtime.stats import EngineInfo, GraphFamilyInfo
from runtime.threads import default_threads

log = logging.getLogger(__name__)

# A default request on a CPU stops at a million tokens of KV: block numbers cost memory too.
MAX_DEFAULT_KV_TOKENS = 1 << 20

# What the scheduler keeps of each block once all have a name in the prefix cache: measured, 216-241 bytes with CPython.
BLOCK_NUMBER_BYTES = 256


def build_engine(config: EngineConfig) -> Engine:
    """An engine that is ready: weights loaded, graphs captured and self-tested, KV sized from what was measured.

    Sets torch's number of threads for the process.

    Raises:
        ConfigError: a setting is out of range, or the memory does not suffice; the message names the knob.
        CheckpointError: the checkpoint is missing, incomplete, or of a kind that is not served.
    """
    phases = Phases()
    with phases("baseline"):
        device = _device(config)
        baseline_bytes = device.used_bytes()
        torch.set_num_threads(config.num_threads or default_threads(allowed_cpus()))
        model_config, resolved, directory = _resolve(config)
        dtype = _dtype(config)
        # The tokenizer of a large vocabulary takes a second; it is read beside the weights.
        grammars_to_come = _read_grammars(directory, model_config)
    with phases("load_weights"):
        model = load_model(directory, model_config, dtype=dtype, device=torch.device(device.name))
    with phases("reserve_kv"):
        layout = kv_layout(model_config.text, dtype, config.block_size)
        kv_request = _kv_request(resolved, layout)
        kv = _reserve_kv(kv_request, layout, device.requested_bytes(config))
        readings = Readings(device, kv, baseline_bytes=baseline_bytes)
        grammars = grammars_to_come.result()
        parts = _assemble(resolved, model_config, model, kv, dtype, grammars)
    with phases("profile"):
        readings.measure_transient(parts, resolved)
    with phases("capture_encoder"):
        parts.capture_encoder()
    with phases("capture_decoder"):
        parts.capture_decoder()
    with phases("plan"):
        plan = plan_memory(
            requested_bytes=device.requested_bytes(config),
            rows=readings.rows(parts),
            kv=kv_request,
            margin_bytes=config.memory_margin_bytes,
            reserve_graph_memory=config.reserve_graph_memory,
            request_knob=device.request_knob,
            total_bytes=device.total_bytes,
        )
    with phases("back_kv"):
        kv.resize(plan.num_blocks)
        scheduler = Scheduler.from_config(resolved, eos_token_ids=model_config.eos_token_ids, num_blocks=kv.num_blocks)
    with phases("final_reading"):
        ledger = plan.ledger(used_bytes=readings.used_bytes())
    log.info("memory plan", extra={"components": plan.components, "unplanned_bytes": ledger.unplanned_bytes})
    log.debug("%s", plan)
    log.info("ready", extra={"seconds": round(sum(phases.seconds.values()), 3), "kv_blocks": plan.num_blocks})
    info = EngineInfo(
        model=config.model,
        device=device.name,
        dtype=str(dtype).removeprefix("torch."),
        attention_backend="sdpa",
        encoder_attention_backend="sdpa",
        max_model_len=resolved.max_model_len,
        encoder_cache_tokens=resolved.encoder_cache_tokens,
        memory=ledger,
        graphs=parts.graph_infos(plan, resolved.engine.reserve_graph_memory),
        startup_phase_seconds=phases.seconds,
    )
    return Engine(
        scheduler,
        parts.runner,
        info,
        encoder=parts.encoder,
        graphs=(parts.encoder.graphs, parts.decoder_graphs),
        read_unplanned_bytes=lambda: plan.unplanned_bytes(readings.used_bytes()),
        grammars=grammars,
    )


class Phases:
    """Times the phases of a start, in order, and logs each as it ends."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[phase] = time.perf_counter() - started
        log.info("startup phase", extra={"phase": phase, "seconds": round(self.seconds[phase], 4)})


@dataclass(kw_only=True)
class Parts:
    """What the executor is made of."""

    weight_bytes: int
    runner: ModelRunner
    encoder: EncoderRunner
    store: EmbeddingStore
    attention: PagedSdpaAttention
    decoder_graphs: GraphSet[DecoderInputs]
    max_mixed_tokens: int

    def capture_encoder(self) -> None:
        """Captures and tests the encoder's buckets, if it has any: they bake no address of the KV cache."""
        with torch.inference_mode():
            self.encoder.graphs.capture(self.encoder.program)

    def capture_decoder(self) -> None:
        """Captures and tests the decoder's buckets, if it has any, at the KV cache's final addresses."""
        with torch.inference_mode():
            program = self.runner.decoder_program(max_mixed_tokens=self.max_mixed_tokens)
            self.decoder_graphs.capture(program)
        self.runner.use_graphs(self.decoder_graphs)

    def graph_infos(self, plan: MemoryPlan, reserve: ReserveGraphMemory) -> tuple[GraphFamilyInfo, ...]:
        """Both families as they are exported; `skip` does not even measure."""
        infos = (
            self.encoder.graphs.info(reserved_bytes=plan.components["encoder_graphs"]),
            self.decoder_graphs.info(reserved_bytes=plan.components["decoder_graphs"]),
        )
        if reserve == "skip":
            return tuple(msgspec.structs.replace(info, measured_bytes=0) for info in infos)
        return infos


class Readings:
    """The device's memory as the start goes on. The KV cache's pages are in no reading: they are planned whole.

    On a CPU, what is resident beside weights and attention's workspace is the row `context`: interpreter, libraries,
    what the allocator keeps, and the few pages of other buffers that are resident by then, which have rows too. So
    `context + weights + attention_workspace + transient` is at least the highest reading of the profile.
    """

    def __init__(self, device: Device, kv: KVCache, *, baseline_bytes: int) -> None:
        self._device = device
        self._kv = kv
        self._baseline_bytes = baseline_bytes
        self._resident_bytes = 0
        self._peak_bytes = 0

    def measure_transient(self, parts: Parts, config: ResolvedConfig) -> None:
        """The peaks of the worst encoder forward and the worst step, which never run at the same time."""
        run_worst_step(parts.runner, config, max_tokens=config.engine.max_num_seqs)  # makes what is made once
        encode = partial(parts.encoder.profile, max_tokens_per_image=config.max_tokens_per_image)
        peaks = [self._device.peak_bytes(run) for run in (encode, partial(run_worst_step, parts.runner, config))]
        self._resident_bytes = self._without_kv()
        self._peak_bytes = max(*peaks, self._resident_bytes)

    def rows(self, parts: Parts) -> MeasuredRows:
        """Everything but the KV cache, now that all else is there."""
        graphs = parts.encoder.graphs.graph_bytes + parts.decoder_graphs.graph_bytes
        resident_bytes = max(self._resident_bytes, self._without_kv() - graphs)
        own_bytes = max(self._baseline_bytes, resident_bytes - parts.weight_bytes - parts.attention.workspace_bytes)
        return MeasuredRows(
            context=own_bytes + BLOCK_NUMBER_BYTES * self._kv.max_blocks,
            weights=parts.weight_bytes,
            attention_workspace=parts.attention.workspace_bytes,
            static_buffers=parts.runner.static_bytes,
            embedding_store=parts.store.num_bytes,
            transient=self._peak_bytes - self._resident_bytes,
            encoder_graphs=parts.encoder.graphs.graph_bytes,
            decoder_graphs=parts.decoder_graphs.graph_bytes,
        )

    def used_bytes(self) -> int:
        """What the process uses now, with the KV cache at its full planned size whether touched or not."""
        return self._without_kv() + self._kv.num_bytes

    def _without_kv(self) -> int:
        return self._device.used_bytes() - self._kv.resident_bytes()


def _device(config: EngineConfig) -> Device:
    if config.device == "cuda":
        raise ConfigError("device is 'cuda'; this version serves on 'cpu' (or 'auto')")
    return CpuDevice()


def _resolve(config: EngineConfig) -> tuple[ModelConfig, ResolvedConfig, Path]:
    directory = locate_model(config.model, config.revision)
    model_config = read_model_config(directory)
    return model_config, resolve_config(config, model_config, read_processor_config(directory)), directory


def _dtype(config: EngineConfig) -> torch.dtype:
    """`auto` is float32 on a CPU: half precision is emulated on most."""
    name = "float32" if config.dtype == "auto" else config.dtype
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _read_grammars(directory: Path, model_config: ModelConfig) -> "Future[GrammarCompiler]":
    """The compiler of requests' grammars, made in a thread; its own threads leave a core to the step."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
    compiler = thread.submit(
        GrammarCompiler.from_checkpoint,
        directory,
        vocab_size=model_config.text.vocab_size,
        eos_token_ids=model_config.eos_token_ids,
        num_threads=max(1, min(8, allowed_cpus() - 1)),
    )
    thread.shutdown(wait=False)
    return compiler


def _kv_request(config: ResolvedConfig, layout: KVLayout) -> KVRequest:
    engine = config.engine
    is_default = engine.memory_bytes is None
    return KVRequest(
        block_bytes=layout.block_bytes,
        block_size=layout.block_size,
        max_model_len=config.max_model_len,
        cache_bytes=engine.kv_cache_memory_bytes,
        max_num_blocks=MAX_DEFAULT_KV_TOKENS // layout.block_size if is_default else None,
    )


def _reserve_kv(request: KVRequest, layout: KVLayout, requested_bytes: int) -> KVCache:
    """The cache over addresses for all that the plan can give it, with memory behind the least that it can be."""
    capacity_bytes = request.cache_bytes or requested_bytes
    if request.max_num_blocks is not None and request.cache_bytes is None:
        useful_blocks = max(request.max_num_blocks, request.min_num_blocks)
        capacity_bytes = min(capacity_bytes, useful_blocks * layout.block_bytes)
    min_blocks = 2
    return KVCache(layout, min_blocks, AnonymousMapping(max(capacity_bytes, min_blocks * layout.block_bytes)))


def _assemble(
    config: ResolvedConfig,
    model_config: ModelConfig,
    model: LoadedModel,
    kv: KVCache,
    dtype: torch.dtype,
    grammars: GrammarCompiler,
) -> Parts:
    """Everything of the executor, with its buffers at their final addresses, and graph sets that hold nothing yet."""
    engine, device = config.engine, torch.device("cpu")
    assert model.text is not None, "only the encoder was loaded"
    decoder_ladder = decoder_buckets(config)
    buffers = StepBuffers(
        max_tokens=engine.max_num_batched_tokens,
        max_seqs=step_max_seqs(engine.max_num_seqs, decoder_ladder),
        max_blocks=-(-config.max_model_len // engine.block_size),
        block_size=engine.block_size,
        device=device,
    )
    backend = EmulatedBackend(counted=buffers.tensors())
    encoder_graphs: GraphSet[StaticEncoderInputs] = GraphSet(
        "encoder",
        encoder_buckets(config),
        backend=backend if should_capture_encoder(engine, encoder_supports_graphs=True) else None,
        strict=engine.strict_graphs,
    )
    decoder_graphs: GraphSet[DecoderInputs] = GraphSet(
        "decoder",
        decoder_ladder,
        backend=backend if should_capture_decoder(engine) else None,
        strict=engine.strict_graphs,
    )
    store = EmbeddingStore(
        capacity_tokens=config.encoder_cache_tokens,
        hidden=model_config.text.hidden_size,
        dtype=dtype,
        device=device,
    )
    encoder = EncoderRunner(
        EncoderProgram(model.vision, model_config.vision, device),
        encoder_graphs,
        store,
        max_eager_tokens=max(config.max_tokens_per_image, *config.encoder_graph_budgets),
    )
    attention = PagedSdpaAttention(kv, num_layers=model_config.text.num_hidden_layers)
    attention.reserve(config.max_model_len)
    runner = ModelRunner(
        decoder=model.text,
        attention=attention,
        encoder=encoder,
        store=store,
        buffers=buffers,
        max_num_seqs=engine.max_num_seqs,
        max_model_len=config.max_model_len,
        vocab_size=model_config.text.vocab_size,
        pixels_per_token_side=model_config.vision.pixels_per_token_side,
        seed=engine.seed,
        device=device,
        grammars=GrammarMasks(grammars, num_rows=engine.max_num_seqs, device=device),
    )
    return Parts(
        weight_bytes=model.weight_bytes,
        runner=runner,
        encoder=encoder,
        store=store,
        attention=attention,
        decoder_graphs=decoder_graphs,
        max_mixed_tokens=max((bucket.tokens for bucket in decoder_graphs.buckets if bucket.is_mixed), default=0),
    )
