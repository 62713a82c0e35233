"""What is known of one HTTP request while it is answered, for its log lines, its trace and its metrics."""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import TYPE_CHECKING

from octavo.server.observability.tracing import Trace, trace_of
from octavo.server.transport.http import Scope, Send, request_id_of

if TYPE_CHECKING:
    from octavo.server.observability.request_record import RequestRecord

__all__ = ["RequestContext", "context_of", "current_request"]

_KEY = "octavo.request"
current_request: ContextVar[RequestContext | None] = ContextVar("octavo_request", default=None)
"""The request that the running task answers; None outside of one."""


class RequestContext:
    """One HTTP request.

    Attributes:
        request_id: the client's where harmless, else a fresh one.
        trace: the one it belongs to; None without.
        arrival: `time.monotonic()` when its head was there.
        arrival_ns: Unix time in nanoseconds of the same.
        send: ASGI's, without what notes the status; None where nothing does.
        status: of the answer; 499 when the client left before it, 0 until either.
        error_code: of the error object that was answered, also within a stream.
        record: of the generation, once there is one.
        model: that a command is about.
        key_name: of the key it came with.
        disconnected: whether the client left before the answer's end.
        prompt: what to log of the prompt where prompts are logged.
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
        """What every answer says: `X-Request-Id`, and of its trace when it has one."""
        own = [(b"x-request-id", self.request_id.encode())]
        return own if self.trace is None else own + self.trace.headers


def context_of(scope: Scope) -> RequestContext:
    """A request's context; made when nobody has yet."""
    context: RequestContext | None = scope.get(_KEY)
    return RequestContext(scope) if context is None else context
