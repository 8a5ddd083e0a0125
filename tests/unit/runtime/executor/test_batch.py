"""A step's inputs against a plain loop over requests and tokens."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.executor.batch import Padding, StepBatch, StepBuffers, StepShape, fill_batch
from runtime.executor.kv_cache import NULL_BLOCK
from runtime.executor.request_slots import RequestSlots, RunningRequest
from runtime.processing.positions import rope_positions
from runtime.request import ImageInput, PlaceholderRange, Request, SamplingParams
from runtime.scheduler.output import ScheduledRequest

BLOCK = 4
SIDE = 28
MAX_LEN = 64
MAX_TOKENS = 96
MAX_SEQS = 8


def make_buffers() -> StepBuffers:
    return StepBuffers(
        max_tokens=MAX_TOKENS,
        max_seqs=17,
        max_blocks=MAX_LEN // BLOCK,
        block_size=BLOCK,
        device=torch.device("cpu"),
    )


def make_slots(num_slots: int = MAX_SEQS) -> RequestSlots:
    return RequestSlots(num_slots=num_slots, max_model_len=MAX_LEN, max_blocks=MAX_LEN // BLOCK)


def make_request(
    name: str, prompt_length: int, outputs: int = 0, images: tuple[tuple[int, int, int], ...] = ()
) -> RunningRequest:
    """`images`: (offset, rows, columns) in tokens."""
    inputs = tuple(
        ImageInput(
            image_hash=f"{name}{offset}".encode(),
            height=rows * SIDE,
            width=columns * SIDE,
            placeholder=PlaceholderRange(offset, rows * columns),
        )
        for offset, rows, columns in images
    )
    base = 100 * (ord(name[0]) - ord("a") + 1)
    prompt = [base + i for i in range(prompt_length)]
    positions, next_position = rope_positions(prompt_length, inputs, pixels_per_token_side=SIDE)
    return RunningRequest(
        request=Request(
            request_id=name,
            prompt_token_ids=prompt,
            images=inputs,
            sampling=SamplingParams(max_tokens=8),
            arrival_time=0.0,
        ),
        pixels=(),
        prompt_token_ids=np.array(prompt, dtype=np.int64),
        positions_3P=positions,
        next_position=next_position,
        seed=0,
        output_token_ids=[base + 50 + i for i in range(outputs)],
    )


def part_of(running: RunningRequest, start: int, count: int, first_block: int) -> ScheduledRequest:
    num_blocks = -(-(start + count) // BLOCK)
    return ScheduledRequest(
        request_id=running.request_id,
        num_computed_tokens=start,
        num_scheduled_tokens=count,
        block_ids=tuple(range(first_block, first_block + num_blocks)),
        is_sampling=start + count == running.num_tokens,
    )


Step = list[tuple[RunningRequest, ScheduledRequest]]


def prepare(slots: RequestSlots, step: Step) -> Step:
    for running, part in step:
        if running.slot is None:
            slots.acquire(running, step_request_ids={part.request_id for _, part in step})
        slots.set_blocks(running, part.block_ids)
    return step


@dataclass
class Reference:
    token_ids: list[int]
    positions: list[list[int]]
    slots: list[int]
    logits_index: list[int]


def reference(step: Step) -> Reference:
    result = Reference([], [], [], [])
    for running, part in step:
        tokens = [*running.request.prompt_token_ids, *running.output_token_ids]
        num_prompt = len(running.request.prompt_token_ids)
        for index in range(part.num_computed_tokens, part.num_computed_tokens + part.num_scheduled_tokens):
            result.token_ids.append(tokens[index])
            if index < num_prompt:
                result.positions.append(running.positions_3P[:, index].tolist())
            else:
                result.positions.append([running.next_position + index - num_prompt] * 3)
            result.slots.append(part.block_ids[index // BLOCK] * BLOCK + index % BLOCK)
        if part.is_sampling:
            result.logits_index.append(len(result.token_ids) - 1)
    return result


def check_against_reference(buffers: StepBuffers, step: Step, batch: StepBatch) -> None:
    expected = reference(step)
    count = len(expected.token_ids)
    assert buffers.token_ids_T.device[:count].tolist() == expected.token_ids
    assert buffers.positions_3T.device[:, :count].T.tolist() == expected.positions
    assert batch.attention.slot_mapping_T[:count].tolist() == expected.slots
    assert buffers.logits_index_S.device[: len(expected.logits_index)].tolist() == expected.logits_index
    lengths = [part.num_computed_tokens + part.num_scheduled_tokens for _, part in step]
    assert batch.attention.seq_lens_cpu[: len(step)].tolist() == lengths
    counts = [part.num_scheduled_tokens for _, part in step]
    assert np.diff(batch.attention.query_start_loc_cpu)[: len(step)].tolist() == counts
    for b, (_, part) in enumerate(step):
        used = batch.attention.block_tables_BN[b, : len(part.block_ids)]
        assert used.tolist() == list(part.block_ids)


def test_decode_step_takes_last_tokens() -> None:
    slots, buffers = make_slots(), make_buffers()
    first, second = make_request("a", 5, outputs=2), make_request("b", 9, outputs=1, images=((2, 2, 3),))
    step = prepare(slots, [(first, part_of(first, 6, 1, 1)), (second, part_of(second, 9, 1, 10))])
    shape = StepShape.of(step)
    assert shape == StepShape(num_tokens=2, num_seqs=2, is_decode=True)
    batch = fill_batch(buffers, slots, step, shape)
    check_against_reference(buffers, step, batch)
    assert batch.attention.is_decode
    assert batch.image_spans == ()
    assert batch.sampling_lengths_S.tolist() == [7, 10]


def test_mixed_step_with_a_chunk_that_cuts_through_images() -> None:
    slots, buffers = make_slots(), make_buffers()
    decoding = make_request("a", 5, outputs=1)
    prefilling = make_request("b", 30, images=((3, 2, 3), (12, 4, 2)))
    step = prepare(slots, [(decoding, part_of(decoding, 5, 1, 1)), (prefilling, part_of(prefilling, 5, 10, 5))])
    shape = StepShape.of(step)
    assert not shape.is_decode
    batch = fill_batch(buffers, slots, step, shape)
    check_against_reference(buffers, step, batch)
    # The chunk is tokens 5..15 after one decoding token: rows 2..6 of the first image, rows 0..3 of the second.
    spans = [(span.token_start, span.image_hash, span.row_start, span.row_end) for span in batch.image_spans]
    assert spans == [(1, b"b3", 2, 6), (8, b"b12", 0, 3)]
    assert batch.sampling_B.tolist() == [0]


def test_single_prompt_token_of_an_image_is_no_decode() -> None:
    slots = make_slots()
    request = make_request("a", 8, images=((4, 2, 2),))
    step = prepare(slots, [(request, part_of(request, 7, 1, 1))])
    shape = StepShape.of(step)
    assert not shape.is_decode
    batch = fill_batch(make_buffers(), slots, step, shape)
    assert [(span.row_start, span.row_end) for span in batch.image_spans] == [(3, 4)]


def test_request_resumed_after_preemption_computes_its_output_again_in_new_blocks() -> None:
    slots, buffers = make_slots(), make_buffers()
    request = make_request("a", 6, outputs=3)
    prepare(slots, [(request, part_of(request, 8, 1, 1))])
    step = prepare(slots, [(request, part_of(request, 0, 9, 7))])
    batch = fill_batch(buffers, slots, step, StepShape.of(step))
    check_against_reference(buffers, step, batch)


def test_blocks_with_an_equal_beginning_and_another_end_are_rewritten() -> None:
    slots = make_slots()
    request = make_request("a", 20)
    slots.acquire(request, step_request_ids=set())
    for block_ids in ((1, 2), (1, 2, 3), (1, 4), (9, 4, 5, 6)):
        slots.set_blocks(request, block_ids)
        assert slots.block_tables_NM[request.slot, : len(block_ids)].tolist() == list(block_ids)


def test_appended_tokens_go_on_from_the_prompts_positions() -> None:
    slots, buffers = make_slots(), make_buffers()
    request = make_request("a", 8, images=((1, 2, 3),))
    prepare(slots, [(request, part_of(request, 0, 8, 1))])
    for token in (7, 8, 9):
        slots.append(np.array([request.slot]), np.array([request.num_tokens]), [token])
        request.output_token_ids.append(token)
        step = prepare(slots, [(request, part_of(request, request.num_tokens - 1, 1, 1))])
        check_against_reference(buffers, step, fill_batch(buffers, slots, step, StepShape.of(step)))
    assert slots.num_outputs_N[request.slot] == 3


@pytest.mark.parametrize("padding", [None, Padding(tokens=1, is_mixed=False), Padding(tokens=1, is_mixed=True)])
def test_one_decoding_sequence_after_a_larger_step(padding: Padding | None) -> None:
    slots, buffers = make_slots(), make_buffers()
    first, second = make_request("a", 30, outputs=2, images=((2, 2, 3),)), make_request("b", 9)
    step = prepare(slots, [(second, part_of(second, 0, 9, 20)), (first, part_of(first, 0, 31, 1))])
    fill_batch(buffers, slots, step, StepShape.of(step))
    step = prepare(slots, [(first, part_of(first, 31, 1, 1))])
    batch = fill_batch(buffers, slots, step, StepShape.of(step), padding)
    check_against_reference(buffers, step, batch)
    assert buffers.logits_index_S.device.tolist() == [0] * buffers.max_seqs
    assert batch.padded_tokens == 1
    assert (batch.attention.is_decode, batch.image_spans) == (True, ())
    assert batch.attention.query_start_loc_cpu.tolist() == [0, 1]
    assert batch.sampling_B.tolist() == [0]
    assert batch.sampling_slots_S.tolist() == [first.slot]
    assert batch.sampling_lengths_S.tolist() == [32]


def test_slot_is_taken_from_a_request_outside_of_the_step_and_comes_back_whole() -> None:
    slots, buffers = make_slots(num_slots=2), make_buffers()
    first, second, third = (make_request(name, 5, outputs=2) for name in "abc")
    prepare(slots, [(first, part_of(first, 6, 1, 1)), (second, part_of(second, 6, 1, 3))])
    prepare(slots, [(second, part_of(second, 6, 1, 3)), (third, part_of(third, 6, 1, 5))])
    assert first.slot is None
    assert {second.slot, third.slot} == {0, 1}
    step = prepare(slots, [(first, part_of(first, 0, 7, 8)), (third, part_of(third, 6, 1, 5))])
    assert second.slot is None
    check_against_reference(buffers, step, fill_batch(buffers, slots, step, StepShape.of(step)))


def test_nothing_of_a_former_owners_blocks_is_left_in_a_table() -> None:
    """They are gathered for the sake of a longer neighbour, and may hold values that are no numbers."""
    slots = make_slots(num_slots=1)
    first, second = make_request("a", 20), make_request("b", 5)
    slots.acquire(first, step_request_ids=set())
    slots.set_blocks(first, (3, 4, 5, 6))
    slots.release(first)
    slots.acquire(second, step_request_ids=set())
    slots.set_blocks(second, (7, 8))
    slots.set_blocks(second, (9,))
    table = slots.block_tables_NM[0].tolist()
    assert table == [9] + [NULL_BLOCK] * (len(table) - 1)


def test_decode_padding_stays_on_the_null_block() -> None:
    slots, buffers = make_slots(), make_buffers()
    buffers.block_tables_BM.host[:] = 77
    buffers.token_ids_T.host[:] = 77
    requests = [make_request(name, 5, outputs=1) for name in "abc"]
    step = prepare(slots, [(request, part_of(request, 5, 1, 1 + 2 * i)) for i, request in enumerate(requests)])
    batch = fill_batch(buffers, slots, step, StepShape.of(step), Padding(tokens=8, is_mixed=False))
    check_against_reference(buffers, step, batch)
    assert batch.padded_tokens == 8
    assert batch.attention.is_decode
    assert batch.attention.seq_lens_cpu[3:].tolist() == [1] * 5
    assert batch.attention.query_start_loc_cpu.tolist() == list(range(9))
    assert (batch.attention.slot_mapping_T[3:] < BLOCK).all()
    assert (batch.attention.block_tables_BN[3:, 0] == 0).all()
    assert batch.sampling_B.tolist() == [0, 1, 2]


def test_mixed_padding_is_one_sequence_on_the_null_block() -> None:
    slots, buffers = make_slots(), make_buffers()
    buffers.block_tables_BM.host[:] = 77
    request, other = make_request("a", 9), make_request("b", 3, outputs=1)
    step = prepare(slots, [(request, part_of(request, 0, 9, 1)), (other, part_of(other, 3, 1, 9))])
    batch = fill_batch(buffers, slots, step, StepShape.of(step), Padding(tokens=MAX_TOKENS, is_mixed=True))
    check_against_reference(buffers, step, batch)
    assert batch.attention.query_start_loc_cpu.tolist() == [0, 9, 10, 96]
    assert batch.attention.seq_lens_cpu.tolist() == [9, 4, 86]
    assert (batch.attention.slot_mapping_T[10:] < BLOCK).all()
    assert (batch.attention.block_tables_BN[2, : -(-86 // BLOCK)] == 0).all()


@pytest.mark.parametrize("is_mixed", [True, False])
def test_bucket_that_fits_exactly_is_not_padded(is_mixed: bool) -> None:
    slots, buffers = make_slots(), make_buffers()
    requests = [make_request(name, 5, outputs=1) for name in "ab"]
    step = prepare(slots, [(request, part_of(request, 5, 1, 1 + 2 * i)) for i, request in enumerate(requests)])
    batch = fill_batch(buffers, slots, step, StepShape.of(step), Padding(tokens=2, is_mixed=is_mixed))
    assert len(batch.attention.seq_lens_cpu) == 2
    check_against_reference(buffers, step, batch)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_step_equals_the_plain_loop(data: st.DataObject) -> None:
    slots, buffers = make_slots(), make_buffers()
    buffers.token_ids_T.host[:] = 999
    for _ in range(3):
        step: Step = []
        budget, first_block = MAX_TOKENS, 1
        for name in "abcdefgh"[: data.draw(st.integers(1, MAX_SEQS))]:
            images = data.draw(st.sampled_from([(), ((2, 2, 2),), ((0, 1, 3), (5, 2, 2))]))
            request = make_request(name, data.draw(st.integers(10, 40)), data.draw(st.integers(0, 8)), images)
            start = data.draw(st.integers(0, request.num_tokens - 1))
            count = data.draw(st.integers(1, min(request.num_tokens - start, budget - MAX_SEQS)))
            part = part_of(request, start, count, first_block)
            first_block += len(part.block_ids)
            budget -= count
            step.append((request, part))
            if budget <= MAX_SEQS:
                break
        shape = StepShape.of(prepare(slots, step))
        padding = data.draw(
            st.sampled_from([None, Padding(tokens=min(MAX_TOKENS, shape.num_tokens + 7), is_mixed=True)])
        )
        check_against_reference(buffers, step, fill_batch(buffers, slots, step, shape, padding))
        for request, _ in step:
            slots.release(request)
