"""What the built-in page polls: `GET /web/status`, the service's state as one small JSON document.

Numbers and names of our own only: no path, no prompt, no client's text. Whoever may use the API may read it. Prometheus
has /metrics; this document is for the page and changes with it.
"""

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from runtime.stats import (
    GRAPH_FAMILIES,
    MEMORY_COMPONENTS,
    BucketState,
    EngineInfo,
    EngineStats,
    GraphCounts,
    GraphFamilyInfo,
)
from server.lifecycle import ServicePhase
from server.routes import service_of
from server.service import Service
from server.settings import Settings


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine said of itself when it became ready."""

    device: str
    dtype: str
    attention_backend: str
    encoder_attention_backend: str
    max_model_len: int
    encoder_cache_tokens: int


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What the page must keep within; it reduces pictures that are larger."""

    max_images: int
    max_image_bytes: int
    max_image_pixels: int
    max_body_bytes: int
    max_queue_len: int
    max_num_seqs: int


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges of now, and counters since the start from which the page makes rates. `num_blocks`: KV blocks without the
    null block."""

    num_in_flight: int
    num_running: int
    num_waiting: int
    num_blocks: int
    num_blocks_used: int
    block_size: int
    encoder_cache_tokens_used: int
    num_prompt_tokens: int
    num_generation_tokens: int
    num_images_encoded: int
    num_preemptions: int


class MemoryRow(msgspec.Struct, frozen=True, kw_only=True):
    component: str
    num_bytes: int


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """The ledger in the plan's order; the rows sum to `requested_bytes`."""

    requested_bytes: int
    unplanned_bytes: int
    rows: list[MemoryRow]


class GraphBucket(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    tokens: int
    max_items: int
    state: BucketState
    num_bytes: int
    replays: int


class Graphs(msgspec.Struct, frozen=True, kw_only=True):
    """One family. Hits and misses are items, as in the metrics; misses by reason."""

    family: str
    backend: str
    hits: int
    misses: dict[str, int]
    padded_tokens: int
    reserved_bytes: int
    measured_bytes: int
    captured_bytes: int
    buckets: list[GraphBucket]


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    seconds: float


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The whole document. What only a ready engine knows is null or empty before."""

    phase: ServicePhase
    version: str
    limits: Limits
    load: Load
    engine: EngineFacts | None
    memory: Memory | None
    graphs: list[Graphs]
    startup: list[Phase]


# Apart from the page's files, because this one shows what only those who may use the API should see.
router = APIRouter(include_in_schema=False)


@router.get("/web/status")
async def web_status(request: Request) -> Response:
    body = msgspec.json.encode(status_of(service_of(request)))
    headers = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
    return Response(body, headers=headers, media_type="application/json")


def status_of(service: Service) -> Status:
    info, stats = service.client.info, service.client.stats
    return Status(
        phase="dead" if service.client.state == "dead" else service.lifecycle.phase,
        version=service.version,
        limits=_limits(service.settings),
        load=_load(stats, info, num_in_flight=service.lifecycle.num_in_flight),
        engine=_facts(info) if info else None,
        memory=_memory(info, stats) if info else None,
        graphs=_graphs(info, stats) if info else [],
        startup=[Phase(name=name, seconds=s) for name, s in info.startup_phase_seconds.items()] if info else [],
    )


def _facts(info: EngineInfo) -> EngineFacts:
    return EngineFacts(**{name: getattr(info, name) for name in EngineFacts.__struct_fields__})


def _limits(settings: Settings) -> Limits:
    return Limits(
        max_images=settings.max_images_per_prompt,
        max_image_bytes=settings.max_image_bytes,
        max_image_pixels=settings.max_image_pixels,
        max_body_bytes=settings.max_body_bytes,
        max_queue_len=settings.max_queue_len,
        max_num_seqs=settings.max_num_seqs,
    )


def _load(stats: EngineStats, info: EngineInfo | None, *, num_in_flight: int) -> Load:
    names = set(Load.__struct_fields__) & set(EngineStats.__struct_fields__)
    return Load(
        num_in_flight=num_in_flight,
        block_size=info.memory.block_size if info else 0,
        **{name: getattr(stats, name) for name in names},
    )


def _memory(info: EngineInfo, stats: EngineStats) -> Memory:
    components = info.memory.components
    names = [name for name in dict.fromkeys([*MEMORY_COMPONENTS, *components]) if name in components]
    return Memory(
        requested_bytes=info.memory.requested_bytes,
        unplanned_bytes=stats.unplanned_bytes,
        rows=[MemoryRow(component=name, num_bytes=components[name]) for name in names],
    )


def _graphs(info: EngineInfo, stats: EngineStats) -> list[Graphs]:
    families = {family.family: family for family in info.graphs}
    return [
        _family(families[name], stats.graphs.get(name, GraphCounts())) for name in GRAPH_FAMILIES if name in families
    ]


def _family(family: GraphFamilyInfo, counts: GraphCounts) -> Graphs:
    return Graphs(
        family=family.family,
        backend=family.backend,
        hits=counts.hits,
        misses=counts.misses,
        padded_tokens=counts.padded_tokens,
        reserved_bytes=family.reserved_bytes,
        measured_bytes=family.measured_bytes,
        captured_bytes=family.captured_bytes,
        buckets=[
            GraphBucket(
                name=bucket.name,
                tokens=bucket.tokens,
                max_items=bucket.max_items,
                state=bucket.state,
                num_bytes=bucket.graph_bytes,
                replays=counts.replays.get(bucket.name, 0),
            )
            for bucket in family.buckets
        ],
    )
