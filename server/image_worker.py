"""The image worker: a process that decodes one picture at a time, asked and answering over its standard streams.

It is started as a plain command, not through multiprocessing, whose `spawn` would import the parent's main module and
with it the web framework. It imports Pillow, NumPy and what decoding needs, and ends when its input does, so that it
cannot outlive its parent. `image_pool` is the other end.

A message is four bytes of length, that many bytes of JSON, and a payload of `num_bytes` bytes.
"""

import contextlib
import json
import signal
import struct
import sys
import time
from typing import IO, Any

from server.data_url import DataTooLargeError, DataUrlError, decode_base64
from server.image_decode import DecodedImage, DecodeOptions, ImageError, decode

_LENGTH = struct.Struct("!I")


def write_header(stream: IO[bytes], header: dict[str, Any]) -> None:
    """Writes a message's header; the caller writes the payload and flushes."""
    encoded = json.dumps(header).encode()
    stream.write(_LENGTH.pack(len(encoded)))
    stream.write(encoded)


def read_header(stream: IO[bytes]) -> dict[str, Any] | None:
    """Reads a message's header; None at the end of the stream.

    Raises:
        EOFError: the stream ends within it.
    """
    prefix = stream.read(_LENGTH.size)
    if not prefix:
        return None
    if len(prefix) < _LENGTH.size:
        raise EOFError
    encoded = stream.read(_LENGTH.unpack(prefix)[0])
    header: dict[str, Any] = json.loads(encoded)
    return header


def answer(header: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes | memoryview]:
    """Decodes what one message asks for; gives the answer's header and payload.

    `header` has the fields of `DecodeOptions`, `encoding` (`base64` or `raw`) and `max_bytes`.
    """
    start = time.perf_counter()
    try:
        data = decode_base64(payload, max_bytes=header["max_bytes"]) if header["encoding"] == "base64" else payload
        options = DecodeOptions(**{name: header[name] for name in DecodeOptions.__dataclass_fields__})
        image = decode(data, options)
    except DataTooLargeError as error:
        return _refusal("image_too_large", str(error)), b""
    except DataUrlError as error:
        return _refusal("invalid_image_url", str(error)), b""
    except ImageError as error:
        return _refusal(error.code, error.message), b""
    except MemoryError:
        return _refusal("image_too_large", "the image needs more memory than there is"), b""
    return _acceptance(image, len(data), time.perf_counter() - start), image.pixels.data.cast("B")


def _refusal(code: str, message: str) -> dict[str, Any]:
    return {"num_bytes": 0, "code": code, "message": message}


def _acceptance(image: DecodedImage, num_source_bytes: int, seconds: float) -> dict[str, Any]:
    height, width, _ = image.pixels.shape
    return {
        "num_bytes": image.pixels.nbytes,
        "height": height,
        "width": width,
        "image_hash": image.image_hash.hex(),
        "format": image.format,
        "original_height": image.original_height,
        "original_width": image.original_width,
        "num_source_bytes": num_source_bytes,
        "decode_seconds": seconds,
    }


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answers until the requests end."""
    while (header := read_header(requests)) is not None:
        payload = requests.read(header["num_bytes"])
        if len(payload) < header["num_bytes"]:
            return
        answer_header, answer_payload = answer(header, payload)
        write_header(answers, answer_header)
        answers.write(answer_payload)
        answers.flush()


def main() -> None:
    # Signals for the whole process group are the parent's to act on: it drains first, then closes our input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(BrokenPipeError, EOFError):  # the parent is gone
        serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
