"""Middleware that records every HTTP request: metrics, one access-log line, and a trace span."""

from __future__ import annotations

import logging
import time
from collections.abc import MutableMapping, Sequence
from typing import Any

from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from octavo.server.observability.logs import access_fields, access_log, log_access
from octavo.server.observability.metric_definitions import AUTH_FAILURES, REJECTIONS
from octavo.server.observability.metrics import Metrics
from octavo.server.observability.request_telemetry import RequestTelemetry, current_request
from octavo.server.observability.spans import Spans, span_attributes
from octavo.server.transport.http import ERROR_CODE, REFUSED, Receive, Scope, Send, refuse

__all__ = ["ObservabilityMiddleware"]

_UNMATCHED = "unmatched"
_CLIENT_CLOSED = 499
# Machines request these every few seconds. They would fill the log.
_QUIET = frozenset(("/health", "/livez", "/readyz", "/ping", "/metrics", "/load"))


class _RecordingSend:
    """ASGI's `send`. It records the status and adds the headers of every response."""

    __slots__ = ("_send", "_telemetry")

    def __init__(self, send: Send, telemetry: RequestTelemetry) -> None:
        self._send = send
        self._telemetry = telemetry

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            telemetry = self._telemetry
            telemetry.status = message["status"]
            headers = message.setdefault("headers", [])
            if not any(name == b"x-request-id" for name, _ in headers):
                message["headers"] = [*headers, *telemetry.headers]
        await self._send(message)


class ObservabilityMiddleware:
    """Counts, logs and traces every request of an application. It stands in front of all other middleware.

    Args:
        app: the application.
        routes: of the application. Metrics are labelled by route, never by the path that a client sent.
        metrics: of the server.
        spans: of the server; None for no traces.
        log_requests: write an access-log line for each request.
    """

    def __init__(
        self, app: ASGIApp, routes: Sequence[BaseRoute], metrics: Metrics, spans: Spans | None, *, log_requests: bool
    ) -> None:
        self.app = app
        paths: list[str] = [path for route in routes if (path := getattr(route, "path", None))]
        self._templates = frozenset(path for path in paths if "{" not in path)
        self._metrics = metrics
        self._spans = spans
        self._log_requests = log_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request and record it."""
        refused = scope["type"] == REFUSED
        if scope["type"] != "http" and not refused:
            await self.app(scope, receive, send)
            return
        telemetry = RequestTelemetry(scope, send, always_trace=self._spans is not None)
        token = current_request.set(telemetry)
        try:
            if refused:
                await refuse(scope, _RecordingSend(send, telemetry), scope[REFUSED])
            else:
                await self.app(scope, receive, _RecordingSend(send, telemetry))
        finally:
            self._end(telemetry, scope)
            current_request.reset(token)

    def _end(self, telemetry: RequestTelemetry, scope: Scope) -> None:
        metrics = self._metrics
        telemetry.error_code = telemetry.error_code or scope.get(ERROR_CODE)
        if telemetry.disconnected:
            metrics.client_disconnects.inc()
        status = telemetry.status or _CLIENT_CLOSED
        path = self.template(scope)
        metrics.http_requests.labels(path, str(status)).inc()
        if path not in _QUIET:
            metrics.http_seconds.histogram(path).observe(time.monotonic() - telemetry.arrival)
        if telemetry.error_code is not None:
            self._count_error(telemetry, telemetry.error_code)
        if self._log_requests:
            level = logging.DEBUG if path in _QUIET else logging.INFO
            if access_log.isEnabledFor(level):
                log_access(level, access_fields(telemetry, scope, status))
        if self._spans is not None and path not in _QUIET:
            attributes = span_attributes(telemetry, scope["method"], path, status)
            self._spans.add(telemetry, f"{scope['method']} {path}", time.time_ns(), attributes, status >= 500)

    def _count_error(self, telemetry: RequestTelemetry, code: str) -> None:
        metrics = self._metrics
        metrics.request_errors.labels(code).inc()
        if code in AUTH_FAILURES:
            metrics.auth_failures.labels(code).inc()
        elif code in REJECTIONS:
            model = "" if telemetry.record is None else telemetry.record.model
            metrics.admission_rejections.labels(model, code).inc()
            if code == "queue_timeout":
                metrics.deadline_exceeded.inc()

    def template(self, scope: Scope) -> str:
        """The path template of the route that answers; `unmatched` if there is no such route."""
        path = getattr(scope.get("route"), "path", None)
        if isinstance(path, str):
            return path
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        return path if path in self._templates else _UNMATCHED
