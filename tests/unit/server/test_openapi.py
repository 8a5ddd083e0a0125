import json
from typing import Any

import pytest

from server.app import create_app
from server.openapi import ANSWERS, METHODS
from server.settings import Settings
from tests.fake_engine import FakeEngineClient


@pytest.fixture(scope="module")
def openapi() -> dict[str, Any]:
    return create_app(FakeEngineClient(), Settings()).openapi()


def operations(openapi: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(path, item[method]) for path, item in openapi["paths"].items() for method in METHODS & item.keys()]


def test_every_operation_says_how_it_fails(openapi: dict[str, Any]) -> None:
    for path, operation in operations(openapi):
        error = operation["responses"]["default"]["content"]["application/json"]["schema"]
        assert error == {"$ref": "#/components/schemas/Error"}, path
        assert "422" not in operation["responses"]


def test_every_parameter_of_a_path_is_declared(openapi: dict[str, Any]) -> None:
    for path, operation in operations(openapi):
        declared = [parameter["name"] for parameter in operation.get("parameters", ()) if parameter["in"] == "path"]
        assert declared == [part[1:-1] for part in path.split("/") if part.startswith("{")], path


def test_answers_are_those_of_routes_that_exist(openapi: dict[str, Any]) -> None:
    assert ANSWERS.keys() <= openapi["paths"].keys()
    chat = openapi["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    assert chat.keys() == {"application/json", "text/event-stream"}


def test_every_reference_leads_somewhere(openapi: dict[str, Any]) -> None:
    references = {part.split('"')[0] for part in json.dumps(openapi).split('"$ref": "')[1:]}
    assert all(reference.rsplit("/", 1)[1] in openapi["components"]["schemas"] for reference in references)
