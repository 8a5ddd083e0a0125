"""Builds `fovea.json`, the dashboard of the service and its engine: `python -m deploy.dashboards.build`.

Says which numbers stand where. How a panel looks is in `panels`; the JSON beside this file is generated, never edited.
"""

import json
from pathlib import Path

from grafana_foundation_sdk.builders.dashboard import Dashboard, DatasourceVariable, QueryVariable, Row
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

from deploy.dashboards.panels import (
    DATASOURCE,
    bars,
    graph,
    number,
    quantile,
    quantiles,
    rate,
    ratio,
    series,
    stacked,
    stacked_bars,
)

CHAT = 'handler="/v1/chat/completions"'
TTFT = "fovea_time_to_first_token_seconds"
OUTPUT = Path(__file__).with_name("fovea.json")
RED_ABOVE_0 = {None: "green", 1e-9: "red"}


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


def add_overview(dashboard: Dashboard) -> None:
    errors = rate("fovea_http_requests_total", f'{CHAT}, status=~"5.."')
    requests = rate("fovea_http_requests_total", CHAT)
    dashboard.with_row(Row("Overview"))
    for panel in (
        number(
            "Ready", f"sum({series('fovea_ready')})", unit="short",
            description="Processes that take requests.", thresholds={None: "red", 1: "green"},
        ),
        number("Running", f"sum({series('fovea_num_requests_running')})", unit="short",
               description="Sequences in the engine's steps."),
        number("Waiting", f"sum({series('fovea_num_requests_waiting')})", unit="short",
               description="Sequences that wait for a place."),
        number("Requests", requests, unit="reqps", description="Chat requests answered, whatever the status."),
        number("Errors", ratio(errors, requests), unit="percentunit",
               description="Part of chat requests answered with 5xx.", thresholds={None: "green", 0.001: "red"}),
        number("TTFT p95", quantile(0.95, TTFT), unit="s", description="From arrival to the first token."),
        number("KV cache", f"max({series('fovea_kv_cache_usage_ratio')})", unit="percentunit",
               description="Part of the KV blocks in use, of the fullest process.",
               thresholds={None: "green", 0.9: "yellow", 0.98: "red"}),
        number("Unplanned", f"max({series('fovea_memory_unplanned_bytes')})", unit="bytes",
               description="Memory in use beyond the plan; the claim is that it is never above zero.",
               thresholds=RED_ABOVE_0),
    ):  # fmt: skip
        dashboard.with_panel(panel)


def add_traffic(dashboard: Dashboard) -> None:
    dashboard.with_row(Row("Traffic and errors"))
    for panel in (
        stacked("Answers by status", {"{{status}}": rate("fovea_http_requests_total", CHAT, by="status")},
                unit="reqps", description="Chat requests by HTTP status."),
        stacked("Choices by finish reason",
                {"{{finish_reason}}": rate("fovea_request_success_total", by="finish_reason")},
                unit="ops", description="How generated answers ended."),
        stacked(
            "Refused and cut off",
            {"refused: {{reason}}": rate("fovea_requests_rejected_total", by="reason"),
             "cut off: {{reason}}": rate("fovea_requests_aborted_total", by="reason")},
            unit="ops", description="Requests that were not taken, and requests that ended early.",
        ),
    ):  # fmt: skip
        dashboard.with_panel(panel)


def add_latency(dashboard: Dashboard) -> None:
    dashboard.with_row(Row("Latency"))
    for panel in (
        quantiles("Time to first token", TTFT, description="From arrival to the first token."),
        quantiles("Inter-token latency", "fovea_inter_token_latency_seconds", description="Between two outputs."),
        quantiles("End to end", "fovea_e2e_request_latency_seconds", description="From arrival to the last token."),
        quantiles("Preprocessing", "fovea_request_preprocess_seconds",
                  description="Pictures decoded and reduced, template rendered, text tokenised."),
        quantiles("Queue", "fovea_request_queue_time_seconds", description="From arrival to the first step."),
        graph(
            "Where the time goes",
            {phase: ratio(rate(f"{name}_sum"), rate(f"{name}_count")) for phase, name in (
                ("preprocess", "fovea_request_preprocess_seconds"),
                ("queue", "fovea_request_queue_time_seconds"),
                ("prefill", "fovea_request_prefill_time_seconds"),
                ("decode", "fovea_request_decode_time_seconds"),
            )},
            unit="s", description="Mean of each phase of a request.",
        ),
    ):  # fmt: skip
        dashboard.with_panel(panel)


def add_tokens(dashboard: Dashboard) -> None:
    dashboard.with_row(Row("Tokens"))
    for panel in (
        graph("Tokens",
              {"prompt": rate("fovea_prompt_tokens_total"), "generated": rate("fovea_generation_tokens_total")},
              unit="short", description="Tokens per second of answered requests."),
        graph(
            "Of the prompt", {"from pictures": rate("fovea_image_tokens_total"),
                              "from the prefix cache": rate("fovea_cached_prompt_tokens_total")},
            unit="short", description="Prompt tokens per second that came from pictures, and that were not computed.",
        ),
        graph(
            "Cache hit ratios",
            {"prefix cache (tokens)": ratio(rate("fovea_prefix_cache_hit_tokens_total"),
                                            rate("fovea_prefix_cache_query_tokens_total")),
             "encoder cache (pictures)": ratio(rate("fovea_encoder_cache_hits_total"),
                                               rate("fovea_encoder_cache_queries_total"))},
            unit="percentunit", description="Part of what was looked up that was there.",
        ),
    ):  # fmt: skip
        dashboard.with_panel(panel)


def add_scheduler(dashboard: Dashboard) -> None:
    dashboard.with_row(Row("Scheduler"))
    for panel in (
        graph("Sequences", {"running": f"sum({series('fovea_num_requests_running')})",
                            "waiting": f"sum({series('fovea_num_requests_waiting')})"},
              unit="short", description="In the engine's steps, and waiting for a place."),
        graph("KV cache usage", {"{{instance}}": series("fovea_kv_cache_usage_ratio")},
              unit="percentunit", description="Part of the KV blocks in use."),
        graph("Preemptions", {"preemptions": rate("fovea_preemptions_total")},
              unit="ops", description="Sequences that lost their blocks and were computed anew."),
    ):  # fmt: skip
        dashboard.with_panel(panel)


def add_images(dashboard: Dashboard) -> None:
    dashboard.with_row(Row("Images"))
    encode = "fovea_encode_seconds_total"
    for panel in (
        stacked("Pictures", {"{{format}} {{outcome}}": rate("fovea_images_total", by="format, outcome")},
                unit="ops", description="Pictures received, by format and outcome."),
        quantiles("Decode", "fovea_image_decode_seconds", description="To decode and reduce one picture."),
        graph(
            "Encode",
            {"per run": ratio(rate(encode), rate("fovea_encode_batches_total")),
             "per picture": ratio(rate(encode), rate("fovea_images_encoded_total"))},
            unit="s", description="Mean time in the vision encoder.",
        ),
    ):  # fmt: skip
        dashboard.with_panel(panel)


def add_graphs(dashboard: Dashboard) -> None:
    dashboard.with_row(Row("Graphs"))
    hits, misses = rate("fovea_graph_hits_total", by="graph"), rate("fovea_graph_misses_total", by="graph")
    padded = rate("fovea_graph_padded_tokens_total", 'graph="encoder"')
    for panel in (
        stacked(
            "Hits and misses",
            {"{{graph}} hit": hits, "{{graph}} miss: {{reason}}": rate("fovea_graph_misses_total", by="graph, reason")},
            unit="ops", description="Items per second (pictures; sequences) served by a replay, or eager and why.",
        ),
        graph("Hit ratio", {"{{graph}}": ratio(hits, f"({hits} + {misses})")},
              unit="percentunit", description="Part of the items that a replay served."),
        stacked("Replays by bucket", {"{{graph}} {{bucket}}": rate("fovea_graph_replays_total", by="graph, bucket")},
                unit="ops", description="Replays per second of each bucket."),
        graph("Padding", {"{{graph}}": rate("fovea_graph_padded_tokens_total", by="graph")},
              unit="short", description="Tokens of padding replayed per second."),
        graph(
            "Padding's share of the encoder",
            {"wasted": ratio(padded, f"({padded} + {rate('fovea_image_tokens_encoded_total')})")},
            unit="percentunit", description="Padding as a part of all tokens that the encoder worked on.",
        ),
        bars(
            "Reserved, measured, captured",
            " or ".join(
                f'label_replace(sum by (graph) ({series(f"fovea_graph_{kind}_mib")}), "kind", "{kind}", "", "")'
                for kind in ("reserved", "measured", "captured")
            ),
            "{{graph}} {{kind}}", unit="mbytes",
            description="What KV sizing subtracted, what the graphs were measured to take, what those in use took.",
        ),
    ):  # fmt: skip
        dashboard.with_panel(panel)


def add_memory(dashboard: Dashboard) -> None:
    dashboard.with_row(Row("Memory and start-up"))
    # Two bars a process: the plan's rows on top of each other, and below it the request that they sum to.
    plan = f"""sum by (bar, component) (
        label_replace({series("fovea_memory_bytes")}, "bar", "$1 plan", "instance", "(.*)"))"""
    request = f"""sum by (bar, component) (label_replace(
        label_replace({series("fovea_memory_requested_bytes")}, "bar", "$1 request", "instance", "(.*)"),
        "component", "requested", "", ""))"""
    dashboard.with_panel(
        stacked_bars(
            "Memory ledger", f"{plan} or {request}", bar="bar", part="component", unit="bytes",
            description="The memory plan by component, against the requested bytes that it sums to.",
        )
    )  # fmt: skip
    dashboard.with_panel(
        bars("Start-up phases", f"max by (phase) ({series('fovea_startup_phase_seconds')})", "{{phase}}", unit="s",
             description="Duration of each phase of the start, of the slowest process.").height(10)
    )  # fmt: skip
    for panel in (
        stacked("Memory by component", {"{{component}}": f"sum by (component) ({series('fovea_memory_bytes')})"},
                unit="bytes", description="The plan's rows over time: a restart with other settings shows."),
        graph("Unplanned memory", {"{{instance}}": series("fovea_memory_unplanned_bytes")},
              unit="bytes", description="In use beyond the plan; below zero is room that the plan kept.",
              minimum=None),
        graph("Resident memory of the server process", {"{{instance}}": series("process_resident_memory_bytes")},
              unit="bytes", description="Host memory of the HTTP process, without the engine and the image workers."),
    ):  # fmt: skip
        dashboard.with_panel(panel)


def build() -> str:
    """The dashboard as JSON text, the same for the same code."""
    dashboard = (
        Dashboard("Fovea")
        .uid("fovea")
        .description("Image chat: traffic, latency, the engine's graphs and where every byte of memory goes.")
        .tags(["fovea"])
        .editable()
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .refresh("30s")
        .time("now-1h", "now")
    )
    add_variables(dashboard)
    add_overview(dashboard)
    add_traffic(dashboard)
    add_latency(dashboard)
    add_tokens(dashboard)
    add_scheduler(dashboard)
    add_images(dashboard)
    add_graphs(dashboard)
    add_memory(dashboard)
    built = dashboard.build()
    for identity, panel in enumerate(built.panels or [], start=1):
        panel.id_val = identity
    return json.dumps(built, cls=JSONEncoder, sort_keys=True, indent=2) + "\n"


if __name__ == "__main__":
    OUTPUT.write_text(build(), encoding="utf-8")
    print(OUTPUT)
