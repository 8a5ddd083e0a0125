"""The plan's arithmetic: rows that sum to the request, KV in whole blocks, and errors that name the knob."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.config import MIB
from runtime.executor.memory import (
    KVRequest,
    MeasuredRows,
    MemoryPlan,
    MemoryPlanError,
    plan_memory,
)
from runtime.stats import MEMORY_COMPONENTS

row_bytes = st.integers(0, 1 << 32)
measured_rows = st.builds(
    MeasuredRows,
    context=row_bytes,
    weights=row_bytes,
    attention_workspace=row_bytes,
    static_buffers=row_bytes,
    embedding_store=row_bytes,
    transient=row_bytes,
    encoder_graphs=row_bytes,
    decoder_graphs=row_bytes,
    graph_driver=row_bytes,
)
kv_requests = st.builds(
    KVRequest,
    block_bytes=st.integers(1, 1 << 22),
    block_size=st.integers(1, 128),
    max_model_len=st.integers(1, 4096),
    granularity_bytes=st.sampled_from([1, 4096, 2 << 20]),
)
ROWS = MeasuredRows(context=100 * MIB, weights=50 * MIB, transient=20 * MIB, encoder_graphs=8 * MIB, graph_driver=MIB)
KV = KVRequest(block_bytes=98304, block_size=16, max_model_len=2048)


def plan(
    requested_bytes: int,
    rows: MeasuredRows = ROWS,
    kv: KVRequest = KV,
    *,
    margin_bytes: int = 64 * MIB,
    reserve_graph_memory: str = "on",
    total_bytes: int | None = None,
) -> MemoryPlan:
    return plan_memory(
        requested_bytes=requested_bytes,
        rows=rows,
        kv=kv,
        margin_bytes=margin_bytes,
        reserve_graph_memory=reserve_graph_memory,  # type: ignore[arg-type]
        request_knob="memory_bytes",
        total_bytes=total_bytes,
    )


def fixed_bytes(rows: MeasuredRows) -> int:
    return sum(vars(rows).values())


@given(measured_rows, kv_requests, st.integers(0, 1 << 30), st.integers(0, 1 << 34))
def test_rows_sum_to_the_request_and_kv_is_whole_blocks(
    rows: MeasuredRows, kv: KVRequest, margin_bytes: int, spare_bytes: int
) -> None:
    least = kv.min_num_blocks + kv.quantum
    requested = fixed_bytes(rows) + margin_bytes + least * kv.block_bytes + spare_bytes
    made = plan(requested, rows, kv, margin_bytes=margin_bytes)
    assert tuple(made.components) == MEMORY_COMPONENTS
    assert sum(made.components.values()) == requested == made.requested_bytes
    assert made.components["kv"] == made.num_blocks * kv.block_bytes
    assert made.components["kv"] % kv.granularity_bytes == 0
    assert 0 <= made.components["rounding"] < kv.quantum * kv.block_bytes
    assert made.components["margin"] == margin_bytes
    assert made.num_blocks >= kv.min_num_blocks
    assert made.planned_bytes == fixed_bytes(rows) + made.components["kv"]


@given(measured_rows, kv_requests, st.integers(0, 1 << 34))
def test_a_plan_holds_one_request_or_is_refused(rows: MeasuredRows, kv: KVRequest, requested: int) -> None:
    room = (requested - fixed_bytes(rows) - 64 * MIB) // (kv.quantum * kv.block_bytes) * kv.quantum
    if room < kv.min_num_blocks:
        with pytest.raises(MemoryPlanError, match=r"(?s)(?=.*memory_bytes)(?=.*max_model_len)"):
            plan(requested, rows, kv)
    else:
        made = plan(requested, rows, kv)
        assert made.num_blocks == room
        assert (made.num_blocks - 1) * kv.block_size >= kv.max_model_len


@given(st.integers(0, 1 << 24), st.integers(0, 1 << 24), st.integers(1, 1 << 20))
def test_graph_bytes_come_out_of_kv_to_the_byte(encoder: int, decoder: int, block_bytes: int) -> None:
    kv = replace(KV, block_bytes=block_bytes)
    without = replace(ROWS, encoder_graphs=0, decoder_graphs=0, graph_driver=0)
    reserved = replace(without, encoder_graphs=encoder, decoder_graphs=decoder)
    a, b = plan(4096 * MIB, without, kv).components, plan(4096 * MIB, reserved, kv).components
    assert a["kv"] + a["rounding"] - b["kv"] - b["rounding"] == encoder + decoder


@pytest.mark.parametrize("mode", ["off", "skip"])
def test_graph_memory_that_is_not_reserved_goes_to_kv(mode: str) -> None:
    made = plan(1024 * MIB, reserve_graph_memory=mode)
    assert made.components["encoder_graphs"] == made.components["graph_driver"] == 0
    reserved = plan(1024 * MIB).components
    gained = made.components["kv"] + made.components["rounding"] - reserved["kv"] - reserved["rounding"]
    assert gained == 9 * MIB


def test_the_margin_is_really_subtracted() -> None:
    none, some = plan(1024 * MIB, margin_bytes=0).components, plan(1024 * MIB, margin_bytes=64 * MIB).components
    assert none["kv"] + none["rounding"] - some["kv"] - some["rounding"] == 64 * MIB


def test_unplanned_is_what_use_exceeds_the_plan_by() -> None:
    made = plan(1024 * MIB)
    assert made.unplanned_bytes(made.planned_bytes) == 0
    assert made.unplanned_bytes(made.planned_bytes + 5) == 5
    assert made.ledger(used_bytes=made.planned_bytes - 7).unplanned_bytes == -7


def test_kv_cache_memory_bytes_sets_kv_outright_and_the_request_follows() -> None:
    made = plan(1, kv=replace(KV, cache_bytes=300 * MIB))
    assert made.num_blocks == 300 * MIB // KV.block_bytes
    assert made.requested_bytes == fixed_bytes(ROWS) + 64 * MIB + 300 * MIB
    with pytest.raises(MemoryPlanError, match=r"kv_cache_memory_bytes is 300\.0 MiB.*the device has 400\.0 MiB"):
        plan(1, kv=replace(KV, cache_bytes=300 * MIB), total_bytes=400 * MIB)
    with pytest.raises(MemoryPlanError, match="raise kv_cache_memory_bytes"):
        plan(1, kv=replace(KV, cache_bytes=MIB))


def test_no_block_names_the_knob_and_where_the_memory_went() -> None:
    with pytest.raises(MemoryPlanError, match=r"no KV block fits: memory_bytes gives 200\.0 MiB, of which context 100"):
        plan(200 * MIB)


def test_refusals_say_how_much_would_be_enough() -> None:
    for short in (100 * MIB, fixed_bytes(ROWS) + 64 * MIB + 5 * KV.block_bytes):
        with pytest.raises(MemoryPlanError, match=r"by at least [\d.]+ MiB") as caught:
            plan(short)
        missing = float(str(caught.value).split("by at least ")[1].split(" MiB")[0])
        plan(short + int((missing + 0.1) * MIB))
        with pytest.raises(MemoryPlanError):
            plan(short + int((missing - 0.1) * MIB))


def test_max_model_len_that_does_not_fit_names_the_longest_that_does() -> None:
    requested = fixed_bytes(ROWS) + 64 * MIB + 100 * KV.block_bytes
    with pytest.raises(MemoryPlanError, match=r"max_model_len is 2048 .*room for 1584 .*lower max_model_len to 1584"):
        plan(requested)
    assert plan(requested, kv=replace(KV, max_model_len=1584)).num_blocks == 100


def test_kv_beyond_use_lowers_the_request() -> None:
    made = plan(4096 * MIB, kv=replace(KV, max_num_blocks=500))
    assert made.num_blocks == 500
    assert made.requested_bytes == fixed_bytes(ROWS) + 64 * MIB + 500 * KV.block_bytes
    assert made.components["rounding"] == 0
    # Never below one request.
    assert plan(4096 * MIB, kv=replace(KV, max_num_blocks=1)).num_blocks == KV.min_num_blocks


def test_a_negative_reading_is_refused_with_its_number() -> None:
    with pytest.raises(MemoryPlanError, match="transient is -5 bytes"):
        replace(ROWS, transient=-5)


def test_the_table_is_aligned_and_has_every_row() -> None:
    lines = str(plan(1024 * MIB)).splitlines()
    assert [line.split()[0] for line in lines[: len(MEMORY_COMPONENTS)]] == list(MEMORY_COMPONENTS)
    assert len({len(line) for line in lines[:-1]}) == 1
    assert "1,024.000 MiB" in lines[-2]
