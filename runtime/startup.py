"""Builds an engine: the boot flow on one screen, each phase timed and logged. Knows the order of things, and no steps.

The plan is made of what was measured here, in this process: nothing is extrapolated. `kv_backing` `vmm` captures every
graph once, at addresses that stay; its plain twin `torch` measures graphs on a minimal KV cache, releases them, and
captures again once the KV cache has its size (`runtime.probe`).
"""

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from runtime.assembly import assemble, assemble_encoder
from runtime.checkpoint import ModelConfig, locate_model, read_model_config, read_processor_config
from runtime.config import ConfigError, EngineConfig, ResolvedConfig, resolve_config
from runtime.encoder_engine import EncoderEngine
from runtime.engine import Engine
from runtime.executor.device import allowed_cpus
from runtime.executor.graphs import should_run_ahead
from runtime.executor.kv_cache import KVCache, KVLayout, kv_layout
from runtime.executor.memory import KVRequest, MeasuredRows, MemoryPlan, plan_encoder_memory, plan_memory
from runtime.executor.vmm import VirtualMemoryError
from runtime.hardware import MIN_BLOCKS, Hardware, hardware_for
from runtime.model.backends import (
    Kernels,
    build_any_rows_kernels,
    build_encoder_attention,
    build_one_row_kernels,
    choose_kernels,
)
from runtime.model.loader import LoadedModel, load_model
from runtime.probe import GraphProbe
from runtime.processing.grammar_compiler import GrammarCompiler
from runtime.readings import Readings
from runtime.scheduler.scheduler import Scheduler
from runtime.stats import EngineInfo, GraphFamilyInfo, MemoryLedger

log = logging.getLogger(__name__)

OpenHardware = Callable[[EngineConfig], Hardware]


def build(config: EngineConfig) -> Engine | EncoderEngine:
    """The engine that `config` asks for: a whole one, or the vision encoder alone.

    Raises:
        ConfigError, CheckpointError: as `build_engine`.
    """
    return build_encoder_engine(config) if config.mm_encoder_only else build_engine(config)


def build_engine(config: EngineConfig, *, open_hardware: OpenHardware | None = None) -> Engine:
    """An engine that is ready: weights loaded, graphs captured and self-tested, KV sized from what was measured.

    Sets torch's number of threads for the process. `open_hardware`: on what; by default what `config.device` names.

    Raises:
        ConfigError: a setting is out of range, or the memory does not suffice; the message names the knob.
        CheckpointError: the checkpoint is missing, incomplete, or of a kind that is not served.
    """
    phases = Phases()
    with phases("baseline"):
        hardware = (open_hardware or hardware_for(config))(config)
        model_config, resolved, directory = _resolve(config)
        kernels = choose_kernels(config, model_config, device=hardware.torch_device, dtype=hardware.dtype)
        # The tokenizer of a large vocabulary takes a second; it is read beside the weights.
        grammars_to_come = _read_grammars(directory, model_config)
    with phases("load_weights"):
        model = _load(config, directory, model_config, hardware, kernels, parts="all")
    with phases("reserve_kv"):
        layout = kv_layout(model_config.text, hardware.dtype, config.block_size)
        kv_request = hardware.kv_request(resolved, layout)
        kv = _first_kv(config, hardware, kv_request, layout)
        readings = hardware.readings()
        readings.use_kv(kv)
        grammars = grammars_to_come.result()
        parts = assemble(resolved, model_config, model, hardware, kernels, kv, grammars)
    with phases("profile"):
        log.info("profiling: the largest step is run to measure its memory")
        readings.measure_transient(parts, resolved)
    with phases("capture_encoder"):
        parts.capture_encoder()
    with phases("capture_decoder"):
        parts.capture_decoder()
    with phases("prove_transient"):
        readings.prove_transient(parts, resolved)
    with phases("plan"):
        max_request_bytes = hardware.max_request_bytes(resolved)
        rows = replace(readings.rows(parts), requests=max_request_bytes or 0)
        probe = GraphProbe(parts.graph_infos())
        if config.kv_backing == "torch":
            rows = probe.release(parts, hardware.device, rows)
        make_plan = partial(_plan, config, hardware, rows, kv_request)
        plan = make_plan()
    with phases("back_kv"):
        if config.kv_backing == "vmm":
            kv, plan = _backed(partial(_grown, kv), plan, make_plan)
        else:
            del parts, kv
            readings.use_kv(None)
            hardware.device.settled_bytes()  # what they held is free before the KV cache takes its place
            kv, plan = _backed(partial(_allocated, layout, hardware), plan, make_plan)
            readings.use_kv(kv)
            parts = assemble(resolved, model_config, model, hardware, kernels, kv, grammars)
        scheduler = Scheduler.from_config(
            resolved,
            eos_token_ids=model_config.eos_token_ids,
            num_blocks=kv.num_blocks,
            allocates_ahead=should_run_ahead(config, hardware.torch_device),
            max_shared_encoder_tokens=hardware.max_shared_encoder_tokens,
        )
    if config.kv_backing == "torch":
        with phases("recapture"):
            parts.capture_encoder()
            parts.capture_decoder()
            probe.compare(parts.graph_infos())
    with phases("keep_transient"):
        readings.keep_transient(parts, resolved)
        parts.runner.use_graphs(parts.decoder_graphs)
    with phases("final_reading"):
        ledger = plan.ledger(used_bytes=readings.used_bytes())
    _log_ready(plan, ledger, phases)
    infos = probe.graph_infos(parts.graph_infos(), config.reserve_graph_memory)
    info = _info(config, resolved, hardware, kernels, ledger, infos, phases, max_request_bytes=max_request_bytes)
    return Engine(
        scheduler,
        parts.runner,
        info,
        encoder=parts.encoder,
        graphs=(parts.encoder.graphs, parts.decoder_graphs),
        read_unplanned_bytes=partial(read_unplanned_bytes, plan, readings),
        grammars=grammars,
        encodes_ahead=parts.ahead,
    )


def build_encoder_engine(config: EngineConfig, *, open_hardware: OpenHardware | None = None) -> EncoderEngine:
    """The vision encoder alone, ready: no decoder weights, no KV cache, no requests.

    Raises:
        ConfigError, CheckpointError: as `build_engine`.
    """
    phases = Phases()
    with phases("baseline"):
        hardware = (open_hardware or hardware_for(config))(config)
        model_config, resolved, directory = _resolve(config)
        kernels = choose_kernels(config, model_config, device=hardware.torch_device, dtype=hardware.dtype)
    with phases("load_weights"):
        model = _load(config, directory, model_config, hardware, kernels, parts="vision")
    with phases("profile"):
        log.info("profiling: the largest step is run to measure its memory")
        readings = hardware.readings()
        backend, _ = hardware.graph_backends(config, counted=())
        parts = assemble_encoder(resolved, model_config, model, hardware, kernels, backend)
        readings.measure_transient(parts, resolved)
    with phases("capture_encoder"):
        parts.capture_encoder()
    with phases("prove_transient"):
        readings.prove_transient(parts, resolved)
    with phases("plan"):
        plan = plan_encoder_memory(
            requested_bytes=hardware.device.reachable_bytes(hardware.device.requested_bytes(config)),
            rows=readings.rows(parts),
            margin_bytes=config.memory_margin_bytes,
            reserve_graph_memory=config.reserve_graph_memory,
            request_knob=hardware.device.request_knob,
        )
    with phases("keep_transient"):
        readings.keep_transient(parts, resolved)
    with phases("final_reading"):
        ledger = plan.ledger(used_bytes=readings.used_bytes())
    _log_ready(plan, ledger, phases)
    graphs = parts.encoder.graphs
    infos = GraphProbe((graphs.info(reserved_bytes=graphs.graph_bytes),)).graph_infos(None, config.reserve_graph_memory)
    return EncoderEngine(
        parts.encoder,
        parts.store,
        _info(config, resolved, hardware, kernels, ledger, infos, phases),
        read_unplanned_bytes=partial(read_unplanned_bytes, plan, readings),
    )


def read_unplanned_bytes(plan: MemoryPlan, readings: Readings) -> int:
    """What is in use beyond the plan now. What an allocator merely keeps is given back before it would count."""
    unplanned_bytes = plan.unplanned_bytes(readings.used_bytes())
    if unplanned_bytes > 0 and readings.give_back():
        unplanned_bytes = plan.unplanned_bytes(readings.used_bytes())
    return unplanned_bytes


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


def _resolve(config: EngineConfig) -> tuple[ModelConfig, ResolvedConfig, Path]:
    directory = locate_model(config.model, config.revision)
    model_config = read_model_config(directory)
    return model_config, resolve_config(config, model_config, read_processor_config(directory)), directory


def _load(
    config: EngineConfig,
    directory: Path,
    model_config: ModelConfig,
    hardware: Hardware,
    kernels: Kernels,
    *,
    parts: Literal["all", "vision"],
) -> LoadedModel:
    """The model on its device, with the kernels that were chosen."""
    model = load_model(
        directory,
        model_config,
        dtype=hardware.dtype,
        device=hardware.torch_device,
        encoder_attention=build_encoder_attention(kernels.encoder_attention),
        parts=parts,
        load_format=config.load_format,
        seed=config.seed,
    )
    if kernels.is_compiled:
        model.compile_layers(has_fused_text=kernels.is_fused)
    if model.text is not None:
        row = build_one_row_kernels(kernels.one_row, facts=kernels.facts)
        with torch.inference_mode():
            model.text.use_kernels(row=row, rows=build_any_rows_kernels(is_fused=kernels.is_fused))
    if kernels.is_packed:
        model.pack_products()
    return model


def _first_kv(config: EngineConfig, hardware: Hardware, request: KVRequest, layout: KVLayout) -> KVCache:
    """What the start captures on: the cache itself, still small, or a throw-away one."""
    if config.kv_backing == "vmm":
        return KVCache(layout, MIN_BLOCKS, hardware.reserve_kv(config, request))
    return KVCache(layout, MIN_BLOCKS, hardware.minimal_kv(config, request))


def _plan(config: EngineConfig, hardware: Hardware, rows: MeasuredRows, kv: KVRequest) -> MemoryPlan:
    device = hardware.device
    return plan_memory(
        requested_bytes=device.reachable_bytes(device.requested_bytes(config)),
        rows=rows,
        kv=kv,
        margin_bytes=config.memory_margin_bytes,
        reserve_graph_memory=config.reserve_graph_memory,
        request_knob=device.request_knob,
        total_bytes=device.total_bytes,
    )


def _backed(
    back: Callable[[int], KVCache], plan: MemoryPlan, make_plan: Callable[[], MemoryPlan]
) -> tuple[KVCache, MemoryPlan]:
    """The cache of the plan's size, or of a new plan's if another tenant took the memory in between.

    Raises:
        ConfigError: there is not even memory for the second plan.
    """
    try:
        return back(plan.num_blocks), plan
    except (VirtualMemoryError, torch.OutOfMemoryError) as error:
        log.warning("the planned KV cache cannot be had; it is planned again", extra={"error": str(error)})
    plan = make_plan()
    try:
        return back(plan.num_blocks), plan
    except (VirtualMemoryError, torch.OutOfMemoryError) as error:
        num_bytes = plan.components["kv"]
        raise ConfigError(
            f"a KV cache of {num_bytes} bytes cannot be had ({error}): "
            "lower gpu_memory_utilization, or kv_cache_memory_bytes if it is set"
        ) from error


def _grown(kv: KVCache, num_blocks: int) -> KVCache:
    kv.resize(num_blocks)
    return kv


def _allocated(layout: KVLayout, hardware: Hardware, num_blocks: int) -> KVCache:
    return KVCache(layout, num_blocks, hardware.allocate_kv(num_blocks * layout.block_bytes))


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


def _log_ready(plan: MemoryPlan, ledger: MemoryLedger, phases: Phases) -> None:
    log.info("memory plan", extra={"components": plan.components, "unplanned_bytes": ledger.unplanned_bytes})
    log.debug("%s", plan)
    seconds = round(sum(phases.seconds.values()), 3)
    log.info("engine ready", extra={"seconds": seconds, "kv_blocks": ledger.num_blocks})


def _info(
    config: EngineConfig,
    resolved: ResolvedConfig,
    hardware: Hardware,
    kernels: Kernels,
    ledger: MemoryLedger,
    graphs: tuple[GraphFamilyInfo, ...],
    phases: Phases,
    *,
    max_request_bytes: int | None = None,
) -> EngineInfo:
    return EngineInfo(
        model=config.model,
        device=hardware.device.name,
        dtype=str(hardware.dtype).removeprefix("torch."),
        attention_backend=kernels.attention.backend,
        encoder_attention_backend=kernels.encoder_attention.backend,
        max_model_len=resolved.max_model_len,
        encoder_cache_tokens=resolved.encoder_cache_tokens,
        memory=ledger,
        graphs=graphs,
        startup_phase_seconds=phases.seconds,
        max_request_bytes=max_request_bytes,
    )
