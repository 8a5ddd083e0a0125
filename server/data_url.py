"""Data URLs as real clients write them. Pure functions on text and bytes; what the bytes are is not known here."""

import base64
import binascii
import re
import string

_TO_STANDARD = bytes.maketrans(b"-_", b"+/")
_WHITESPACE = string.whitespace.encode()
# What percent-encoding makes of the signs of base64 and of line breaks; nothing else needs it. Fixed replacements: a
# general decoder makes an object of every percent sign.
_PERCENT_ENCODED = {b"%2B": b"+", b"%2F": b"/", b"%3D": b"=", b"%0A": b"", b"%0D": b"", b"%20": b""}
_MAX_HEAD_CHARACTERS = 1024
_RAW_BASE64 = re.compile(r"[A-Za-z0-9+/_\-]{64}")


class DataUrlError(ValueError):
    """The text is no usable data URL; the message is fixed text, fit for the client, and quotes nothing of it."""


class DataTooLargeError(DataUrlError):
    """The data is larger than the limit."""


def is_data_url(url: str) -> bool:
    """Whether the text begins as a data URL does; the scheme's case and space around do not matter."""
    return url[:64].lstrip()[:5].lower() == "data:"


def looks_like_base64(url: str) -> bool:
    """Whether the text is probably base64 of which somebody forgot the `data:` in front."""
    return _RAW_BASE64.match(url.lstrip()[:64]) is not None


def data_url_payload(url: str) -> bytes:
    """The part after the comma, still base64, of `data:[type][;parameters];base64,...`.

    The media type may be missing or wrong (senders often have it wrong, so it is not used), and parameters are
    ignored; only a type of sound or film is refused, since what follows cannot be a picture.

    Raises:
        DataUrlError: there is no comma within the first 1024 characters, or the data is not in base64.
    """
    comma = url.find(",", 0, _MAX_HEAD_CHARACTERS)
    if comma < 0:
        raise DataUrlError("the data URL has no comma before its data")
    media_type, *parameters = (part.strip().lower() for part in url[:comma].partition(":")[2].split(";"))
    if media_type.startswith(("video/", "audio/")):
        raise DataUrlError("the data URL's media type is not that of an image")
    if "base64" not in parameters:
        raise DataUrlError("the data URL is not in base64: write data:image/png;base64,...")
    try:
        return url[comma + 1 :].encode("ascii")
    except UnicodeEncodeError:
        raise DataUrlError("the data URL's base64 has characters that do not belong there") from None


def decode_base64(payload: bytes, *, max_bytes: int) -> bytes:
    """Decodes base64 with all that clients do to it: percent-encoding, whitespace, the URL-safe alphabet, and missing
    padding. Other characters are errors, never skipped.

    Raises:
        DataTooLargeError: there are more than `max_bytes`.
        DataUrlError: there is no data, or it is not base64.
    """
    if b"%" in payload:
        for sign, plain in _PERCENT_ENCODED.items():
            payload = payload.replace(sign, plain).replace(sign.lower(), plain)
    payload = payload.translate(_TO_STANDARD, _WHITESPACE).rstrip(b"=")
    if not payload:
        raise DataUrlError("the data URL has no data")
    if len(payload) % 4 == 1:
        raise DataUrlError("the data URL's base64 is cut off")
    num_bytes = len(payload) * 3 // 4
    if num_bytes > max_bytes:
        raise DataTooLargeError(f"the image has {num_bytes} bytes; at most {max_bytes} are accepted")
    try:
        return base64.b64decode(payload + b"=" * (-len(payload) % 4), validate=True)
    except binascii.Error:
        raise DataUrlError("the data URL's base64 has characters that do not belong there") from None
