"""What the server counts itself: requests, tokens, latencies, pictures. One registry for each application.

Labels are bounded and every value of them exists at 0 from the start: no ids, no URLs, no client's text. The children
of labelled counters are bound once, so that nothing is looked up by label while tokens stream.
"""

from functools import partial
from typing import get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import generate_latest

from runtime.client import EngineClient
from server.engine_metrics import EngineCollector
from server.errors import REJECT_REASONS
from server.histogram import BYTES, FINE_SECONDS, LATENCY_SECONDS, PIXELS, TOKENS, Histogram, LabelledHistogram
from server.image_decode import ImageErrorCode
from server.lifecycle import ABORT_REASONS, PHASES, Lifecycle, ServicePhase
from server.metric_aliases import AliasCollector, MetricsAliases
from server.watchdog import is_responsive

# Route templates with their methods and the statuses that they give; anything else is counted as "other".
MODEL_STATUSES = (200, 400, 401, 404, 408, 413, 429, 499, 500, 503, 504)
HANDLERS: dict[str, tuple[str, tuple[int, ...]]] = {
    "/v1/chat/completions": ("POST", MODEL_STATUSES),
    "/v1/completions": ("POST", MODEL_STATUSES),
    "/v1/responses": ("POST", MODEL_STATUSES),
    "/tokenize": ("POST", MODEL_STATUSES),
    "/detokenize": ("POST", MODEL_STATUSES),
    "/v1/models": ("GET", (200, 401)),
    "/v1/models/{model}": ("GET", (200, 401, 404)),
    "/health": ("GET", (200, 503)),
    "/health/live": ("GET", (200, 503)),
    "/health/ready": ("GET", (200, 503)),
    "/livez": ("GET", (200, 503)),
    "/readyz": ("GET", (200, 503)),
    "/metrics": ("GET", (200,)),
    "/version": ("GET", (200, 401)),
    "/openapi.json": ("GET", (200, 401)),
    "/": ("GET", (200, 304)),
    "/web/{name}": ("GET", (200, 304, 404)),
    "/web/status": ("GET", (200, 401)),
    "other": ("other", (404, 405)),
}
FINISH_REASONS = ("stop", "length", "tool_calls", "function_call", "abort", "error")
IMAGE_SOURCES = ("data", "http")
IMAGE_FORMATS = ("jpeg", "png", "webp", "gif", "bmp", "unknown")
IMAGE_OUTCOMES = ("ok", "rejected")


class Metrics:
    """The application's registry and the instruments in it."""

    def __init__(
        self,
        client: EngineClient,
        lifecycle: Lifecycle,
        *,
        model_name: str,
        version: str,
        watchdog_seconds: float = 30.0,
        revision: str = "unknown",
        aliases: MetricsAliases = "none",
    ) -> None:
        """`watchdog_seconds`: as in `watchdog`. `revision`: of the source. `aliases`: whose names our numbers are
        exported under as well."""
        # A `_created` series for each counter would double the exposition.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)
        engine = EngineCollector(client, model_name=model_name, version=version, revision=revision)
        registry.register(engine)

        http = Counter(
            "fovea_http_requests", "Answers by route and status.", ["handler", "method", "status"], registry=registry
        )
        self._http = {
            (handler, status): http.labels(handler, method, str(status))
            for handler, (method, statuses) in HANDLERS.items()
            for status in statuses
        }
        self._http_family = http
        self._http_seconds = LabelledHistogram(
            "fovea_http_request_duration_seconds", "From a request's head to the last byte of its answer.",
            LATENCY_SECONDS, "handler", HANDLERS, registry,
        )  # fmt: skip
        ready = Gauge("fovea_ready", "1 while requests are taken.", registry=registry)
        ready.set_function(lambda: float(lifecycle.phase == "ready" and is_responsive(client, watchdog_seconds)))
        phases = Gauge("fovea_service_phase", "1 for the phase that the service is in.", ["phase"], registry=registry)
        for phase in PHASES:
            phases.labels(phase).set_function(partial(_is_phase, lifecycle, phase))
        in_flight = Gauge("fovea_requests_in_flight", "Chat requests being worked on.", registry=registry)
        in_flight.set_function(lambda: float(lifecycle.num_in_flight))

        success = Counter("fovea_request_success", "Choices that ended, and how.", ["finish_reason"], registry=registry)
        self.finished = {reason: success.labels(reason) for reason in FINISH_REASONS}
        aborted = Counter("fovea_requests_aborted", "Requests ended early, and why.", ["reason"], registry=registry)
        self.aborted = {reason: aborted.labels(reason) for reason in ABORT_REASONS}
        self.stream_errors = Counter(
            "fovea_stream_errors", "Streams that ended with an error after they had begun.", registry=registry
        )
        rejected = Counter("fovea_requests_rejected", "Requests refused, and why.", ["reason"], registry=registry)
        self.rejected = {reason: rejected.labels(reason) for reason in REJECT_REASONS}

        self.prompt_tokens = Counter("fovea_prompt_tokens", "Prompt tokens of answered requests.", registry=registry)
        self.generation_tokens = Counter("fovea_generation_tokens", "Tokens generated.", registry=registry)
        self.cached_tokens = Counter("fovea_cached_prompt_tokens", "Prompt tokens not computed.", registry=registry)
        self.image_tokens = Counter("fovea_image_tokens", "Prompt tokens that came from pictures.", registry=registry)

        def histogram(name: str, documentation: str, bounds: tuple[float, ...]) -> Histogram:
            return Histogram(f"fovea_{name}", documentation, bounds, registry)

        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", LATENCY_SECONDS
        )
        self.inter_token_latency = histogram("inter_token_latency_seconds", "Between two outputs.", FINE_SECONDS)
        self.e2e_latency = histogram("e2e_request_latency_seconds", "From arrival to the end.", LATENCY_SECONDS)
        self.queue_time = histogram("request_queue_time_seconds", "From arrival to the first step.", LATENCY_SECONDS)
        self.prefill_time = histogram(
            "request_prefill_time_seconds", "From first step to first token.", LATENCY_SECONDS
        )
        self.decode_time = histogram("request_decode_time_seconds", "From first token to the end.", LATENCY_SECONDS)
        self.inference_time = histogram(
            "request_inference_time_seconds", "From first step to the end.", LATENCY_SECONDS
        )
        self.time_per_output_token = histogram(
            "request_time_per_output_token_seconds", "Mean time of a choice's tokens after the first.", FINE_SECONDS
        )
        self.preprocess_time = histogram("request_preprocess_seconds", "Pictures, template, tokens.", FINE_SECONDS)
        self.request_prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self.request_generation_tokens = histogram("request_generation_tokens", "Tokens of a choice.", TOKENS)
        self.request_max_tokens = histogram("request_params_max_tokens", "Tokens allowed to a choice.", TOKENS)

        images = Counter("fovea_images", "Pictures received.", ["source", "format", "outcome"], registry=registry)
        self._images = {
            (source, kind, outcome): images.labels(source, kind, outcome)
            for source in IMAGE_SOURCES
            for kind in IMAGE_FORMATS
            for outcome in IMAGE_OUTCOMES
        }
        image_errors = Counter("fovea_images_rejected", "Pictures refused, and why.", ["reason"], registry=registry)
        self.images_rejected = {code: image_errors.labels(code) for code in get_args(ImageErrorCode)}
        self.image_bytes = histogram("image_bytes", "Size of a picture as sent.", BYTES)
        self.image_pixels = histogram("image_pixels", "Pixels of a picture as sent.", PIXELS)
        self.image_fetch = histogram("image_fetch_seconds", "Time to fetch a picture from its URL.", LATENCY_SECONDS)
        self.image_decode = histogram("image_decode_seconds", "Time to decode and reduce a picture.", FINE_SECONDS)

        if aliases == "vllm":
            own = [
                engine, success, self.prompt_tokens, self.generation_tokens, self.time_to_first_token,
                self.inter_token_latency, self.e2e_latency, self.queue_time, self.prefill_time, self.decode_time,
                self.inference_time, self.time_per_output_token, self.request_prompt_tokens,
                self.request_generation_tokens, self.request_max_tokens,
            ]  # fmt: skip
            registry.register(AliasCollector(own, client, model_name=model_name))

    def count_http(self, handler: str, status: int, seconds: float) -> None:
        """`handler` is a key of `HANDLERS`; statuses that it was not expected to give are added as they come."""
        self._http_seconds.children[handler].observe(seconds)
        child = self._http.get((handler, status))
        if child is None:
            child = self._http[handler, status] = self._http_family.labels(handler, HANDLERS[handler][0], str(status))
        child.inc()

    def count_image(self, source: str, kind: str, outcome: str) -> None:
        self._images[
            source if source in IMAGE_SOURCES else "data", kind if kind in IMAGE_FORMATS else "unknown", outcome
        ].inc()

    def exposition(self) -> bytes:
        """The text format, as Prometheus scrapes it."""
        return generate_latest(self.registry)


def _is_phase(lifecycle: Lifecycle, phase: ServicePhase) -> float:
    return float(lifecycle.phase == phase)
