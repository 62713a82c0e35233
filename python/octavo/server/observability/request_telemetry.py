"""What the log lines, the trace and the metrics of one HTTP request share."""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import TYPE_CHECKING

from octavo.server.observability.tracing import Trace, trace_of
from octavo.server.transport.http import Scope, Send, request_id_of

if TYPE_CHECKING:
    from octavo.server.observability.request_record import RequestRecord

__all__ = ["RequestTelemetry", "current_request", "telemetry_of"]

_KEY = "octavo.request"
current_request: ContextVar[RequestTelemetry | None] = ContextVar("octavo_request", default=None)
"""The request that the current task answers; None outside of a request."""


class RequestTelemetry:
    """One HTTP request.

    Attributes:
        request_id: from the client if it is valid, else a new one.
        trace: the trace it belongs to; None without a trace.
        arrival: `time.monotonic()` when its head had arrived.
        arrival_ns: the same as Unix time in nanoseconds.
        send: ASGI's, without the middleware that records the status; None without that middleware.
        status: of the response; 0 before it begins.
        error_code: code of the error object in the response, also within a stream.
        record: of the generation, once it begins.
        model: the model of an admin command.
        key_name: name of its API key.
        disconnected: whether the client left before the response was complete.
        prompt: the part of the prompt to log, if prompts are logged.
    """

    __slots__ = (
        "arrival", "arrival_ns", "disconnected", "error_code", "key_name", "model", "prompt", "record", "request_id",
        "send", "status", "trace",
    )  # fmt: skip

    def __init__(self, scope: Scope, send: Send | None = None, *, always_trace: bool = False) -> None:
        self.arrival = time.monotonic()
        self.arrival_ns = time.time_ns()
        self.request_id = request_id_of(scope)
        self.trace: Trace | None = trace_of(scope["headers"])
        if self.trace is None and always_trace:
            self.trace = Trace()
        self.send = send
        self.status = 0
        self.error_code: str | None = None
        self.record: RequestRecord | None = None
        self.model: str | None = None
        self.key_name: str | None = None
        self.disconnected = False
        self.prompt: str | None = None
        scope[_KEY] = self

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of every response: `X-Request-Id` and those of its trace."""
        own = [(b"x-request-id", self.request_id.encode())]
        return own if self.trace is None else own + self.trace.headers


def telemetry_of(scope: Scope) -> RequestTelemetry:
    """The telemetry of a request; a new one if it has none."""
    telemetry: RequestTelemetry | None = scope.get(_KEY)
    return RequestTelemetry(scope) if telemetry is None else telemetry
