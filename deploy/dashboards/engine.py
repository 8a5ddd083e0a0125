"""The dashboard of the engine: steps, caches, graphs, and where every byte of memory goes. No HTTP."""

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from deploy.dashboards.panels import (
    bars,
    graph,
    number,
    rate,
    ratio,
    series,
    stacked,
    stacked_bars,
)

TITLE = "Fovea: engine and memory"
UID = "fovea-engine"
DESCRIPTION = "The engine's steps, caches and graphs, and where every byte of memory goes."
RED_ABOVE_0 = {None: "green", 1e-9: "red"}


def add_rows(dashboard: Dashboard) -> None:
    add_overview(dashboard)
    add_scheduler(dashboard)
    add_encoder(dashboard)
    add_graphs(dashboard)
    add_memory(dashboard)
    add_startup(dashboard)


def add_overview(dashboard: Dashboard) -> None:
    hits, misses = rate("fovea_graph_hits_total"), rate("fovea_graph_misses_total", 'reason!~"disabled|busy"')
    dashboard.with_row(Row("Overview"))
    for panel in (
        number("Engines up", f"sum({series('fovea_engine_up')})", unit="short",
               description="Engines that are ready.", thresholds={None: "red", 1: "green"}),
        number("Silence", f"max({series('fovea_engine_heartbeat_age_seconds')})", unit="s",
               description="Time since the last sign of life of the quietest engine.",
               thresholds={None: "green", 10: "yellow", 30: "red"}),
        number("Running", f"sum({series('fovea_num_requests_running')})", unit="short",
               description="Sequences in the engine's steps."),
        number("Waiting", f"sum({series('fovea_num_requests_waiting')})", unit="short",
               description="Sequences that wait for a place."),
        number("KV cache", f"max({series('fovea_kv_cache_usage_ratio')})", unit="percentunit",
               description="Part of the KV blocks in use, of the fullest engine.",
               thresholds={None: "green", 0.9: "yellow", 0.98: "red"}),
        number("Graph hits", ratio(hits, f"({hits} + {misses})"), unit="percentunit",
               description="Part of the items of both families that a replay served.",
               thresholds={None: "red", 0.8: "yellow", 0.95: "green"}),
        number("Captured", f"sum({series('fovea_graph_captured_mib')})", unit="mbytes",
               description="What the graphs in use took."),
        number("Unplanned", f"max({series('fovea_memory_unplanned_bytes')})", unit="bytes",
               description="Memory in use beyond the plan; the claim is that it is never above zero.",
               thresholds=RED_ABOVE_0),
    ):  # fmt: skip
        dashboard.with_panel(panel)


def add_scheduler(dashboard: Dashboard) -> None:
    steps = rate("fovea_engine_steps_total")
    dashboard.with_row(Row("Scheduler"))
    for panel in (
        graph("Sequences", {"running": f"sum({series('fovea_num_requests_running')})",
                            "waiting": f"sum({series('fovea_num_requests_waiting')})"},
              unit="short", description="In the engine's steps, and waiting for a place."),
        graph("KV cache usage", {"{{instance}}": series("fovea_kv_cache_usage_ratio")},
              unit="percentunit", description="Part of the KV blocks in use."),
        graph("Preemptions", {"preemptions": rate("fovea_preemptions_total")},
              unit="ops", description="Sequences that lost their blocks and were computed anew."),
        graph("Steps", {"steps": steps, "failed": rate("fovea_engine_failed_steps_total")},
              unit="ops", description="Steps of the engine per second."),
        graph("Step time", {"mean": ratio(rate("fovea_engine_step_seconds_total"), steps)},
              unit="s", description="Mean time of a step."),
        graph("Batch", {"sequences per step": ratio(rate("fovea_engine_step_sequences_total"), steps)},
              unit="short", description="Mean number of sequences in a step."),
        graph("Tokens computed", {"prompt": rate("fovea_engine_prompt_tokens_total"),
                                  "generated": rate("fovea_engine_generation_tokens_total")},
              unit="short", description="Tokens per second that the engine worked on.", span=12),
        graph(
            "Cache hit ratios",
            {"prefix cache (tokens)": ratio(rate("fovea_prefix_cache_hit_tokens_total"),
                                            rate("fovea_prefix_cache_query_tokens_total")),
             "encoder cache (pictures)": ratio(rate("fovea_encoder_cache_hits_total"),
                                               rate("fovea_encoder_cache_queries_total"))},
            unit="percentunit", description="Part of what was looked up that was there.", span=12,
        ),
    ):  # fmt: skip
        dashboard.with_panel(panel)


def add_encoder(dashboard: Dashboard) -> None:
    encode = "fovea_encode_seconds_total"
    dashboard.with_row(Row("Vision encoder"))
    for panel in (
        graph(
            "Encode",
            {"per run": ratio(rate(encode), rate("fovea_encode_batches_total")),
             "per picture": ratio(rate(encode), rate("fovea_images_encoded_total"))},
            unit="s", description="Mean time in the vision encoder.",
        ),
        graph("Pictures and tokens", {"pictures": rate("fovea_images_encoded_total"),
                                      "tokens": rate("fovea_image_tokens_encoded_total")},
              unit="short", description="Encoded per second."),
        graph(
            "Embedding store",
            {"{{instance}}": f"{series('fovea_encoder_cache_used_tokens')} / {series('fovea_encoder_cache_tokens')}"},
            unit="percentunit", description="Part of the embedding rows in use.",
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
        stacked_bars(
            "Hits by bucket, misses by reason",
            # Over the time range: replays of each bucket, and the items that ran eager.
            f"""sum by (graph, part) (label_replace(
                increase({series("fovea_graph_replays_total")}[$__range]), "part", "replays of $1", "bucket", "(.*)"))
            or sum by (graph, part) (label_replace(
                increase({series("fovea_graph_misses_total")}[$__range]), "part", "missed: $1", "reason", "(.*)"))""",
            bar="graph", part="part", unit="short",
            description="In the time range: replays of each bucket, and items that ran eager, by reason.",
        ),
        bars("Buckets", f"sum by (graph, state) ({series('fovea_graph_buckets')})", "{{graph}} {{state}}",
             unit="short", description="Buckets of the ladders, by what became of them at the start.").height(10),
    ):  # fmt: skip
        dashboard.with_panel(panel)


def add_memory(dashboard: Dashboard) -> None:
    dashboard.with_row(Row("Memory"))
    # Two bars a process: the plan's rows on top of each other, and below it the request that they sum to.
    plan = f"""sum by (bar, component) (
        label_replace({series("fovea_memory_bytes")}, "bar", "$1 plan", "instance", "(.*)"))"""
    request = f"""sum by (bar, component) (label_replace(
        label_replace({series("fovea_memory_requested_bytes")}, "bar", "$1 request", "instance", "(.*)"),
        "component", "requested", "", ""))"""
    for panel in (
        stacked_bars(
            "Memory ledger", f"{plan} or {request}", bar="bar", part="component", unit="bytes",
            description="The memory plan by component, against the requested bytes that it sums to.",
        ),
        stacked("Memory by component", {"{{component}}": f"sum by (component) ({series('fovea_memory_bytes')})"},
                unit="bytes", description="The plan's rows over time: a restart with other settings shows.").height(10),
        graph("Unplanned memory", {"{{instance}}": series("fovea_memory_unplanned_bytes")},
              unit="bytes", description="In use beyond the plan; below zero is room that the plan kept.",
              minimum=None, span=12),
        graph(
            "KV cache",
            {"{{instance}} used": f"{series('fovea_kv_cache_used_blocks')} * "
                                  f"{series('fovea_kv_cache_block_size_bytes')}",
             "{{instance}} there is": f"{series('fovea_kv_cache_blocks')} * "
                                      f"{series('fovea_kv_cache_block_size_bytes')}"},
            unit="bytes", description="Bytes of KV blocks in use, and of all there are.", span=12,
        ),
    ):  # fmt: skip
        dashboard.with_panel(panel)


def add_startup(dashboard: Dashboard) -> None:
    dashboard.with_row(Row("Start-up"))
    for panel in (
        bars("Start-up phases", f"max by (phase) ({series('fovea_startup_phase_seconds')})", "{{phase}}", unit="s",
             description="Duration of each phase of the start, of the slowest process.", span=12),
        graph("Phase of the service", {"{{phase}}": f"sum by (phase) ({series('fovea_service_phase')})"},
              unit="short", description="Processes that start, are ready, drain, or are dead.", span=12),
    ):  # fmt: skip
        dashboard.with_panel(panel)
