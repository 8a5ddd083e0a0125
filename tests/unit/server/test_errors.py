import json
from collections.abc import Iterator
from typing import Any

import pytest

from server import errors
from server.errors import (
    MAPPINGS,
    REJECT_REASONS,
    ApiError,
    InvalidImageError,
    QueueFullError,
    RequestTimeoutError,
    param_path,
)
from server.routes import BODIES


def all_subclasses(kind: type[ApiError]) -> set[type[ApiError]]:
    return {kind}.union(*(all_subclasses(below) for below in kind.__subclasses__()))


def test_body_has_the_four_keys() -> None:
    error = InvalidImageError("No.", param="messages[0]")
    assert json.loads(error.body()) == {
        "error": {"message": "No.", "type": "invalid_request_error", "param": "messages[0]", "code": "invalid_image"}
    }


def test_every_kind_has_a_reason_that_is_counted() -> None:
    for kind in all_subclasses(ApiError):
        assert kind.reason in REJECT_REASONS
    for error in (errors.draining(), errors.engine_dead()):
        assert error.reason in REJECT_REASONS


def test_the_tree_in_the_docstring_is_complete() -> None:
    assert errors.__doc__ is not None
    for kind in all_subclasses(ApiError):
        assert kind.__name__ in errors.__doc__


def test_what_may_be_tried_again_says_when() -> None:
    for error in (QueueFullError(5), errors.draining(), errors.engine_dead()):
        assert float(error.headers["retry-after"]) > 0
    assert "retry-after" not in RequestTimeoutError(1).headers
    assert errors.draining().headers["connection"] == "close"


def test_unknown_model_is_named_beside_those_that_there_are() -> None:
    error = errors.ModelNotFoundError("gpt-4o", ("demo", "small"))
    assert error.message == "The model `gpt-4o` does not exist; this server has: demo, small."


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("modèle", "modèle"),
        ("a\nb\x1b[0m\u202e", "a\\nb\\x1b[0m\\u202e"),
        ("`", "'"),
        ("x" * 100, "x" * 100),
        ("x" * 101, "x" * 97 + "..."),
        ("\0" * 10**6, ("\\x00" * 25)[:97] + "..."),
        ("\ud800", "\\ud800"),
    ],
)
def test_name_in_a_message_is_printable_and_short(name: str, shown: str) -> None:
    assert errors.shown_name(name) == shown
    assert shown.isprintable()
    assert len(shown) <= errors.MAX_NAME_CHARS


def test_loading_says_how_to_wait() -> None:
    assert "GET /health/ready answers 200" in errors.still_loading().message


def test_context_length_has_the_wording_that_clients_match() -> None:
    alone = errors.context_length(100, 120, None)
    assert alone.code == "context_length_exceeded"
    assert alone.message.startswith(
        "This model's maximum context length is 100 tokens. However, your messages resulted in 120 tokens."
    )
    both = errors.context_length(100, 60, 50)
    assert "you requested 110 tokens (60 in the messages, 50 in the completion)" in both.message


def test_paths() -> None:
    assert param_path(("messages", 0, "content", "<list>", 1, "<image>", "image_url", "url")) == (
        "messages[0].content[1].image_url.url"
    )
    assert param_path(()) is None
    assert param_path(("logit_bias", "drop table; --")) == "logit_bias"
    assert param_path(("metadata", "drop table; --", "[key]")) == "metadata"


def mappings(schema: Any, name: str = "") -> Iterator[str]:
    """Names of the properties whose own properties have the client's names, and are checked."""
    if isinstance(schema, dict):
        if isinstance(schema.get("additionalProperties"), dict):
            yield name
        for key, inner in schema.items():
            for property_name, below in inner.items() if key in ("properties", "$defs") else [(name, inner)]:
                yield from mappings(below, property_name)
    elif isinstance(schema, list):
        for inner in schema:
            yield from mappings(inner, name)


def test_no_path_goes_into_what_has_the_clients_names() -> None:
    assert {name for body in BODIES for name in mappings(body.model_json_schema())} == MAPPINGS
