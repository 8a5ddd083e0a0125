import asyncio
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from server.byte_budget import ByteBudget
from server.errors import BodyTooLargeError, InvalidRequestError
from server.security import MAX_JSON_DEPTH, check_content_type, parse_json, read_body, request_id_of


def scope(**headers: str) -> dict[str, Any]:
    return {
        "type": "http",
        "headers": [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()],
    }


def read(parts: list[dict[str, Any]], limit: int, **headers: str) -> bytes:
    messages = iter(parts)

    async def receive() -> dict[str, Any]:
        return next(messages)

    with ByteBudget(1000).hold() as hold:
        body = read_body(scope(**headers), receive, max_body_bytes=limit, timeout_seconds=5, hold=hold)
        return asyncio.run(body)


def part(body: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def test_body_is_read_whole_up_to_the_limit() -> None:
    assert read([part(b"ab", more=True), part(b"cd")], 4) == b"abcd"


def test_body_beyond_the_limit_is_not_read_on() -> None:
    with pytest.raises(BodyTooLargeError):
        read([part(b"abc", more=True), part(b"de", more=True)], 4)


def test_announced_length_is_believed_when_it_is_too_much() -> None:
    for length in ("5", "9" * 5000):
        with pytest.raises(BodyTooLargeError):
            read([], 4, content_length=length)


def test_client_may_leave_while_it_sends() -> None:
    with pytest.raises(ClientDisconnect):
        read([part(b"a", more=True), {"type": "http.disconnect"}], 4)


def nested(depth: int) -> bytes:
    return b'{"a":' * (depth - 1) + b"{}" + b"}" * (depth - 1)


def test_depth_is_bounded() -> None:
    parse_json(nested(MAX_JSON_DEPTH))
    for depth in (MAX_JSON_DEPTH + 1, 500, 100_000):
        with pytest.raises(InvalidRequestError, match="nested deeper"):
            parse_json(nested(depth))


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"1", b'{"a": NaN}', b"\xff", b'{"a": "\\ud800"}'])
def test_what_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        parse_json(body)


def test_request_ids() -> None:
    assert request_id_of(scope(x_request_id="abc-1.2:3")) == "abc-1.2:3"
    for bad in ("", "a b", "a\nb", "ü", "x" * 129):
        made = request_id_of(scope(x_request_id=bad))
        assert made != bad
        assert made.startswith("req_")
    assert request_id_of(scope()) != request_id_of(scope())


def test_only_json_is_taken() -> None:
    for kind in ("application/json", "application/json; charset=utf-8", "APPLICATION/JSON", "application/x+json"):
        check_content_type(scope(content_type=kind))
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "text/x+json"):
        with pytest.raises(InvalidRequestError):
            check_content_type(scope(content_type=kind))
    with pytest.raises(InvalidRequestError):
        check_content_type(scope())
