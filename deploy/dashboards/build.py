"""Builds the dashboards' JSON: `python -m deploy.dashboards.build` writes one file a dashboard beside this one.

Says what the dashboards have in common: variables, time range, links. The JSON is generated, never edited.
"""

import json
from pathlib import Path
from typing import Protocol

from grafana_foundation_sdk.builders.dashboard import Dashboard, DashboardLink, DatasourceVariable, QueryVariable
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

from deploy.dashboards import engine, service
from deploy.dashboards.panels import DATASOURCE

FOLDER = Path(__file__).parent


class Content(Protocol):
    """A module that says what stands on a dashboard."""

    TITLE: str
    UID: str
    DESCRIPTION: str

    def add_rows(self, dashboard: Dashboard) -> None: ...


CONTENTS: tuple[Content, ...] = (service, engine)


def variable(name: str, label: str, query: str, *, all_value: str | None = None) -> QueryVariable:
    """A variable of several values, all of them chosen at first.

    `all_value`: the pattern that "all" stands for; without it, "all" is the list of values found.
    """
    built = (
        QueryVariable(name)
        .label(label)
        .datasource(DATASOURCE)
        .query({"query": query, "refId": name})
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .current(VariableOption(selected=True, text=["All"], value=["$__all"]))
    )
    return built if all_value is None else built.all_value(all_value)


def add_variables(dashboard: Dashboard) -> None:
    """Data source, model, namespace, pod, instance; each narrows the next.

    Outside Kubernetes there is no namespace and no pod: "all" is `.*` there, which a missing label matches too.
    """
    build = "fovea_build_info"
    dashboard.with_variable(DatasourceVariable("datasource").label("Data source").type("prometheus"))
    dashboard.with_variable(variable("model", "Model", f"label_values({build}, model)", all_value=".*"))
    chosen = 'model=~"$model"'
    dashboard.with_variable(
        variable("namespace", "Namespace", f"label_values({build}{{{chosen}}}, namespace)", all_value=".*")
    )
    chosen += ', namespace=~"$namespace"'
    dashboard.with_variable(variable("pod", "Pod", f"label_values({build}{{{chosen}}}, pod)", all_value=".*"))
    chosen += ', pod=~"$pod"'
    dashboard.with_variable(variable("instance", "Instance", f"label_values({build}{{{chosen}}}, instance)"))


def build(content: Content) -> str:
    """A dashboard as JSON text, the same for the same code."""
    others = (
        DashboardLink("Fovea")
        .type(DashboardLinkType.DASHBOARDS)
        .tags(["fovea"])
        .include_vars(True)
        .keep_time(True)
    )  # fmt: skip
    dashboard = (
        Dashboard(content.TITLE)
        .uid(content.UID)
        .description(content.DESCRIPTION)
        .tags(["fovea"])
        .editable()
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .refresh("30s")
        .time("now-1h", "now")
        .link(others)
    )
    add_variables(dashboard)
    content.add_rows(dashboard)
    built = dashboard.build()
    for identity, panel in enumerate(built.panels or [], start=1):
        panel.id_val = identity
    # The builders give every variable the fields of one over intervals; newer schemas know them there only.
    for one in (built.templating.list_val if built.templating else None) or []:
        one.auto = one.auto_min = one.auto_count = None
    return json.dumps(built, cls=JSONEncoder, sort_keys=True, indent=2) + "\n"


def files() -> dict[Path, str]:
    """Every file that this makes, with its content."""
    return {FOLDER / f"{content.UID}.json": build(content) for content in CONTENTS}


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
        print(path)
