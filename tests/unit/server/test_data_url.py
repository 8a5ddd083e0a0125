"""Data URLs as clients really write them."""

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.data_url import DataUrlError, data_url_payload, decode_base64, is_data_url, looks_like_base64

DATA = bytes(range(256))
B64 = base64.b64encode(DATA).decode()
URL_SAFE = base64.urlsafe_b64encode(DATA).decode()
PERCENT = B64.replace("+", "%2B").replace("/", "%2f").replace("=", "%3D")


def load(url: str, max_bytes: int = 10_000) -> bytes:
    assert is_data_url(url)
    return decode_base64(data_url_payload(url), max_bytes=max_bytes)


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{B64}",
        f"DATA:IMAGE/PNG;BASE64,{B64}",
        f"  \n data:image/png;base64,{B64} \n",
        f"data:;base64,{B64}",
        f"data:base64;base64,{B64}",
        f"data:image/jpg;base64,{B64}",
        f"data:image/jpeg;charset=utf-8;name=a.b;base64,{B64}",
        f"data:image/png; base64 ,{B64}",
        f"data:application/octet-stream;base64,{B64}",
        f"data:image/png;base64,{PERCENT}",
        f"data:image/png;base64,{URL_SAFE}",
        f"data:image/png;base64,{B64.rstrip('=')}",
        f"data:image/png;base64,{base64.encodebytes(DATA).decode()}",
        f"data:image/png;base64,{base64.encodebytes(DATA).decode().replace(chr(10), '%0D%0A')}",
    ],
)
def test_spellings_of_one_url_give_the_same_bytes(url: str) -> None:
    assert load(url) == DATA


@given(data=st.binary(min_size=1, max_size=200), is_url_safe=st.booleans(), is_padded=st.booleans())
def test_any_bytes_come_back(data: bytes, is_url_safe: bool, is_padded: bool) -> None:
    text = (base64.urlsafe_b64encode if is_url_safe else base64.b64encode)(data).decode()
    assert load("data:image/png;base64," + (text if is_padded else text.rstrip("="))) == data


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("data:image/png;base64", "no comma"),
        ("data:" + ";" * 2000 + "base64,AAAA", "no comma"),
        ("data:image/png;base64,%41AAA", "do not belong"),
        ("data:image/png,%89PNG", "not in base64"),
        ("data:,hello", "not in base64"),
        ("data:image/png;base64,", "no data"),
        ("data:image/png;base64,  ==\n", "no data"),
        ("data:image/png;base64,AAAAA", "cut off"),
        ("data:image/png;base64,AA*A", "do not belong"),
        ("data:image/png;base64,AA=A", "do not belong"),
        ("data:image/png;base64,AAéA", "do not belong"),
        (f"data:video/jpeg;base64,{B64},{B64}", "not that of an image"),
        (f"data:image/png;base64,{B64},{B64}", "do not belong"),
    ],
)
def test_broken_url_is_refused_with_its_reason(url: str, reason: str) -> None:
    with pytest.raises(DataUrlError, match=reason):
        load(url)


def test_limit_counts_decoded_bytes() -> None:
    assert load(f"data:;base64,{B64}", max_bytes=256) == DATA
    with pytest.raises(DataUrlError, match="256 bytes; at most 255"):
        load(f"data:;base64,{B64}", max_bytes=255)


def test_other_texts_are_no_data_urls() -> None:
    assert not is_data_url("https://example.com/data:image")
    assert not is_data_url(B64)
    assert not is_data_url("")


def test_bare_base64_is_recognised() -> None:
    assert looks_like_base64(B64)
    assert looks_like_base64("\n" + URL_SAFE)
    assert not looks_like_base64("https://example.com/" + "a" * 80)
    assert not looks_like_base64("AAAA")
