import contextlib

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.messages import (
    AbortRequest,
    AddRequest,
    FromEngine,
    Heartbeat,
    MessageError,
    Outputs,
    Ready,
    Shutdown,
    StartFailed,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from runtime.request import ImageInput, PlaceholderRange, Request, RequestOutput, SamplingParams, TokenLogprobs
from runtime.stats import EngineStats, GraphCounts
from tests.integration.process_engines import engine_info


def request(*sizes: tuple[int, int], seed: int | None = 7) -> Request:
    return Request(
        request_id="r",
        prompt_token_ids=[1, 2, 3],
        images=tuple(
            ImageInput(image_hash=bytes([n]) * 32, height=h, width=w, placeholder=PlaceholderRange(n, 1))
            for n, (h, w) in enumerate(sizes)
        ),
        sampling=SamplingParams(max_tokens=5, logit_bias={3: -1.5}, seed=seed, stop_token_ids=(4, 5)),
        arrival_time=1.5,
        cache_salt="é",
    )


@pytest.mark.parametrize("message", [AddRequest(request()), AbortRequest("r"), Shutdown()])
def test_messages_to_the_engine_arrive_as_they_were(message: AddRequest | AbortRequest | Shutdown) -> None:
    assert decode_to_engine(encode(message)) == (message, [])


@pytest.mark.parametrize(
    "message",
    [
        Ready(engine_info()),
        StartFailed("no such file"),
        Outputs([RequestOutput(request_id="r", new_token_ids=[5], logprobs=[TokenLogprobs(-0.5, [(5, -0.5)])])]),
        Heartbeat(EngineStats(num_steps=4, graphs={"encoder": GraphCounts(hits=2, misses={"too_large": 1})})),
    ],
)
def test_messages_from_the_engine_arrive_as_they_were(message: FromEngine) -> None:
    assert decode_from_engine(encode(message)) == message


def test_pixels_travel_beside_the_request_without_a_copy() -> None:
    pixels = [np.arange(h * w * 3, dtype=np.uint8).reshape(h, w, 3) for h, w in ((2, 4), (6, 2))]
    frames = encode(AddRequest(request((2, 4), (6, 2))), pixels)
    assert all(np.shares_memory(np.frombuffer(f, np.uint8), p) for f, p in zip(frames[1:], pixels, strict=True))
    _, arrived = decode_to_engine(frames)
    for array, original in zip(arrived, pixels, strict=True):
        np.testing.assert_array_equal(array, original)
        assert np.shares_memory(array, original)


def test_a_view_arrives_as_it_looks() -> None:
    view = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)[:, ::-1]
    _, [arrived] = decode_to_engine(encode(AddRequest(request((2, 4))), [view]))
    np.testing.assert_array_equal(arrived, view)


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([b"x" * 23], "0 bytes|frame has 23"),
        ([b"x" * 24, b"x" * 24], "1 images, but 2 frames"),
        ([], "1 images, but 0 frames"),
    ],
)
def test_wrong_pixels_are_an_error_of_their_request(frames: list[bytes], message: str) -> None:
    with pytest.raises(MessageError, match=message) as raised:
        decode_to_engine([*encode(AddRequest(request((2, 4)))), *frames])
    assert raised.value.request_id == "r"


def test_a_field_of_a_wrong_type_is_an_error_of_its_request() -> None:
    bad = msgspec.structs.replace(request(), sampling=SamplingParams(max_tokens="many"))  # type: ignore[arg-type]
    with pytest.raises(MessageError, match="max_tokens") as raised:
        decode_to_engine(encode(AddRequest(bad)))
    assert raised.value.request_id == "r"


@pytest.mark.parametrize("size", [(0, 4), (-2, -4)])
def test_an_image_without_pixels_is_an_error(size: tuple[int, int]) -> None:
    with pytest.raises(MessageError, match="image 0 is"):
        decode_to_engine([*encode(AddRequest(request(size))), b"x" * 24])


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\xc1"],
        [msgspec.msgpack.encode({"type": "Nonsense"})],
        [msgspec.msgpack.encode({"type": "AddRequest"})],
        [msgspec.msgpack.encode({"type": "AbortRequest", "request_id": 5})],
        [b"\x81\xa4type\xa3\xff\xfe\xfd"],
        [msgspec.msgpack.encode(Shutdown()), b"left over"],
        [b"\x91" * 100_000],
    ],
)
def test_malformed_frames_are_an_error(frames: list[bytes]) -> None:
    with pytest.raises(MessageError):
        decode_to_engine(frames)
    with pytest.raises(MessageError):
        decode_from_engine(frames)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=3))
def test_random_frames_are_an_error_or_a_message(frames: list[bytes]) -> None:
    for decode in (decode_to_engine, decode_from_engine):
        try:
            decode(frames)
        except MessageError:
            continue


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_damaged_message_is_an_error_or_a_message(data: st.DataObject) -> None:
    frame = bytearray(encode(AddRequest(request((2, 4))))[0])
    frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    del frame[data.draw(st.integers(1, len(frame))) :]
    with contextlib.suppress(MessageError):
        decode_to_engine([bytes(frame), b"x" * 24])


def test_what_cannot_be_encoded_is_an_error() -> None:
    with pytest.raises(MessageError, match="cannot be encoded"):
        encode(AddRequest(request(seed=1 << 70)))
