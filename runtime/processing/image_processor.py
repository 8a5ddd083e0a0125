"""Shows a picture as people see it, picks its size for the vision encoder, resizes it, and names it by content.
Rescaling, normalising and cutting into patches happen on the device.

Imports Pillow, NumPy and hashlib only: the server's image workers load this module and nothing else of the runtime.
"""

import hashlib
import math
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image

Detail = Literal["auto", "low", "high", "original"]
DETAILS: tuple[Detail, ...] = get_args(Detail)

# Of a transparent picture that is put on white; see there.
ROWS_AT_A_TIME = 256

# Most memory that showing a picture takes at its peak, by pixel of the file: as Pillow holds it, upright, and on white.
PEAK_BYTES_PER_PIXEL = 12

# What undoes each EXIF orientation (TIFF 6.0, tag 274); 1 is upright.
_ORIENTATIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

# The longer side over the shorter one; the model family refuses more.
MAX_SIDE_RATIO = 200

# The OpenAI API shows a model at most 512 x 512 pixels of a picture with `detail: low`.
LOW_DETAIL_PIXELS = 512 * 512


class SideRatioError(ValueError):
    """A picture is more than `MAX_SIDE_RATIO` times as long as it is wide."""


def check_side_ratio(height: int, width: int) -> None:
    """Raises:
    SideRatioError: the sides' ratio is above `MAX_SIDE_RATIO`.
    """
    if max(height, width) > MAX_SIDE_RATIO * min(height, width):
        raise SideRatioError(
            f"the image is {width} x {height} pixels; its longer side may be at most {MAX_SIDE_RATIO} times the shorter"
        )


def pixel_budget(detail: Detail, *, min_pixels: int, max_pixels: int) -> int:
    """The most pixels (height x width after resizing) that a picture of this `detail` gets.

    `low` is a quarter of `max_pixels` (half of each side), and no more than 512 x 512, so that it costs fewer tokens
    than `high` whatever the configured maximum is. All other levels are `max_pixels`: the runtime has no finer one.
    """
    if detail == "low":
        return max(min_pixels, min(LOW_DETAIL_PIXELS, max_pixels // 4))
    return max_pixels


def smart_resize(height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """The size (height, width) to which a picture is resized: multiples of `factor` near its own, with a product
    within `min_pixels` .. `max_pixels` and about its own ratio of sides.

    Equal to `smart_resize` of transformers' Qwen2VLImageProcessor (Python's rounding, half to even, included), but for
    long and thin pictures there whose product would exceed `max_pixels`: here the longer side is cut to fit, since the
    runtime plans its memory by `max_pixels`. `max_pixels` must be at least `factor` squared.

    Raises:
        SideRatioError: the sides' ratio is above `MAX_SIDE_RATIO`.
    """
    check_side_ratio(height, width)
    new_height = round(height / factor) * factor
    new_width = round(width / factor) * factor
    if new_height * new_width > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif new_height * new_width < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    if new_height * new_width > max_pixels:
        # Here `max(factor, ...)` or `ceil` pushed a side above its share.
        if new_height >= new_width:
            new_height = max(factor, max_pixels // new_width // factor * factor)
        else:
            new_width = max(factor, max_pixels // new_height // factor * factor)
    return new_height, new_width


def as_seen(image: Image.Image) -> Image.Image:
    """The picture in 8-bit RGB as a person sees it on a white page: upright (EXIF), and nothing of what is transparent.

    Transparency of every kind (alpha, palettes, a transparent colour) shows white, not the colours hidden below it.
    16-bit grey is scaled (Pillow's own conversion would turn all above 255 white).
    """
    return _to_rgb(_turn_upright(image))


def _turn_upright(image: Image.Image) -> Image.Image:
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # metadata that cannot be read turns nothing; the picture itself is sound
        return image
    method = _ORIENTATIONS.get(orientation) if isinstance(orientation, int) else None
    return image if method is None else image.transpose(method)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        return _grey16_to_rgb(image)
    if image.mode == "RGB" and "transparency" not in image.info:
        return image  # spares large photographs a copy
    if image.has_transparency_data:
        return _on_white(image)
    return image.convert("RGB")


def _on_white(image: Image.Image) -> Image.Image:
    """Some rows at a time: the whole picture in each step's mode would take 16 bytes a pixel beside itself."""
    page = Image.new("RGB", image.size)
    for top in range(0, image.height, ROWS_AT_A_TIME):
        bottom = min(top + ROWS_AT_A_TIME, image.height)
        colours = image.crop((0, top, image.width, bottom)).convert("RGBA")
        white = Image.new("RGBA", colours.size, "white")
        page.paste(Image.alpha_composite(white, colours).convert("RGB"), (0, top))
    return page


def _grey16_to_rgb(image: Image.Image) -> Image.Image:
    grey = np.clip(np.asarray(image), 0, 65535)
    scaled = (grey >> 8).astype(np.uint8)
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        scaled[grey == transparent] = 255
    return Image.fromarray(scaled).convert("RGB")


def resize(image: Image.Image, *, factor: int, min_pixels: int, max_pixels: int) -> NDArray[np.uint8]:
    """Resizes an RGB picture (bicubic) to its `smart_resize` size.

    Returns:
        uint8 [height, width, 3], equal to what transformers' `Qwen2VLImageProcessorPil` has before it normalises.

    Raises:
        SideRatioError: the sides' ratio is above `MAX_SIDE_RATIO`.
    """
    assert image.mode == "RGB", image.mode
    height, width = smart_resize(image.height, image.width, factor=factor, min_pixels=min_pixels, max_pixels=max_pixels)
    return np.array(image.resize((width, height), Image.Resampling.BICUBIC), dtype=np.uint8)


def image_hash(pixels: NDArray[np.uint8]) -> bytes:
    """SHA-256 (32 bytes) over shape and content of uint8 pixels [height, width, 3]: equal hashes, equal embeddings."""
    digest = hashlib.sha256(repr(pixels.shape).encode())
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.digest()
