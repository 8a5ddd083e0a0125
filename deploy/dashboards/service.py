"""The dashboard of the service: is it up, what is asked of it, how long do people wait. No engine's inside."""

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from deploy.dashboards.panels import (
    graph,
    heatmap,
    number,
    quantile,
    quantiles,
    rate,
    ratio,
    series,
    stacked,
)

CHAT = 'handler="/v1/chat/completions"'
TTFT = "fovea_time_to_first_token_seconds"
TITLE = "Fovea: service"
UID = "fovea-service"
DESCRIPTION = "Image chat: what is asked, what is answered, how long it takes, and what is refused."


def add_rows(dashboard: Dashboard) -> None:
    add_overview(dashboard)
    add_traffic(dashboard)
    add_latency(dashboard)
    add_tokens(dashboard)
    add_images(dashboard)
    add_process(dashboard)


def add_overview(dashboard: Dashboard) -> None:
    errors = rate("fovea_http_requests_total", f'{CHAT}, status=~"5.."')
    requests = rate("fovea_http_requests_total", CHAT)
    dashboard.with_row(Row("Overview"))
    for panel in (
        number(
            "Ready", f"sum({series('fovea_ready')})", unit="short",
            description="Processes that take requests.", thresholds={None: "red", 1: "green"},
        ),
        number("In flight", f"sum({series('fovea_requests_in_flight')})", unit="short",
               description="Requests being worked on, from their bodies to their last bytes."),
        number("Requests", requests, unit="reqps", description="Chat requests answered, whatever the status."),
        number("Errors", ratio(errors, requests), unit="percentunit",
               description="Part of chat requests answered with 5xx.", thresholds={None: "green", 0.001: "red"}),
        number("TTFT p50", quantile(0.5, TTFT), unit="s", description="From arrival to the first token, median."),
        number("TTFT p95", quantile(0.95, TTFT), unit="s", description="From arrival to the first token."),
        number("Tokens", rate("fovea_engine_generation_tokens_total"), unit="short",
               description="Tokens sampled per second."),
        number("Pictures", rate("fovea_images_total"), unit="ops", description="Pictures received per second."),
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
        graph("Broken streams", {"streams": rate("fovea_stream_errors_total")},
              unit="ops", description="Streams that ended with an error after they had begun.", span=12),
        stacked("Requests by route", {"{{handler}}": rate("fovea_http_requests_total", by="handler")},
                unit="reqps", description="All routes, probes and scrapes included.", span=12),
    ):  # fmt: skip
        dashboard.with_panel(panel)


def add_latency(dashboard: Dashboard) -> None:
    dashboard.with_row(Row("Latency"))
    for panel in (
        quantiles("Time to first token", TTFT, description="From arrival to the first token."),
        quantiles("Inter-token latency", "fovea_inter_token_latency_seconds", description="Between two outputs."),
        quantiles("End to end", "fovea_e2e_request_latency_seconds", description="From arrival to the last token."),
        heatmap("Time to first token, spread", TTFT, unit="s", description="Requests by their time to first token."),
        heatmap("Inter-token latency, spread", "fovea_inter_token_latency_seconds", unit="s",
                description="Outputs by the time since the one before."),
        heatmap("End to end, spread", "fovea_e2e_request_latency_seconds", unit="s",
                description="Requests by their whole time."),
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
        quantiles("Time per output token", "fovea_request_time_per_output_token_seconds",
                  description="Mean of an answer's tokens after its first, over answers.", span=12),
        graph(
            "HTTP duration p95 by route",
            {"{{handler}}": f"histogram_quantile(0.95, "
                            f"{rate('fovea_http_request_duration_seconds_bucket', by='handler, le')})"},
            unit="s", description="From a request's head to the last byte of its answer.", span=12,
        ),
    ):  # fmt: skip
        dashboard.with_panel(panel)


def add_tokens(dashboard: Dashboard) -> None:
    dashboard.with_row(Row("Tokens"))
    for panel in (
        graph("Tokens",
              {"prompt": rate("fovea_prompt_tokens_total"), "generated": rate("fovea_generation_tokens_total")},
              unit="short", description="Tokens per second of answered requests."),
        heatmap("Prompt length", "fovea_request_prompt_tokens", unit="short",
                description="Requests by their tokens of prompt, pictures included."),
        heatmap("Answer length", "fovea_request_generation_tokens", unit="short",
                description="Choices by their tokens."),
        graph(
            "Of the prompt", {"from pictures": rate("fovea_image_tokens_total"),
                              "from the prefix cache": rate("fovea_cached_prompt_tokens_total")},
            unit="short", description="Prompt tokens per second that came from pictures, and that were not computed.",
            span=12,
        ),
        quantiles("Tokens allowed", "fovea_request_params_max_tokens", unit="short",
                  description="The most tokens that requests allow to a choice.", span=12),
    ):  # fmt: skip
        dashboard.with_panel(panel)


def add_images(dashboard: Dashboard) -> None:
    dashboard.with_row(Row("Images"))
    for panel in (
        stacked("Pictures", {"{{format}} {{outcome}}": rate("fovea_images_total", by="format, outcome")},
                unit="ops", description="Pictures received, by format and outcome."),
        stacked("Pictures refused", {"{{reason}}": rate("fovea_images_rejected_total", by="reason")},
                unit="ops", description="Why pictures were not taken."),
        quantiles("Decode", "fovea_image_decode_seconds", description="To decode and reduce one picture."),
        heatmap("Picture size", "fovea_image_bytes", unit="bytes", description="Pictures by size of file.", span=12),
        heatmap("Picture area", "fovea_image_pixels", unit="short", description="Pictures by pixels as sent.", span=12),
    ):  # fmt: skip
        dashboard.with_panel(panel)


def add_process(dashboard: Dashboard) -> None:
    dashboard.with_row(Row("HTTP process"))
    for panel in (
        graph("Resident memory", {"{{instance}}": series("process_resident_memory_bytes")},
              unit="bytes", description="Host memory of the HTTP process, without the engine and the image workers."),
        graph("CPU", {"{{instance}}": rate("process_cpu_seconds_total", by="instance")},
              unit="short", description="Cores that the HTTP process uses."),
        graph("Open files", {"{{instance}}": series("process_open_fds")},
              unit="short", description="Connections and files of the HTTP process."),
    ):  # fmt: skip
        dashboard.with_panel(panel)
