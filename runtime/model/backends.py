"""Which kernels run attention and whether layers are compiled, and why: choices from facts, and what they build.

Knows settings, devices and shapes. The choices are pure functions of what `DeviceFacts` says, so that a CPU can test
what a GPU will get.
"""

import importlib
import importlib.util
import logging
from dataclasses import dataclass
from typing import Any, Literal

import torch

from runtime.checkpoint import ModelConfig, TextConfig, VisionConfig
from runtime.config import (
    AttentionBackend,
    CompileMode,
    ConfigError,
    EncoderAttentionBackend,
    EngineConfig,
    OneRowBackend,
)
from runtime.model import packed
from runtime.model.attention import CacheAttention, EncoderAttention, KVLayers
from runtime.model.flashinfer_attention import HEAD_DIMS, AttentionLimits, FlashInferAttention
from runtime.model.qwen2_5_vl_text import LayerKernels
from runtime.model.row_attention import RowAttention
from runtime.model.sdpa import PagedSdpaAttention, SdpaEncoderAttention

log = logging.getLogger(__name__)

HALF = (torch.float16, torch.bfloat16)

# FlashInfer's `fa3` is written for this generation alone (9.0, Hopper); `fa2` and `varlen_attn` want 8.0 at least.
HOPPER = (9, 0)
AMPERE = (8, 0)


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """What the choices depend on. `capability` is CUDA's compute capability; (0, 0) on a CPU. `num_threads`: of one
    operator on a CPU."""

    device: Literal["cpu", "cuda"]
    capability: tuple[int, int]
    num_multiprocessors: int
    has_flashinfer: bool
    has_triton: bool = False
    num_threads: int = 1

    @classmethod
    def of(cls, device: torch.device) -> "DeviceFacts":
        """The facts of a real device."""
        if device.type != "cuda":
            return cls(
                device="cpu",
                capability=(0, 0),
                num_multiprocessors=0,
                has_flashinfer=False,
                num_threads=torch.get_num_threads(),
            )
        properties = torch.cuda.get_device_properties(device)
        return cls(
            device="cuda",
            capability=(properties.major, properties.minor),
            num_multiprocessors=properties.multi_processor_count,
            has_flashinfer=importlib.util.find_spec("flashinfer") is not None,
            has_triton=importlib.util.find_spec("triton") is not None,
        )


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A backend and why it was chosen. `can_capture`: its forward may be part of a graph of this device."""

    backend: Literal["flashinfer-fa2", "flashinfer-fa3", "varlen", "sdpa"]
    reason: str
    can_capture: bool


@dataclass(frozen=True, kw_only=True)
class OneRowChoice:
    """What runs the decoder's steps of one row, and why. `torch`: the layers themselves."""

    backend: Literal["triton", "numpy", "torch"]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Everything that was chosen for one engine."""

    facts: DeviceFacts
    attention: Choice
    encoder_attention: Choice
    one_row: OneRowChoice
    is_compiled: bool
    # Whether the decoder's layers go through Triton kernels, whatever the number of rows.
    is_fused: bool
    # Whether products go through oneDNN, with weights of its own layout.
    is_packed: bool


def choose_kernels(config: EngineConfig, model: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> Kernels:
    """The choices for an engine, each logged with its reason.

    Raises:
        ConfigError: what was asked for cannot run here.
    """
    facts = DeviceFacts.of(device)
    attention = choose_attention(config.attention_backend, facts=facts, dtype=dtype, text=model.text)
    has_graphs = config.decoder_graphs != "none" and not config.enforce_eager and attention.can_capture
    kernels = Kernels(
        facts=facts,
        attention=attention,
        encoder_attention=choose_encoder_attention(
            config.encoder_attention_backend, facts=facts, dtype=dtype, vision=model.vision
        ),
        one_row=choose_one_row(config.one_row_backend, facts=facts, dtype=dtype, has_graphs=has_graphs),
        is_compiled=should_compile(config.compile, facts=facts),
        is_fused=should_fuse(config.compile, facts=facts, dtype=dtype),
        is_packed=should_pack(config.compile, facts=facts, dtype=dtype),
    )
    for kind, choice in (("decoder", kernels.attention), ("encoder", kernels.encoder_attention)):
        log.info("attention", extra={"kind": kind, "backend": choice.backend, "reason": choice.reason})
    log.info("one row", extra={"backend": kernels.one_row.backend, "reason": kernels.one_row.reason})
    log.info(
        "compile",
        extra={
            "compile": config.compile,
            "is_compiled": kernels.is_compiled,
            "is_fused": kernels.is_fused,
            "is_packed": kernels.is_packed,
        },
    )
    return kernels


def choose_attention(wanted: AttentionBackend, *, facts: DeviceFacts, dtype: torch.dtype, text: TextConfig) -> Choice:
    """The decoder's attention.

    Raises:
        ConfigError: what was asked for cannot run here; says why.
    """
    obstacle = _flashinfer_obstacle(facts, dtype, text)
    if wanted == "flashinfer-fa3" and obstacle is None and facts.capability != HOPPER:
        obstacle = f"fa3 is for compute capability 9.0, this device has {_version(facts.capability)}"
    if wanted == "sdpa":
        return _sdpa(facts, "it was asked for")
    if wanted != "auto":
        if obstacle is not None:
            raise ConfigError(f"attention_backend is {wanted!r}: {obstacle}")
        return Choice(backend=wanted, reason="it was asked for", can_capture=True)
    if obstacle is not None:
        return _sdpa(facts, obstacle)
    return Choice(
        backend="flashinfer-fa2",
        reason="one module serves prefill and decode; flashinfer-fa3 compiles a second one for minutes at first use",
        can_capture=True,
    )


def choose_encoder_attention(
    wanted: EncoderAttentionBackend, *, facts: DeviceFacts, dtype: torch.dtype, vision: VisionConfig
) -> Choice:
    """The encoder's attention.

    Raises:
        ConfigError: what was asked for cannot run here; says why.
    """
    head_dim = vision.hidden_size // vision.num_heads
    obstacle: str | None = None
    if facts.device == "cpu":
        obstacle = "the device is a CPU"
    elif dtype not in HALF:
        obstacle = f"it serves half precision, not {_name(dtype)}"
    elif facts.capability < AMPERE:
        obstacle = f"it wants compute capability 8.0, this device has {_version(facts.capability)}"
    elif head_dim % 8 or head_dim > 256:
        obstacle = f"it serves heads of up to 256 in steps of 8, the encoder's are {head_dim} wide"
    if wanted == "sdpa":
        return _sdpa(facts, "it was asked for")
    if obstacle is None:
        reason = "it was asked for" if wanted == "varlen" else f"heads are {head_dim} wide, segments stay on the device"
        return Choice(backend="varlen", reason=reason, can_capture=True)
    if wanted == "varlen":
        raise ConfigError(f"encoder_attention_backend is 'varlen': {obstacle}")
    return _sdpa(facts, obstacle)


def choose_one_row(wanted: OneRowBackend, *, facts: DeviceFacts, dtype: torch.dtype, has_graphs: bool) -> OneRowChoice:
    """What runs the decoder's steps of one row; `numpy` runs those of a few rows too, where products are packed
    (`batch_decoder`). `has_graphs`: whether such steps are replayed.

    Raises:
        ConfigError: what was asked for cannot run here; says why.
    """
    if wanted == "torch":
        return OneRowChoice(backend="torch", reason="it was asked for")
    if wanted != "auto":
        obstacle = _numpy_obstacle(facts, dtype) if wanted == "numpy" else _triton_obstacle(facts, dtype)
        if obstacle is not None:
            raise ConfigError(f"one_row_backend is {wanted!r}: {obstacle}")
        return OneRowChoice(backend=wanted, reason="it was asked for")
    if facts.device == "cpu":
        obstacle = _numpy_obstacle(facts, dtype)
        if obstacle is None and facts.num_threads > 1:
            obstacle = f"NumPy would start threads of its own beside torch's {facts.num_threads}"
        if obstacle is not None:
            return OneRowChoice(backend="torch", reason=obstacle)
        return OneRowChoice(backend="numpy", reason="NumPy's operators cost less than torch's")
    obstacle = _triton_obstacle(facts, dtype)
    if obstacle is None and not has_graphs:
        obstacle = "without decoder graphs the launches of kernels count, not what they do"
    if obstacle is None and facts.capability != HOPPER:
        obstacle = "the tiles were measured on compute capability 9.0 only"
    if obstacle is not None:
        return OneRowChoice(backend="torch", reason=obstacle)
    return OneRowChoice(backend="triton", reason="products of one row read weights faster than in cuBLAS")


def build_one_row_kernels(choice: OneRowChoice, *, facts: DeviceFacts) -> LayerKernels | None:
    """The Triton kernels for one row; None where they were not chosen. Triton is imported here and in
    `build_any_rows_kernels`, and nowhere before."""
    if choice.backend != "triton":
        return None
    from runtime.model.triton_one_row import TritonOneRow

    return TritonOneRow(waits=facts.capability >= HOPPER)


def build_any_rows_kernels(*, is_fused: bool) -> LayerKernels | None:
    """The Triton kernels for any number of rows."""
    if not is_fused:
        return None
    from runtime.model.triton_any_rows import TritonAnyRows

    return TritonAnyRows()


def should_compile(mode: CompileMode, *, facts: DeviceFacts) -> bool:
    """Whether layers go through Inductor: the encoder's, and the decoder's unless they are fused. `auto`: on CUDA,
    where it halves the encoder's time; on a CPU it costs more at start than it gives back."""
    return mode == "on" or (mode == "auto" and facts.device == "cuda")


def should_fuse(mode: CompileMode, *, facts: DeviceFacts, dtype: torch.dtype) -> bool:
    """Whether the decoder's layers go through Triton kernels: where they run, and neither compiled nor plain layers
    were asked for."""
    return mode == "auto" and _triton_obstacle(facts, dtype) is None


def should_pack(mode: CompileMode, *, facts: DeviceFacts, dtype: torch.dtype) -> bool:
    """Whether products go through oneDNN with packed weights: in float32 on a CPU, where neither compiled nor plain
    layers were asked for, and torch has the operators."""
    return mode == "auto" and facts.device == "cpu" and dtype == torch.float32 and packed.is_available()


def build_attention(
    choice: Choice,
    kv: KVLayers,
    *,
    num_layers: int,
    limits: AttentionLimits,
    facts: DeviceFacts,
    one_row: OneRowChoice,
) -> CacheAttention:
    """The decoder's attention over `kv`, with all the memory that it will ever hold."""
    attention: CacheAttention
    if choice.backend == "flashinfer-fa2" or choice.backend == "flashinfer-fa3":
        package: Any = importlib.import_module("flashinfer")
        attention = FlashInferAttention(
            kv,
            num_layers=num_layers,
            limits=limits,
            kernel="fa3" if choice.backend == "flashinfer-fa3" else "fa2",
            num_multiprocessors=facts.num_multiprocessors,
            flashinfer=package,
        )
    else:
        attention = (RowAttention if one_row.backend == "numpy" else PagedSdpaAttention)(kv, num_layers=num_layers)
    attention.reserve(limits.max_model_len)
    return attention


def build_encoder_attention(choice: Choice) -> EncoderAttention:
    """The encoder's attention."""
    if choice.backend == "varlen":
        # Its module registers operators when it is imported: only where they are wanted.
        from runtime.model.varlen_attention import VarlenEncoderAttention

        return VarlenEncoderAttention()
    return SdpaEncoderAttention()


def _flashinfer_obstacle(facts: DeviceFacts, dtype: torch.dtype, text: TextConfig) -> str | None:
    """Why FlashInfer cannot serve the decoder here; None if it can."""
    if facts.device == "cpu":
        return "the device is a CPU"
    if not facts.has_flashinfer:
        return "flashinfer is not installed (the extra [cuda])"
    if dtype not in HALF:
        return f"FlashInfer serves half precision, not {_name(dtype)}"
    if facts.capability < AMPERE:
        return f"FlashInfer wants compute capability 8.0, this device has {_version(facts.capability)}"
    if text.head_dim not in HEAD_DIMS:
        return f"FlashInfer serves heads 64, 128 or 256 wide, the decoder's are {text.head_dim}"
    return None


def _triton_obstacle(facts: DeviceFacts, dtype: torch.dtype) -> str | None:
    """Why the Triton kernels cannot run here; None if they can."""
    if facts.device == "cpu":
        return "the device is a CPU"
    if not facts.has_triton:
        return "triton is not installed"
    if dtype not in HALF:
        return f"the kernels serve half precision, not {_name(dtype)}"
    if facts.capability < AMPERE:
        return f"the kernels want compute capability 8.0, this device has {_version(facts.capability)}"
    return None


def _numpy_obstacle(facts: DeviceFacts, dtype: torch.dtype) -> str | None:
    """Why NumPy cannot run the decoder's rows here; None if it can."""
    if facts.device != "cpu":
        return "the device is a GPU"
    if dtype != torch.float32:
        return f"NumPy's rows are float32, not {_name(dtype)}"
    return None


def _sdpa(facts: DeviceFacts, reason: str) -> Choice:
    # On a CPU graphs are emulated by eager calls, which may look at the host as they like.
    return Choice(backend="sdpa", reason=reason, can_capture=facts.device == "cpu")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _version(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
