"""Builds an engine: the boot flow on one screen, each phase timed and logged. Knows the order of things, and no steps.

The plan is made of what was measured here, in this process: nothing is extrapolated. See DESIGN's memory equation in
ARCHITECTURE.md.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import torch

from runtime.checkpoint import ModelConfig, locate_model, read_model_config, read_processor_config
from runtime.config import ConfigError, EngineConfig, ResolvedConfig, resolve_config
from runtime.engine import Engine
from runtime.executor.batch import StepBuffers
from runtime.executor.decoder_program import DecoderInputs, step_max_seqs
from runtime.executor.device import CpuDevice, Device, allowed_cpus
from runtime.executor.embedding_store import EmbeddingStore
from runtime.executor.encoder_runner import EncoderProgram, EncoderRunner, StaticEncoderInputs
from runtime.executor.graph_backend import EmulatedBackend
from runtime.executor.graphs import (
    GraphSet,
    decoder_buckets,
    encoder_buckets,
    should_capture_decoder,
    should_capture_encoder,
)
from runtime.executor.kv_cache import AnonymousMapping, KVCache, KVLayout, kv_layout
from runtime.executor.memory import KVRequest, MeasuredRows, MemoryPlan, format_plan, plan_memory
from runtime.executor.model_runner import ModelRunner
from runtime.model.loader import LoadedModel, load_model
from runtime.model.sdpa import PagedSdpaAttention
from runtime.scheduler.scheduler import Scheduler
from runtime.stats import EngineInfo, GraphFamilyInfo

log = logging.getLogger(__name__)

# Threads of one operation gain little beyond this on models that a CPU serves (docs/decisions.md).
MAX_DEFAULT_THREADS = 16

# A default request on a CPU stops at a million tokens of KV: block numbers cost memory too.
MAX_DEFAULT_BLOCK_TOKENS = 1 << 20


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
        torch.set_num_threads(config.num_threads or min(MAX_DEFAULT_THREADS, allowed_cpus()))
        requested_bytes = device.requested_bytes(config)
        memory = Readings(device)
    with phases("load_weights"):
        directory = locate_model(config.model)
        model_config, processor = read_model_config(directory), read_processor_config(directory)
        resolved = resolve_config(config, model_config, processor)
        dtype = _dtype(config, model_config)
        model = load_model(directory, model_config, dtype=dtype, device=torch.device(device.name), processor=processor)
        memory.weights = model.weight_bytes
    with phases("reserve_kv"):
        kv_request = _kv_request(resolved, kv_layout(model_config.text, dtype, config.block_size), device)
        kv = _reserve_kv(kv_request, kv_layout(model_config.text, dtype, config.block_size), requested_bytes)
        memory.kv = kv
        parts = _assemble(resolved, model_config, model, kv, dtype, memory)
    with phases("profile"):
        memory.measure_transient(parts)
    with phases("capture_encoder"):
        parts.capture_encoder()
    with phases("capture_decoder"):
        parts.capture_decoder()
    with phases("plan"):
        plan = plan_memory(
            requested_bytes=requested_bytes,
            rows=memory.rows(parts),
            kv=kv_request,
            margin_bytes=config.memory_margin_bytes,
            reserve_graph_memory=config.reserve_graph_memory,
            request_knob=device.request_knob,
            total_bytes=device.total_bytes,
        )
    with phases("back_kv"):
        kv.resize(plan.num_blocks)
    with phases("final_reading"):
        used_bytes = memory.used_bytes()
        log.info("memory plan\n%s", format_plan(plan), extra={"memory": plan.components})
        scheduler = Scheduler.from_config(
            resolved, eos_token_ids=model_config.eos_token_ids, num_blocks=plan.num_blocks
        )
    info = _info(resolved, model_config, dtype, device, plan, used_bytes, parts, phases)
    return Engine(
        scheduler,
        parts.runner,
        info,
        encoder=parts.encoder,
        graphs=(parts.encoder.graphs, parts.decoder_graphs),
        read_unplanned_bytes=lambda: plan.unplanned_bytes(memory.used_bytes()),
    )
