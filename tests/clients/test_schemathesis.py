"""Schemathesis reads /openapi.json, makes requests of it, valid and not, and looks at the answers: no status of 5xx,
and nothing that the document does not say."""

import json
import subprocess
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.test_clients import ENVIRONMENTS
from tests.http_server import MODEL, data_url, picture
from tests.served_process import Fovea, serving

pytestmark = pytest.mark.clients

FLAGS = (
    *("--memory-bytes", "1GiB", "--max-num-seqs", "4", "--served-model-name", MODEL, "--encoder-graph-budgets", "64"),
    *("--max-model-len", "256"),
)
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


@pytest.fixture(scope="module")
def fovea(tiny_checkpoint: Path) -> Generator[Fovea, None, None]:
    with serving(tiny_checkpoint, *FLAGS) as server:
        yield server


def narrowed(openapi: dict[str, Any]) -> dict[str, Any]:
    """The document with what a schema cannot know: the model's name, pictures that are pictures, short answers."""
    schemas = openapi["components"]["schemas"]
    for name, schema in schemas.items():
        fields = schema.get("properties", {})
        if name.endswith("Request"):
            if "model" in fields:
                fields["model"] = {"enum": [MODEL]}
            for limit in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
                if limit in fields:
                    fields[limit] = {"type": "integer", "minimum": 1, "maximum": 4}
    schemas["ImageUrl"]["properties"]["url"] = {"enum": [data_url(picture()), data_url(picture()[:60]), "nothing"]}
    return openapi


@pytest.mark.parametrize(("method", "seconds"), [("POST", 25), ("GET", 10)])
def test_no_request_made_of_the_document_is_a_server_error(
    fovea: Fovea, tmp_path: Path, method: str, seconds: int
) -> None:
    openapi = tmp_path / "openapi.json"
    openapi.write_text(json.dumps(narrowed(fovea.get("/openapi.json").json())))
    command = [str(ENVIRONMENTS / "schemathesis" / "bin" / "schemathesis"), "run", str(openapi), "--url", fovea.url]
    command += ["--checks", CHECKS, "--phases", "coverage,fuzzing", "--seed", "1", "--max-time", str(seconds)]
    command += ["--max-examples", "500", "--generation-database", "none", "--suppress-health-check", "all"]
    command += ["--no-color", "--warnings", "off", "--include-method", method]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-2000:]
    statuses = {
        labels[-1]: count for (name, labels), count in fovea.metrics().items() if name == "fovea_http_requests_total"
    }
    assert not any(count for status, count in statuses.items() if status in ("500", "504"))
    fovea.wait_idle()
    assert fovea.metrics()["fovea_kv_cache_used_blocks", ()] == 0
