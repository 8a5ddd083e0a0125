"""Small files of every kind that cameras, browsers and drawing programs make, and ways to break them. For fuzzing."""

import io
import random
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

SIDE = 40


def noise(*shape: int, high: int = 256, kind: Any = np.uint8) -> Any:
    return np.random.default_rng(0).integers(0, high, shape).astype(kind)


def file_of(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def rgb() -> Image.Image:
    return Image.fromarray(noise(SIDE, SIDE, 3))


def rgba() -> Image.Image:
    return Image.fromarray(noise(SIDE, SIDE, 4))


def grey() -> Image.Image:
    return Image.fromarray(noise(SIDE, SIDE))


def palette() -> Image.Image:
    return rgb().quantize(16)


def exif(orientation: int) -> bytes:
    tags = Image.Exif()
    tags[0x0112] = orientation
    tags[0x010F] = "A camera"
    return tags.tobytes()


def animated(kind: str) -> bytes:
    frames = [Image.fromarray(noise(SIDE, SIDE, 3) // (i + 1)) for i in range(3)]
    return file_of(frames[0], kind, save_all=True, append_images=frames[1:], duration=50)


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack("!I", len(data)) + kind + data + struct.pack("!I", zlib.crc32(kind + data))


def commented_png() -> bytes:
    """A text chunk and an embedded profile that is none, before the pixels."""
    whole = file_of(rgb(), "PNG")
    extra = png_chunk(b"tEXt", b"Comment\0" + b"x" * 500) + png_chunk(b"iCCP", b"p\0\0" + zlib.compress(b"no profile"))
    return whole[:33] + extra + whole[33:]


PICTURE_FILES: dict[str, Callable[[], bytes]] = {
    "png": lambda: file_of(rgb(), "PNG"),
    "png with alpha": lambda: file_of(rgba(), "PNG"),
    "png of a palette": lambda: file_of(palette(), "PNG", transparency=3),
    "png of 16 bits": lambda: file_of(Image.fromarray(noise(SIDE, SIDE, high=65536, kind=np.uint16)), "PNG"),
    "png of 1 bit": lambda: file_of(grey().convert("1"), "PNG"),
    "png of grey with alpha": lambda: file_of(rgba().convert("LA"), "PNG"),
    "png with a transparent colour": lambda: file_of(rgb(), "PNG", transparency=(1, 2, 3)),
    "png with comments": commented_png,
    "png animated": lambda: animated("PNG"),
    "jpeg": lambda: file_of(rgb(), "JPEG"),
    "jpeg progressive": lambda: file_of(rgb(), "JPEG", progressive=True, optimize=True),
    "jpeg grey": lambda: file_of(grey(), "JPEG"),
    "jpeg cmyk": lambda: file_of(rgb().convert("CMYK"), "JPEG"),
    "jpeg turned": lambda: file_of(rgb(), "JPEG", exif=exif(6)),
    "jpeg with odd metadata": lambda: file_of(rgb(), "JPEG", exif=b"Exif\0\0" + b"MM\0*\0\0\0\x08\xff\xff"),
    "mpo": lambda: file_of(rgb(), "MPO", save_all=True, append_images=[grey().convert("RGB")]),
    "webp": lambda: file_of(rgb(), "WEBP"),
    "webp lossless with alpha": lambda: file_of(rgba(), "WEBP", lossless=True, exif=exif(3)),
    "webp animated": lambda: animated("WEBP"),
    "gif": lambda: file_of(palette(), "GIF"),
    "gif animated": lambda: animated("GIF"),
    "bmp": lambda: file_of(rgb(), "BMP"),
    "bmp of a palette": lambda: file_of(palette(), "BMP"),
    "bmp of 1 bit": lambda: file_of(grey().convert("1"), "BMP"),
}


def mangled(data: bytes, generator: random.Random) -> bytes:
    """The file with one to four damages: bytes changed, cut out, doubled, numbers made huge; or cut off."""
    broken = bytearray(data)
    for _ in range(generator.randint(1, 4)):
        if len(broken) < 8:
            break
        # The beginning, where the sizes are, is the more rewarding place.
        end = len(broken) if generator.random() < 0.5 else min(len(broken), 64)
        place = generator.randrange(end)
        match generator.randrange(6):
            case 0:
                broken[place] ^= 1 << generator.randrange(8)
            case 1:
                broken[place : place + 4] = generator.choice(
                    [b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff", b"\0\0\xff\xff"]
                )
            case 2:
                del broken[place : place + generator.randint(1, 40)]
            case 3:
                broken[place:place] = broken[place : place + generator.randint(1, 40)]
            case 4:
                del broken[max(place, 8) :]
            case 5:
                broken[place : place + 8] = generator.randbytes(8)
    return bytes(broken)
