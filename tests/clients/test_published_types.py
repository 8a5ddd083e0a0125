"""The gateway's route, the dashboards and the compose file against what is published of their form, in packages of npm:
`@kubernetes-models/gateway-api` (made from the Gateway API's own types), `@grafana/schema` (of a Grafana newer than the
one whose builders make our dashboards), and `dclint`, which carries Compose's own schema. `make test-clients` installs
them.
"""

import copy
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator, ValidationError

from tests.deploy.manifests import DEPLOY, KUBERNETES, Object, only, read_yaml

pytestmark = pytest.mark.clients

CHECKER = Path(__file__).parent / "node" / "published_types.mjs"
ROUTE = read_yaml(KUBERNETES / "components" / "inference-gateway" / "httproute.yaml")
DASHBOARDS = {
    path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted((DEPLOY / "dashboards").glob("*.json"))
}


def complaints(route: Object, dashboards: dict[str, Object]) -> dict[str, Any]:
    """What the types say against them: of the route, and of each dashboard by name."""
    task = json.dumps({"route": route, "dashboards": dashboards})
    done = subprocess.run(["node", str(CHECKER)], input=task, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_route_and_dashboards_fit_the_published_types() -> None:
    assert only([ROUTE], "HTTPRoute")
    assert len(DASHBOARDS) == 2
    assert complaints(ROUTE, DASHBOARDS) == {"route": [], "dashboards": {name: [] for name in DASHBOARDS}}


def first_panel(dashboard: Object, kind: str) -> Object:
    return next(panel for panel in dashboard["panels"] if panel["type"] == kind)


@pytest.mark.parametrize(
    ("spoil_route", "spoil_dashboard"),
    [
        (
            lambda route: route["spec"]["rules"][0]["timeouts"].update(request="610 seconds"),
            lambda board: board.update(refreshh="30s"),
        ),
        (
            lambda route: route["spec"]["rules"][0].update(timeout={}),
            lambda board: first_panel(board, "stat")["options"].update(graphMode="aera"),
        ),
        (
            lambda route: route["spec"]["rules"][0]["matches"][0]["path"].update(type="Prefix"),
            lambda board: first_panel(board, "timeseries")["fieldConfig"]["defaults"]["custom"].update(filled=10),
        ),
        (
            lambda route: route["spec"]["parentRefs"][0].pop("name"),
            lambda board: board["templating"]["list"][0].update(hide="yes"),
        ),
    ],
    ids=["pattern, field", "field, enum", "enum, panel's field", "required, type"],
)
def test_mistakes_are_noticed(spoil_route: Callable[[Object], None], spoil_dashboard: Callable[[Object], None]) -> None:
    route, board = copy.deepcopy(ROUTE), copy.deepcopy(DASHBOARDS["fovea-service"])
    spoil_route(route)
    spoil_dashboard(board)
    found = complaints(route, {"spoiled": board})
    assert found["route"]
    assert found["dashboards"]["spoiled"]


def test_compose_file_fits_the_published_schema() -> None:
    path = CHECKER.parent / "node_modules" / "dclint" / "schemas" / "compose.schema.json"
    validator = Draft7Validator(json.loads(path.read_text(encoding="utf-8")))
    compose = read_yaml(DEPLOY / "compose.yaml")
    validator.validate(compose)
    compose["services"]["grafana"]["capdrop"] = ["ALL"]
    with pytest.raises(ValidationError, match="capdrop"):
        validator.validate(compose)
