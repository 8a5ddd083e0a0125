"""Cumulative numbers that the engine ships to the server, and what it says of itself once. Data only, no torch.

The engine counts and never resets; the server exports these as Prometheus counters and gauges.
"""

from typing import Literal, get_args

import msgspec

GraphFamily = Literal["encoder", "decoder"]
GRAPH_FAMILIES: tuple[GraphFamily, ...] = ("encoder", "decoder")

MissReason = Literal[
    "too_large", "too_many_items", "disabled", "capture_failed", "self_test_failed", "mixed_step", "busy"
]
MISS_REASONS: dict[GraphFamily, tuple[MissReason, ...]] = {
    "encoder": ("too_large", "too_many_items", "disabled", "capture_failed", "self_test_failed", "busy"),
    "decoder": ("too_large", "disabled", "capture_failed", "self_test_failed", "mixed_step"),
}

# What graphs run on, and what became of a bucket at the start: captured, or why it runs eager.
GraphBackendName = Literal["cuda", "emulated", "none"]
GRAPH_BACKENDS: tuple[GraphBackendName, ...] = get_args(GraphBackendName)
BucketState = Literal["captured", "capture_failed", "self_test_failed"]
BUCKET_STATES: tuple[BucketState, ...] = get_args(BucketState)

# Rows of the memory ledger, in the order in which they are printed. They sum to the requested bytes.
MEMORY_COMPONENTS: tuple[str, ...] = (
    "context",
    "weights",
    "attention_workspace",
    "static_buffers",
    "embedding_store",
    "requests",
    "transient",
    "encoder_graphs",
    "decoder_graphs",
    "graph_driver",
    "margin",
    "rounding",
    "kv",
)


class GraphCounts(msgspec.Struct, kw_only=True):
    """What one graph family did. Hits and misses count items: images for the encoder, sequences for the decoder.

    `replays` is by bucket name. Warm-up and self-test count nowhere.
    """

    hits: int = 0
    misses: dict[str, int] = {}
    replays: dict[str, int] = {}
    padded_tokens: int = 0


class BucketInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One bucket of a ladder as captured at start. Of `graph_bytes`, `driver_bytes` lie outside of the allocator's
    segments."""

    name: str
    tokens: int
    max_items: int
    state: BucketState
    graph_bytes: int
    capture_seconds: float
    driver_bytes: int = 0
    self_test: Literal["passed", "failed", "not_run"] = "not_run"
    error: str | None = None


class GraphFamilyInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One family's graphs. `reserved`: what KV sizing subtracted; `measured`: also when not subtracted; `captured`:
    what the graphs in use took, of which the driver's part is `driver`. `segment`: what the family's private pool
    holds, as the allocator says. `num_captures`: how often each bucket was captured. `probe_segments_left`: what the
    first graphs of all families left in private pools when they were released."""

    family: GraphFamily
    backend: GraphBackendName
    buckets: tuple[BucketInfo, ...] = ()
    reserved_bytes: int = 0
    measured_bytes: int = 0
    captured_bytes: int = 0
    driver_bytes: int = 0
    num_captures: int = 1
    probe_segments_left_bytes: int = 0
    segment_bytes: int = 0


class MemoryLedger(msgspec.Struct, frozen=True, kw_only=True):
    """The memory plan: bytes per component (`MEMORY_COMPONENTS`), whose sum is `requested_bytes`.

    `num_blocks`: KV blocks without the null block, which holds nothing of a request but is in the `kv` component.
    `unplanned_bytes`: what the device says we use, minus (requested - margin - rounding); the claim is that it is <= 0.
    """

    requested_bytes: int
    components: dict[str, int]
    num_blocks: int
    block_size: int
    block_bytes: int
    unplanned_bytes: int


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine says of itself when it is ready."""

    model: str
    device: str
    dtype: str
    attention_backend: str
    encoder_attention_backend: str
    max_model_len: int
    encoder_cache_tokens: int
    memory: MemoryLedger
    graphs: tuple[GraphFamilyInfo, ...]
    startup_phase_seconds: dict[str, float]
    # What its requests may hold together of the planned memory (`runtime.request_budget`); None: none of it.
    max_request_bytes: int | None = None


class EngineStats(msgspec.Struct, kw_only=True):
    """A snapshot. Gauges are now; everything else is cumulative since the start."""

    # Gauges; `num_blocks` without the null block.
    num_waiting: int = 0
    num_running: int = 0
    num_blocks: int = 0
    num_blocks_used: int = 0
    encoder_cache_tokens_used: int = 0
    unplanned_bytes: int = 0

    # Counters.
    num_steps: int = 0
    num_failed_steps: int = 0
    num_step_sequences: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    prefix_cache_query_tokens: int = 0
    prefix_cache_hit_tokens: int = 0
    encoder_cache_queries: int = 0
    encoder_cache_hits: int = 0
    num_images_encoded: int = 0
    num_image_tokens_encoded: int = 0
    encode_seconds: float = 0.0
    encode_batches: int = 0
    step_seconds: float = 0.0
    graphs: dict[str, GraphCounts] = {}
