"""Broken files of every kind through the decoder: pixels or our own error, nothing else, and within the limits."""

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.image_decode import DecodedImage, DecodeOptions, ImageError, decode
from tests.picture_files import PICTURE_FILES, mangled

OPTIONS = DecodeOptions(max_source_pixels=100_000, factor=28, min_pixels=3136, max_pixels=12544)
FILES = {name: make() for name, make in PICTURE_FILES.items()}
CODES = {"invalid_image", "image_too_large", "unsupported_image_format"}


def check(data: bytes) -> bool:
    """Whether the file was decoded."""
    try:
        image = decode(data, OPTIONS)
    except ImageError as refusal:
        error = refusal
    else:
        check_pixels(image)
        return True
    assert error.code in CODES
    assert " at 0x" not in error.message
    assert len(error.message) < 200
    return False


def check_pixels(image: DecodedImage) -> None:
    height, width, channels = image.pixels.shape
    assert channels == 3
    assert height % 28 == width % 28 == 0
    assert OPTIONS.min_pixels <= height * width <= OPTIONS.max_pixels
    assert image.original_height * image.original_width <= OPTIONS.max_source_pixels


@settings(max_examples=600, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(sorted(FILES)), st.integers(0, 2**32))
def test_mangled_files_are_pixels_or_our_own_error(name: str, seed: int) -> None:
    check(mangled(FILES[name], random.Random(seed)))


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.sampled_from(sorted(FILES)), st.integers(0, 64), st.binary(max_size=64))
def test_any_bytes_behind_a_sound_beginning(name: str, length: int, rest: bytes) -> None:
    check(FILES[name][:length] + rest)


def test_whole_files_are_decoded_and_their_damage_is_told_apart() -> None:
    assert all(check(data) for data in FILES.values())
    generator = random.Random(1)
    outcomes = [check(mangled(data, generator)) for data in FILES.values() for _ in range(10)]
    assert 0 < sum(outcomes) < len(outcomes)
