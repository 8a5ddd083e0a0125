"""The engine's configuration: frozen, checked once, and resolved by a pure function into a new object.

Knows no torch, no HTTP, and no environment: the server's settings read flags, variables and files, and make this.
"""

from typing import Literal

import msgspec

from runtime.checkpoint import CheckpointError, ModelConfig, ProcessorConfig

MIB = 1 << 20
GIB = 1 << 30

# Largest default budget of the encoder's ladder, in output tokens (a picture of 1792 x 1792 pixels). Larger pictures
# run eager unless --encoder-graph-budgets says otherwise: a graph for all that a checkpoint allows holds gigabytes.
MAX_DEFAULT_BUDGET = 4096
MIN_DEFAULT_BUDGET = 64

# Of one prompt token, from its arrival to its request's end: the number (32 bytes with CPython) in the request's list
# and in the scheduler's (8 each), the executor's arrays of tokens (8) and of positions in three dimensions (24), and a
# sixteenth of a block's hash (73).
PROMPT_TOKEN_BYTES = 96

# Default bound of what the requests in the engine hold on a CPU, unless one alone may hold more: 200 streams with
# pictures of 122 kB on average need 24 MB.
MIN_DEFAULT_REQUEST_MEMORY_BYTES = 32 * MIB

DecoderGraphs = Literal["none", "decode", "full"]
EncoderGraphPolicy = Literal["independent", "follow-decoder"]
ReserveGraphMemory = Literal["on", "off", "skip"]
KVBackingKind = Literal["vmm", "torch"]
GraphBackendKind = Literal["auto", "emulated"]
AttentionBackend = Literal["auto", "flashinfer-fa2", "flashinfer-fa3", "sdpa"]
EncoderAttentionBackend = Literal["auto", "varlen", "sdpa"]
CompileMode = Literal["auto", "on", "off"]
OneRowBackend = Literal["auto", "triton", "numpy", "torch"]
RunAhead = Literal["auto", "on", "off"]
EncodeAhead = Literal["auto", "on", "off"]
LoadFormat = Literal["auto", "random"]


class ConfigError(ValueError):
    """A setting is out of range or contradicts another; the message names the knob, the value and the limit."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything the engine can be told. `None` means: derived by `resolve_config`."""

    model: str = "demo"
    # Of a hub name: a commit, tag or branch; `None`: the main branch.
    revision: str | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    seed: int = 0

    # Threads of one operation on a CPU; `None`: the cores that this process may use, but for one (runtime/threads).
    num_threads: int | None = None

    # The model: kernels, and where weights come from (`random` needs no weight files).
    attention_backend: AttentionBackend = "auto"
    encoder_attention_backend: EncoderAttentionBackend = "auto"
    one_row_backend: OneRowBackend = "auto"
    compile: CompileMode = "auto"
    load_format: LoadFormat = "auto"

    # Limits of a request and of a step.
    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 2048
    max_images_per_prompt: int = 8
    min_pixels: int | None = None
    max_pixels: int | None = None

    # Launch a decode step before the tokens of the one before it are read; `auto`: on CUDA, if there are graphs.
    run_ahead: RunAhead = "auto"

    # Encode images on a thread of their own, beside the steps, before their requests are admitted; `auto`: on a CPU of
    # several cores where an operation has one thread.
    encode_ahead: EncodeAhead = "auto"

    # KV cache.
    block_size: int = 16
    enable_prefix_caching: bool = True
    encoder_cache_tokens: int | None = None

    # How memory comes behind the KV cache: addresses first and memory later, or all at once after a probe.
    kv_backing: KVBackingKind = "vmm"

    # Only the vision encoder: no decoder weights, no KV cache, no requests; images become embeddings.
    mm_encoder_only: bool = False

    # Memory.
    gpu_memory_utilization: float = 0.9
    memory_bytes: int | None = None
    kv_cache_memory_bytes: int | None = None
    memory_margin_bytes: int = 64 * MIB
    # On a CPU: what the requests in the engine may hold together (`runtime.request_budget`).
    request_memory_bytes: int | None = None

    # Graphs.
    enforce_eager: bool = False
    encoder_graphs: bool = True
    encoder_graph_policy: EncoderGraphPolicy = "independent"
    encoder_graph_budgets: tuple[int, ...] | None = None
    encoder_graph_max_items: int = 4
    decoder_graphs: DecoderGraphs = "decode"
    decoder_graph_sizes: tuple[int, ...] | None = None
    reserve_graph_memory: ReserveGraphMemory = "on"
    strict_graphs: bool = False

    # `emulated` replays eagerly over the same padded buckets, on any device: the plain twin of graphs.
    graph_backend: GraphBackendKind = "auto"

    def __post_init__(self) -> None:
        for knob in ("max_num_seqs", "max_num_batched_tokens", "block_size", "encoder_graph_max_items"):
            if getattr(self, knob) < 1:
                raise ConfigError(f"{knob} is {getattr(self, knob)}; it must be at least 1")
        if self.max_images_per_prompt < 0:
            raise ConfigError(f"max_images_per_prompt is {self.max_images_per_prompt}; it must be at least 0")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): a step gives every running request one token"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization is {self.gpu_memory_utilization}; it must be in (0, 1]")
        if self.memory_margin_bytes < 0:
            raise ConfigError(f"memory_margin_bytes is {self.memory_margin_bytes}; it must be at least 0")
        for knob in (
            "num_threads",
            "max_model_len",
            "min_pixels",
            "max_pixels",
            "encoder_cache_tokens",
            "memory_bytes",
            "kv_cache_memory_bytes",
            "request_memory_bytes",
        ):
            value = getattr(self, knob)
            if value is not None and value < 1:
                raise ConfigError(f"{knob} is {value}; it must be at least 1")
        for knob in ("encoder_graph_budgets", "decoder_graph_sizes"):
            sizes = getattr(self, knob)
            if sizes is not None and (not sizes or min(sizes) < 1 or sorted(set(sizes)) != list(sizes)):
                raise ConfigError(f"{knob} is {list(sizes)}; it must be ascending positive numbers without repetition")


class ResolvedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration with nothing left open, beside what the checkpoint says. Made by `resolve_config` only."""

    engine: EngineConfig
    max_model_len: int
    min_pixels: int
    max_pixels: int
    max_tokens_per_image: int
    encoder_cache_tokens: int
    encoder_graph_budgets: tuple[int, ...]
    decoder_graph_sizes: tuple[int, ...]
    request_memory_bytes: int


def resolve_config(config: EngineConfig, model: ModelConfig, processor: ProcessorConfig) -> ResolvedConfig:
    """Fills in what `config` leaves open. Pure: the server and the engine resolve the same inputs to the same answer.

    Raises:
        ConfigError: a knob contradicts the checkpoint or another knob.
        CheckpointError: two of the checkpoint's files contradict each other.
    """
    max_model_len = config.max_model_len or min(model.text.max_position_embeddings, 32768)
    if max_model_len > model.text.max_position_embeddings:
        raise ConfigError(
            f"max_model_len is {max_model_len}; the model's positions end at {model.text.max_position_embeddings}"
        )
    min_pixels = config.min_pixels or processor.min_pixels
    max_pixels = config.max_pixels or processor.max_pixels
    _check_patches(model, processor)
    token_area = model.vision.pixels_per_token_side**2
    if max_pixels < token_area:
        raise ConfigError(f"max_pixels is {max_pixels}; one output token covers {token_area} pixels")
    if min_pixels > max_pixels:
        raise ConfigError(f"min_pixels ({min_pixels}) is above max_pixels ({max_pixels})")
    max_tokens_per_image = max_pixels // token_area
    cache_tokens = config.encoder_cache_tokens or max(config.max_num_batched_tokens, max_tokens_per_image)
    if cache_tokens < max_tokens_per_image:
        raise ConfigError(
            f"encoder_cache_tokens is {cache_tokens}, but one image of max_pixels ({max_pixels}) has "
            f"{max_tokens_per_image} tokens: raise encoder_cache_tokens or lower max_pixels"
        )
    budgets = config.encoder_graph_budgets or default_encoder_budgets(
        max(1, min_pixels // token_area), max_tokens_per_image
    )
    decoder_sizes = config.decoder_graph_sizes or default_decoder_sizes(config.max_num_seqs)
    if decoder_sizes[-1] > config.max_num_seqs:
        raise ConfigError(
            f"decoder_graph_sizes end at {decoder_sizes[-1]}, but max_num_seqs is {config.max_num_seqs}: "
            "no step would use them"
        )
    largest_request_bytes = max_request_bytes(
        max_model_len=max_model_len,
        max_image_tokens=config.max_images_per_prompt * max_tokens_per_image,
        token_area=token_area,
    )
    request_memory_bytes = config.request_memory_bytes or max(MIN_DEFAULT_REQUEST_MEMORY_BYTES, largest_request_bytes)
    if request_memory_bytes < largest_request_bytes:
        raise ConfigError(
            f"request_memory_bytes is {request_memory_bytes}, but one request of max_model_len ({max_model_len}) with "
            f"pictures holds up to {largest_request_bytes}: raise request_memory_bytes, or lower max_model_len, "
            "max_pixels or the pictures of a request"
        )
    return ResolvedConfig(
        engine=config,
        max_model_len=max_model_len,
        min_pixels=min_pixels,
        max_pixels=max_pixels,
        max_tokens_per_image=max_tokens_per_image,
        encoder_cache_tokens=cache_tokens,
        encoder_graph_budgets=budgets,
        decoder_graph_sizes=decoder_sizes,
        request_memory_bytes=request_memory_bytes,
    )


def _check_patches(model: ModelConfig, processor: ProcessorConfig) -> None:
    """
    Raises:
        CheckpointError: the picture processor's file says other sizes than the model's.
    """
    vision = model.vision
    for name, own, models in (
        ("patch_size", processor.patch_size, vision.patch_size),
        ("merge_size", processor.merge_size, vision.spatial_merge_size),
        ("temporal_patch_size", processor.temporal_patch_size, vision.temporal_patch_size),
    ):
        if own is not None and own != models:
            raise CheckpointError(
                f"preprocessor_config.json: {name} is {own}, but the vision_config of config.json says {models}"
            )


def max_request_bytes(*, max_model_len: int, max_image_tokens: int, token_area: int) -> int:
    """The most that one request can hold: as many pictures as fit its length (or are allowed), and its prompt.

    Args:
        token_area: pixels of one output token, which have three bytes each.
    """
    return 3 * token_area * min(max_model_len, max_image_tokens) + PROMPT_TOKEN_BYTES * max_model_len


def default_encoder_budgets(min_tokens: int, max_tokens: int) -> tuple[int, ...]:
    """The default ladder of encoder budgets in output tokens: powers of two and their 3/2 between the smallest and the
    largest picture, so that a single picture wastes at most a third of its bucket, up to `MAX_DEFAULT_BUDGET`."""
    top = min(max(max_tokens, MIN_DEFAULT_BUDGET), MAX_DEFAULT_BUDGET)
    size = MIN_DEFAULT_BUDGET
    while size * 2 <= min_tokens and size < top:
        size *= 2
    ladder: list[int] = []
    while size < top:
        ladder.append(size)
        if size * 3 // 2 < top:
            ladder.append(size * 3 // 2)
        size *= 2
    return (*ladder, top)


def default_decoder_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes 1, 2, 4, 8, ... up to and including `max_num_seqs`."""
    sizes = [1]
    while sizes[-1] * 2 < max_num_seqs:
        sizes.append(sizes[-1] * 2)
    return tuple(dict.fromkeys([*sizes, max_num_seqs]))
