"""A picture's file to pixels as the model takes them, under limits. Pure functions, run in the image workers.

Imports Pillow, NumPy, the standard library and `runtime.processing.image_processor` only. The file is hostile until
shown otherwise: its header is checked before a pixel is unpacked, and nothing that a library says of it is passed on.
"""

import warnings
from dataclasses import dataclass
from io import BytesIO
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from runtime.processing.image_processor import SideRatioError, as_seen, check_side_ratio, image_hash, resize

# Pillow would open more than forty formats, some through large or unsafe decoders.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")

ImageErrorCode = Literal["invalid_image", "image_too_large", "unsupported_image_format", "invalid_image_url"]

UNSUPPORTED = "the image's format is not supported; send PNG, JPEG, WEBP, GIF or BMP"
NOT_AN_IMAGE = "the data is not an image"
DAMAGED = "the image is damaged or cut off"

# Beginnings of files of known kinds that are not served, to tell them from rubbish.
_UNSUPPORTED_SIGNATURES = (
    b"II*\x00",  # TIFF
    b"MM\x00*",
    b"%PDF",
    b"%!PS",
    b"8BPS",  # Photoshop
    b"\x00\x00\x01\x00",  # icons
    b"\x00\x00\x00\x0cjP  ",  # JPEG 2000
    b"\xff\x4f\xff\x51",
    b"\xff\x0a",  # JPEG XL
    b"\x00\x00\x00\x0cJXL ",
    b"qoif",
    b"\x76\x2f\x31\x01",  # OpenEXR
)
_OUR_SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"BM")


class ImageError(ValueError):
    """A picture cannot be used. The message is ours, fit for the client, and quotes nothing of the data."""

    def __init__(self, code: ImageErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """Limits and target of decoding.

    `max_source_pixels`: of the file's own width x height. The rest is `image_processor.smart_resize`'s.
    """

    max_source_pixels: int
    factor: int
    min_pixels: int
    max_pixels: int


@dataclass(frozen=True, kw_only=True)
class DecodedImage:
    """`pixels`: uint8 [height, width, 3], resized. `format`: in lower case, such as "jpeg". The original size is that
    of the upright picture."""

    pixels: NDArray[np.uint8]
    image_hash: bytes
    format: str
    original_height: int
    original_width: int


def decode(data: bytes, options: DecodeOptions) -> DecodedImage:
    """Decodes, turns upright (EXIF), puts transparency on white, and resizes the first frame of a picture.

    Raises:
        ImageError: it is no picture, damaged, of another format, too large, or too long and thin.
    """
    with warnings.catch_warnings():
        # Pillow warns of large pictures and odd metadata; our own limit is stricter, and metadata is not used.
        warnings.simplefilter("ignore")
        try:
            return _decode(data, options)
        except (ImageError, MemoryError):
            raise
        except Image.DecompressionBombError:
            raise _too_large(options) from None
        except Exception:  # decoders raise whatever a hostile file makes them raise
            raise ImageError("invalid_image", DAMAGED) from None


def _decode(data: bytes, options: DecodeOptions) -> DecodedImage:
    try:
        image: Image.Image = Image.open(BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise _unidentified(data) from None
    with image:
        format_name = "jpeg" if image.format == "MPO" else str(image.format).lower()
        if image.width * image.height > options.max_source_pixels:
            raise _too_large(options, image.size)
        try:
            check_side_ratio(image.height, image.width)
        except SideRatioError as error:
            raise ImageError("invalid_image", str(error)) from None
        image.load()
        upright = as_seen(image)
    pixels = resize(upright, factor=options.factor, min_pixels=options.min_pixels, max_pixels=options.max_pixels)
    return DecodedImage(
        pixels=pixels,
        image_hash=image_hash(pixels),
        format=format_name,
        original_height=upright.height,
        original_width=upright.width,
    )


def _unidentified(data: bytes) -> ImageError:
    head = data[:512]
    if head.startswith(_OUR_SIGNATURES) or (head[:4] == b"RIFF" and head[8:12] == b"WEBP"):
        return ImageError("invalid_image", DAMAGED)
    is_known = head.startswith(_UNSUPPORTED_SIGNATURES) or head[4:8] == b"ftyp"  # ftyp: HEIC, AVIF, MP4
    if is_known or b"<svg" in head.lower():
        return ImageError("unsupported_image_format", UNSUPPORTED)
    return ImageError("invalid_image", NOT_AN_IMAGE)


def _too_large(options: DecodeOptions, size: tuple[int, int] | None = None) -> ImageError:
    most = f"at most {options.max_source_pixels} pixels are accepted"
    if size is None:
        return ImageError("image_too_large", f"the image is too large; {most}")
    width, height = size
    return ImageError("image_too_large", f"the image is {width} x {height} = {width * height} pixels; {most}")
