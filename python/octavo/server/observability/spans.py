"""One span for each request, sent to an OpenTelemetry collector by a thread. Needs `pip install octavo[otel]`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from octavo._core import __version__
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from octavo.server.observability.request_telemetry import RequestTelemetry

__all__ = ["Spans", "span_attributes", "traces_url"]

_DEFAULT_PATH = "/v1/traces"
_EXPORT_TIMEOUT_S = 5.0


def traces_url(url: str) -> str:
    """The URL of a collector, with OTLP's default path if it has none.

    Raises:
        ConfigError: not a URL.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(
            f"otlp_traces_endpoint: {url!r} is not the URL of a collector; use for example "
            "http://localhost:4318/v1/traces (OTLP over HTTP; port 4317 is for gRPC, which is not supported)"
        )
    return urlunsplit(parts._replace(path=_DEFAULT_PATH)) if parts.path in ("", "/") else url


class Spans:
    """Exports the spans of answered requests.

    A span is queued when its request has ended, and a thread sends the queue. If the collector is down, spans that do
    not fit in the queue are dropped.

    Args:
        endpoint: URL of the collector, for OTLP over HTTP.
        exporter: sends the spans instead (tests).

    Raises:
        ConfigError: OpenTelemetry is not installed, or the endpoint is not a URL.
    """

    def __init__(self, endpoint: str, exporter: SpanExporter | None = None) -> None:
        endpoint = traces_url(endpoint)
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.id_generator import IdGenerator
        except ImportError as error:
            raise ConfigError(
                f"otlp_traces_endpoint: OpenTelemetry is not installed ({error}); pip install 'octavo[otel]'"
            ) from None

        class Ids(IdGenerator):
            """Returns the ids that the request's response and log lines already carry."""

            trace_id = 0
            span_id = 0

            def generate_trace_id(self) -> int:
                """The request's trace."""
                return self.trace_id

            def generate_span_id(self) -> int:
                """The request's span."""
                return self.span_id

        self._api = trace
        self._ids = Ids()
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES take precedence.
        resource = Resource.create({"service.version": __version__}).merge(Resource.create())
        if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "octavo"}))
        self._provider = TracerProvider(resource=resource, id_generator=self._ids)
        exporter = exporter or OTLPSpanExporter(endpoint, timeout=_EXPORT_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("octavo.server", __version__)
        # A collector that is down must not log a traceback for each batch.
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)

    def add(
        self, telemetry: RequestTelemetry, name: str, end_ns: int, attributes: Mapping[str, Any], error: bool
    ) -> None:
        """Queue the span of a request that has ended.

        Args:
            telemetry: of the request; without a trace it is skipped.
            name: of the span.
            end_ns: Unix time.
            attributes: those that are None are left out.
            error: the server failed to answer.
        """
        trace, api = telemetry.trace, self._api
        if trace is None:
            return
        parent = None
        if trace.parent_id is not None:
            state = api.TraceState.from_header([trace.tracestate]) if trace.tracestate else None
            remote = api.SpanContext(
                int(trace.trace_id, 16),
                int(trace.parent_id, 16),
                is_remote=True,
                trace_flags=api.TraceFlags(int(trace.sampled)),
                trace_state=state,
            )
            parent = api.set_span_in_context(api.NonRecordingSpan(remote))
        self._ids.trace_id, self._ids.span_id = int(trace.trace_id, 16), int(trace.span_id, 16)
        span = self._tracer.start_span(
            name,
            # An empty context: None would mean the span of the current task.
            context=api.set_span_in_context(api.INVALID_SPAN) if parent is None else parent,
            kind=api.SpanKind.SERVER,
            attributes={key: value for key, value in attributes.items() if value is not None},
            start_time=telemetry.arrival_ns,
        )
        if error:
            span.set_status(api.StatusCode.ERROR)
        span.end(end_ns)

    def flush(self) -> None:
        """Send all queued spans; blocks."""
        self._provider.force_flush(round(_EXPORT_TIMEOUT_S * 1000))

    def close(self) -> None:
        """Send all queued spans and end the thread; blocks."""
        self._provider.shutdown()


def span_attributes(telemetry: RequestTelemetry, method: str, route: str, status: int) -> dict[str, Any]:
    """Span attributes of a request, with OpenTelemetry's names; neither prompts nor completions."""
    attributes: dict[str, Any] = {
        "http.request.method": method,
        "http.route": route,
        "http.response.status_code": status,
        "gen_ai.request.id": telemetry.request_id,
        "error.type": telemetry.error_code,
    }
    record = telemetry.record
    if record is not None:
        attributes |= {
            "gen_ai.system": "octavo",
            "gen_ai.request.model": record.name,
            "gen_ai.response.model": record.model,
            "gen_ai.request.n": record.num_answers,
            "gen_ai.request.max_tokens": record.max_tokens,
            "gen_ai.request.temperature": record.temperature,
            "gen_ai.request.top_p": record.top_p,
            "gen_ai.response.finish_reasons": record.finish_reasons,
            "gen_ai.usage.prompt_tokens": record.prompt_tokens,
            "gen_ai.usage.completion_tokens": record.completion_tokens,
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.output_tokens": record.completion_tokens,
            "gen_ai.latency.time_in_queue": record.queue_time,
            "gen_ai.latency.time_to_first_token": record.time_to_first_token,
            "gen_ai.latency.e2e": record.latency,
            "gen_ai.latency.time_in_model_prefill": record.prefill_time,
            "gen_ai.latency.time_in_model_decode": record.decode_time,
            "gen_ai.latency.time_in_model_inference": record.inference_time,
            "octavo.variant": record.variant,
            "octavo.cached_tokens": record.cached_tokens,
        }
    return attributes
