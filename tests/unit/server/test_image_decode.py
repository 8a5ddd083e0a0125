"""Every rule of decoding, on pictures that Pillow writes here."""

import re
import struct
import subprocess
import sys
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from runtime.processing.image_processor import PEAK_BYTES_PER_PIXEL, ROWS_AT_A_TIME, as_seen
from server.image_decode import DecodedImage, DecodeOptions, ImageError, decode

OPTIONS = DecodeOptions(max_source_pixels=64_000_000, factor=28, min_pixels=3136, max_pixels=200_704)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def refusal(data: bytes, options: DecodeOptions = OPTIONS) -> ImageError:
    with pytest.raises(ImageError) as caught:
        decode(data, options)
    assert caught.value.message == str(caught.value)
    assert not re.search(r"0x|object|PIL|<", caught.value.message)
    return caught.value


def colour_at(image: DecodedImage, x: float, y: float) -> list[int]:
    """Colour at a place given in parts of the width and the height."""
    height, width, _ = image.pixels.shape
    return [int(value) for value in image.pixels[int(y * height), int(x * width)]]


def halves(left: Any, right: Any, mode: str = "RGB") -> Image.Image:
    image = Image.new(mode, (112, 56), left)
    image.paste(right, (56, 0, 112, 56))
    return image


def png(width: int, height: int, depth: int, rows: bytes) -> bytes:
    """A grey PNG by hand; `rows` as they are before compression."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack("!I", len(body)) + name + body + struct.pack("!I", zlib.crc32(name + body))

    header = struct.pack("!IIBBBBB", width, height, depth, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "BMP", "JPEG"])
def test_allowed_formats_show_their_colours(kind: str) -> None:
    options = {"lossless": True} if kind == "WEBP" else {"quality": 95} if kind == "JPEG" else {}
    image = decode(encoded(halves((200, 0, 0), (0, 0, 200)), kind, **options), OPTIONS)
    assert image.format == kind.lower()
    assert (image.original_width, image.original_height) == (112, 56)
    assert image.pixels.shape == (56, 112, 3)
    np.testing.assert_allclose(colour_at(image, 0.25, 0.5), [200, 0, 0], atol=6)
    np.testing.assert_allclose(colour_at(image, 0.75, 0.5), [0, 0, 200], atol=6)


def test_lossless_formats_of_one_picture_have_one_hash() -> None:
    picture = halves((200, 10, 0), (0, 30, 200))
    hashes = {decode(encoded(picture, kind), OPTIONS).image_hash for kind in ("PNG", "BMP", "GIF")}
    assert len(hashes) == 1


@pytest.mark.parametrize(
    "picture",
    [
        Image.new("RGBA", (56, 56), (255, 0, 0, 0)),
        Image.new("LA", (56, 56), (0, 0)),
    ],
    ids=["RGBA", "LA"],
)
def test_transparent_picture_is_white(picture: Image.Image) -> None:
    assert decode(encoded(picture, "PNG"), OPTIONS).pixels.min() == 255


@pytest.mark.parametrize(
    ("mode", "hidden", "shown", "transparency", "expected"),
    [
        ("RGB", (255, 0, 0), (0, 255, 0), (255, 0, 0), [0, 255, 0]),
        ("L", 17, 80, 17, [80, 80, 80]),
        ("1", 0, 1, 0, [255, 255, 255]),
    ],
)
def test_transparent_colour_is_white(
    mode: str, hidden: Any, shown: Any, transparency: Any, expected: list[int]
) -> None:
    data = encoded(halves(hidden, shown, mode), "PNG", transparency=transparency)
    image = decode(data, OPTIONS)
    assert colour_at(image, 0.25, 0.5) == [255, 255, 255]
    assert colour_at(image, 0.75, 0.5) == expected


def test_transparent_grey_of_sixteen_bits_is_white_and_its_neighbours_are_not() -> None:
    values = np.full((56, 112), 256 * 80, dtype=np.uint16)
    values[:, :56] = 300
    values[:, 90:] = 301
    image = decode(encoded(Image.fromarray(values), "PNG", transparency=300), OPTIONS)
    assert colour_at(image, 0.25, 0.5) == [255, 255, 255]
    assert colour_at(image, 0.65, 0.5) == [80, 80, 80]
    assert colour_at(image, 0.95, 0.5) == [1, 1, 1]


def test_transparent_palette_entry_is_white() -> None:
    picture = halves(0, 1, "P")
    picture.putpalette([255, 0, 0, 0, 0, 255])
    for kind in ("PNG", "GIF"):
        image = decode(encoded(picture, kind, transparency=0), OPTIONS)
        assert colour_at(image, 0.25, 0.5) == [255, 255, 255]
        assert colour_at(image, 0.75, 0.5) == [0, 0, 255]


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "P", "RGB"])
@pytest.mark.parametrize("height", [1, ROWS_AT_A_TIME, 2 * ROWS_AT_A_TIME + 3])
def test_rows_put_on_white_in_turn_are_the_whole_picture_put_on_white(mode: str, height: int) -> None:
    generator = np.random.default_rng(height)
    noise = generator.integers(0, 256, (height, 17, 4), dtype=np.uint8)
    image = Image.fromarray(noise[:, :, :3] if mode in ("P", "RGB") else noise).convert("P" if mode == "PA" else mode)
    if mode == "PA":
        image = image.convert("PA")
        image.putalpha(Image.fromarray(noise[:, :, 3]))
    if mode == "P":
        image.info["transparency"] = bytes(generator.integers(0, 256, 256, dtype=np.uint8))
    if mode == "RGB":
        image.info["transparency"] = tuple(int(value) for value in noise[0, 0, :3])
    whole = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA")).convert("RGB")
    assert np.array_equal(np.asarray(as_seen(image)), np.asarray(whole))


@pytest.mark.parametrize(("mode", "orientation"), [("RGB", 1), ("RGB", 6), ("RGBA", 1), ("RGBA", 6), ("I;16", 6)])
def test_decoding_takes_no_more_memory_than_is_said(mode: str, orientation: int, tmp_path: Path) -> None:
    """The runbook tells people how large a container must be."""
    side = 3000
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / "large.png"
    Image.new(mode, (side, side)).save(path, exif=exif, compress_level=1)
    code = f"""
import re
from pathlib import Path
from server.image_decode import decode, DecodeOptions
data = Path({str(path)!r}).read_bytes()
options = DecodeOptions(max_source_pixels={side * side}, factor=28, min_pixels=3136, max_pixels=200_704)
def peak():
    return int(re.search("VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10
before = peak()
decode(data, options)
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    # Beside it the rows that are put on white, and what libraries take with the first picture.
    assert side * side < int(done.stdout) <= side * side * PEAK_BYTES_PER_PIXEL + (24 << 20)


def test_half_transparent_colour_is_mixed_with_white() -> None:
    image = decode(encoded(Image.new("RGBA", (56, 56), (255, 0, 0, 128)), "PNG"), OPTIONS)
    np.testing.assert_allclose(colour_at(image, 0.5, 0.5), [255, 127, 127], atol=1)


def test_grey_of_sixteen_bits_is_scaled() -> None:
    rows = b"".join(b"\0" + struct.pack("!56H", *([32768] * 28 + [65535] * 28)) for _ in range(56))
    image = decode(png(56, 56, 16, rows), OPTIONS)
    assert colour_at(image, 0.2, 0.5) == [128, 128, 128]
    assert colour_at(image, 0.8, 0.5) == [255, 255, 255]


def test_cmyk_jpeg_shows_its_colours() -> None:
    image = decode(encoded(Image.new("CMYK", (56, 56), (255, 0, 0, 0)), "JPEG", quality=95), OPTIONS)
    red, green, blue = colour_at(image, 0.5, 0.5)
    assert red < 40
    assert green > 120
    assert blue > 180


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_exif_orientation_equals_the_upright_picture(orientation: int) -> None:
    generator = np.random.default_rng(0)
    upright = Image.fromarray(generator.integers(0, 256, (28, 56, 3), dtype=np.uint8)).resize((112, 56))
    # What a camera stores so that this orientation turns it upright.
    stored = {
        1: lambda i: i,
        2: lambda i: i.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        3: lambda i: i.rotate(180),
        4: lambda i: i.transpose(Image.Transpose.FLIP_TOP_BOTTOM),
        5: lambda i: i.rotate(-90, expand=True).transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        6: lambda i: i.rotate(90, expand=True),
        7: lambda i: i.rotate(90, expand=True).transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        8: lambda i: i.rotate(-90, expand=True),
    }[orientation](upright)
    exif = Image.Exif()
    exif[274] = orientation
    image = decode(encoded(stored, "PNG", exif=exif), OPTIONS)
    assert (image.original_width, image.original_height) == (112, 56)
    np.testing.assert_array_equal(image.pixels, decode(encoded(upright, "PNG"), OPTIONS).pixels)


def test_orientation_six_of_a_jpeg_is_turned_before_sizes_are_read() -> None:
    exif = Image.Exif()
    exif[274] = 6
    image = decode(encoded(Image.new("RGB", (140, 56)), "JPEG", exif=exif), OPTIONS)
    assert (image.original_width, image.original_height) == (56, 140)
    assert image.pixels.shape == (140, 56, 3)


def test_unreadable_metadata_does_not_refuse_a_sound_picture() -> None:
    for exif in (
        b"Exif\0\0MM\0*\xff\xff\xff\xff",
        b"Exif\0\0rubbish",
        b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + b"\x12" * 40,
    ):
        image = decode(encoded(Image.new("RGB", (56, 56), (0, 200, 0)), "JPEG", exif=exif), OPTIONS)
        assert image.pixels.shape == (56, 56, 3)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_animated_picture_shows_its_first_frame(kind: str) -> None:
    frames = [Image.new("RGB", (56, 56), colour) for colour in ((255, 0, 0), (0, 255, 0))]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=100, **options)
    assert colour_at(decode(data, OPTIONS), 0.5, 0.5) == [255, 0, 0]


def test_picture_with_more_pictures_behind_it_is_a_jpeg() -> None:
    first, second = (Image.new("RGB", (56, 56), colour) for colour in ("red", "blue"))
    image = decode(encoded(first, "MPO", save_all=True, append_images=[second]), OPTIONS)
    assert image.format == "jpeg"
    assert colour_at(image, 0.5, 0.5)[0] > 200


@pytest.mark.parametrize("size", [(1, 1), (1, 2), (2, 1), (3, 1), (1, 3), (3, 3), (500, 19), (19, 500)])
def test_small_and_thin_pictures_are_enlarged_to_the_minimum(size: tuple[int, int]) -> None:
    image = decode(encoded(Image.new("RGB", size, (10, 20, 30)), "PNG"), OPTIONS)
    assert image.pixels.shape[0] * image.pixels.shape[1] >= 3136
    assert np.all(image.pixels == [10, 20, 30])


def test_large_picture_is_reduced_to_the_maximum() -> None:
    image = decode(encoded(Image.new("RGB", (2000, 1500)), "PNG"), OPTIONS)
    assert 0.8 * 200_704 < image.pixels.shape[0] * image.pixels.shape[1] <= 200_704
    assert (image.original_width, image.original_height) == (2000, 1500)


def test_more_than_two_hundred_times_as_long_as_wide_is_refused_with_the_limit() -> None:
    assert decode(encoded(Image.new("RGB", (200, 1)), "PNG"), OPTIONS)
    error = refusal(encoded(Image.new("RGB", (201, 1)), "PNG"))
    assert error.code == "invalid_image"
    assert "201 x 1" in error.message
    assert "200" in error.message


@pytest.mark.parametrize("side", [9_000, 12_000, 20_000])
def test_bomb_is_refused_from_its_header(side: int) -> None:
    rows = b"\0" * ((side // 8 + 1) * side)
    error = refusal(png(side, side, 1, rows))
    assert error.code == "image_too_large"
    assert "at most 64000000" in error.message


def test_limit_on_pixels_is_inclusive() -> None:
    exact = DecodeOptions(max_source_pixels=100, factor=28, min_pixels=3136, max_pixels=200_704)
    assert decode(encoded(Image.new("RGB", (10, 10)), "PNG"), exact)
    assert refusal(encoded(Image.new("RGB", (10, 11)), "PNG"), exact).code == "image_too_large"


def photograph() -> Image.Image:
    return Image.fromarray(np.random.default_rng(1).integers(0, 256, (120, 160, 3), dtype=np.uint8))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
@pytest.mark.parametrize("part", [0.02, 0.3, 0.7, 0.98])
def test_truncated_file_is_refused(kind: str, part: float) -> None:
    data = encoded(photograph(), kind)
    assert refusal(data[: int(len(data) * part)]).code == "invalid_image"


def test_damaged_png_is_refused() -> None:
    data = bytearray(encoded(photograph(), "PNG"))
    data[len(data) // 2] ^= 0xFF
    assert refusal(bytes(data)).code == "invalid_image"


@pytest.mark.parametrize(
    "data", [b"", b"\0", b"hello", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"RIFF\0\0\0\0WEBP", b"BM"]
)
def test_rubbish_is_refused(data: bytes) -> None:
    assert refusal(data).code == "invalid_image"


@pytest.mark.parametrize("kind", ["TIFF", "JPEG2000", "PPM", "ICO", "TGA", "PDF", "EPS", "AVIF"])
def test_other_formats_are_not_even_opened(kind: str) -> None:
    error = refusal(encoded(Image.new("RGB", (64, 64)), kind))
    assert error.code in ("unsupported_image_format", "invalid_image")
    if kind not in ("PPM", "TGA"):  # these begin like nothing in particular
        assert error.code == "unsupported_image_format"
        assert "PNG, JPEG, WEBP, GIF or BMP" in error.message


@pytest.mark.parametrize(
    "data", [b"<?xml version='1.0'?>\n<SVG xmlns='x'/>", b"<svg/>", b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"]
)
def test_svg_and_heic_are_named_as_unsupported(data: bytes) -> None:
    assert refusal(data).code == "unsupported_image_format"


def test_hash_tells_pictures_of_equal_bytes_apart() -> None:
    values = np.arange(56 * 84, dtype=np.int64).astype(np.uint8)
    grey = Image.fromarray(values.reshape(56, 84))
    turned = Image.fromarray(values.reshape(84, 56))
    palette = Image.new("P", (84, 56))
    palette.putdata(values.tolist())
    palette.putpalette([component for i in range(256) for component in (i, 255 - i, 0)])
    same = Image.new("P", (84, 56))
    same.putdata(values.tolist())
    same.putpalette([i for i in range(256) for _ in range(3)])
    hashes = [decode(encoded(picture, "PNG"), OPTIONS).image_hash for picture in (grey, turned, palette, same)]
    assert len({*hashes}) == 3
    assert hashes[0] == hashes[3]


def test_nothing_global_is_left_changed() -> None:
    before = Image.MAX_IMAGE_PIXELS
    decode(encoded(Image.new("RGB", (56, 56)), "PNG"), OPTIONS)
    refusal(b"rubbish")
    assert before == Image.MAX_IMAGE_PIXELS
