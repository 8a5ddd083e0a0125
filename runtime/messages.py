"""What server process and engine process say to each other: tagged msgspec structs in MessagePack. No sockets.

A message is a list of frames. The first is the struct; `AddRequest` is followed by one raw frame of pixels (uint8,
[height, width, 3] in C order) for each of its images, which is never copied here. Never pickle: a frame can only become
data.
"""

from collections.abc import Sequence
from typing import TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from runtime.request import Request, RequestOutput
from runtime.stats import EngineInfo, EngineStats

Frame: TypeAlias = bytes | memoryview
Pixels: TypeAlias = NDArray[np.uint8]
M = TypeVar("M")


class MessageError(ValueError):
    """The frames are no message. `request_id`: whose they were, where that much could be read, so that it is told."""

    def __init__(self, message: str, *, request_id: str | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id


# --- From the server to the engine.


class AddRequest(msgspec.Struct, frozen=True, tag=True):
    """Generate this. The pixels of its images follow as frames."""

    request: Request


class AbortRequest(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for this one any more."""

    request_id: str


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End the process now."""


# --- From the engine to the server.


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Requests may come."""

    info: EngineInfo


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start, and why, for people; the process ends."""

    message: str


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """What one step added."""

    outputs: list[RequestOutput]


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """A snapshot, and a sign of life."""

    stats: EngineStats


class Aborted(msgspec.Struct, frozen=True, tag=True):
    """The answer to each `AbortRequest`: the engine holds nothing of this request any more."""

    request_id: str


ToEngine: TypeAlias = AddRequest | AbortRequest | Shutdown
FromEngine: TypeAlias = Ready | StartFailed | Outputs | Heartbeat | Aborted

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine, pixels: Sequence[Pixels] = ()) -> list[Frame]:
    """The frames of a message. Those of `pixels` share the arrays' memory, unless an array is not contiguous.

    Raises:
        MessageError: the message cannot be encoded (an integer beyond 64 bits, say).
    """
    try:
        first = _encoder.encode(message)
    except (OverflowError, TypeError, ValueError) as error:
        raise MessageError(f"the message cannot be encoded: {error}") from error
    return [first, *(np.ascontiguousarray(array).reshape(-1).data for array in pixels)]


def decode_to_engine(frames: Sequence[Frame]) -> tuple[ToEngine, list[Pixels]]:
    """A message to the engine, with its pixels as arrays uint8 [height, width, 3] over the frames' memory.

    Raises:
        MessageError: the frames are no message to the engine, or the pixels are not those of its images.
    """
    message = _decode(_to_engine, frames)
    images = message.request.images if isinstance(message, AddRequest) else ()
    request_id = message.request.request_id if isinstance(message, AddRequest) else None
    if len(frames) - 1 != len(images):
        raise MessageError(f"{len(images)} images, but {len(frames) - 1} frames of pixels", request_id=request_id)
    pixels: list[Pixels] = []
    for index, (image, frame) in enumerate(zip(images, frames[1:], strict=True)):
        flat = np.frombuffer(frame, dtype=np.uint8)
        if image.height < 1 or image.width < 1 or flat.size != image.height * image.width * 3:
            raise MessageError(
                f"image {index} is {image.height} x {image.width} pixels of 3 bytes, but its frame has {flat.size}",
                request_id=request_id,
            )
        pixels.append(flat.reshape(image.height, image.width, 3))
    return message, pixels


def decode_from_engine(frames: Sequence[Frame]) -> FromEngine:
    """A message from the engine.

    Raises:
        MessageError: the frames are none.
    """
    if len(frames) > 1:
        raise MessageError(f"a message from the engine has 1 frame, not {len(frames)}")
    return _decode(_from_engine, frames)


def _decode(decoder: "msgspec.msgpack.Decoder[M]", frames: Sequence[Frame]) -> M:
    if not frames:
        raise MessageError("a message has at least 1 frame, not 0")
    try:
        return decoder.decode(frames[0])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(f"the frame is no message: {error}", request_id=_request_id(frames[0])) from error


def _request_id(frame: Frame) -> str | None:
    """That of an `AddRequest` with a field of a wrong type, say; `None` where there is none to be found."""
    try:
        raw = msgspec.msgpack.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, TypeError, RecursionError):
        return None
    request = raw.get("request") if isinstance(raw, dict) else None
    request_id = request.get("request_id") if isinstance(request, dict) else None
    return request_id if isinstance(request_id, str) else None
