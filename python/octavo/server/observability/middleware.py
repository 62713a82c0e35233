"""What every HTTP request leaves behind (metrics, one access line, a span), and `GET /metrics`."""

from __future__ import annotations

import asyncio
import gzip
import logging
import time
from collections.abc import MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from octavo.errors import OctavoError
from octavo.server.access.refusal import refuse
from octavo.server.models.entry import ModelEntry, ModelState
from octavo.server.observability.logs import access_fields, access_log, dropped_lines, log_access
from octavo.server.observability.metrics import AUTH_FAILURES, REJECTIONS, EngineReading
from octavo.server.observability.request_context import RequestContext, current_request
from octavo.server.observability.spans import span_attributes
from octavo.server.transport.http import REFUSED, Receive, Scope, Send

if TYPE_CHECKING:
    from octavo.server.models.model_handle import ServedModel
    from octavo.server.state import ServerState

__all__ = ["Observed", "exposition", "observed", "routes"]

_UNMATCHED = "unmatched"
_CLIENT_CLOSED = 499
# Asked every few seconds by machines; they fill no log.
_QUIET = frozenset(("/health", "/livez", "/readyz", "/ping", "/metrics", "/load"))
_STATS_TIMEOUT_S = 2.0
_NOTHING: dict[str, int | float] = dict.fromkeys(
    ("waiting", "blocks_total", "blocks_used", "prefix_hit_tokens", "prefix_query_tokens"), 0
)
_TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"


class _NotingSend:
    """ASGI's `send`, which notes the status and adds what every answer says."""

    __slots__ = ("_context", "_send")

    def __init__(self, send: Send, context: RequestContext) -> None:
        self._send = send
        self._context = context

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            context = self._context
            context.status = message["status"]
            headers = message.setdefault("headers", [])
            if not any(name == b"x-request-id" for name, _ in headers):
                message["headers"] = [*headers, *context.headers]
        await self._send(message)


class Observed:
    """An application whose every request is counted, logged and traced; stands before all else.

    Args:
        app: the application.
        state: the server's.
        templates: paths of the routes, for labels: a request's own path never becomes one.
    """

    def __init__(self, app: ASGIApp, state: ServerState, templates: Sequence[str]) -> None:
        self.app = app
        self._state = state
        self._templates = frozenset(template for template in templates if "{" not in template)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, and take down how it went."""
        refused = scope["type"] == REFUSED
        if scope["type"] != "http" and not refused:
            await self.app(scope, receive, send)
            return
        context = RequestContext(scope, send, always_trace=self._state.spans is not None)
        token = current_request.set(context)
        try:
            if refused:
                await refuse(scope, _NotingSend(send, context), scope[REFUSED])
            else:
                await self.app(scope, receive, _NotingSend(send, context))
        finally:
            self._end(context, scope)
            current_request.reset(token)

    def _end(self, context: RequestContext, scope: Scope) -> None:
        metrics = self._state.metrics
        if context.disconnected:
            metrics.client_disconnects.inc()
        status = context.status or _CLIENT_CLOSED
        path = self.template(scope)
        metrics.http_requests.labels(path, str(status)).inc()
        if path not in _QUIET:
            metrics.http_seconds.histogram(path).observe(time.monotonic() - context.arrival)
        if context.error_code is not None:
            self._count_error(context, context.error_code)
        if self._state.settings.access_log:
            level = logging.DEBUG if path in _QUIET else logging.INFO
            if access_log.isEnabledFor(level):
                identity = scope.get("octavo.identity")
                context.key_name = None if identity is None else identity.name
                log_access(level, access_fields(context, scope, status))
        spans = self._state.spans
        if spans is not None and path not in _QUIET:
            attributes = span_attributes(context, scope["method"], path, status)
            spans.add(context, f"{scope['method']} {path}", time.time_ns(), attributes, status >= 500)

    def _count_error(self, context: RequestContext, code: str) -> None:
        metrics = self._state.metrics
        metrics.request_errors.labels(code).inc()
        if code in AUTH_FAILURES:
            metrics.auth_failures.labels(code).inc()
        elif code in REJECTIONS:
            model = "" if context.record is None else context.record.model
            metrics.admission_rejections.labels(model, code).inc()
            if code == "queue_timeout":
                metrics.deadline_exceeded.inc()

    def template(self, scope: Scope) -> str:
        """The path template of the route that answers; one word for all that there is no route for."""
        path = getattr(scope.get("route"), "path", None)
        if isinstance(path, str):
            return path
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        return path if path in self._templates else _UNMATCHED


def observed(app: ASGIApp, state: ServerState, served_routes: Sequence[BaseRoute]) -> Observed:
    """`app` with everything it answers observed."""
    return Observed(app, state, [path for route in served_routes if (path := getattr(route, "path", None))])


async def _stats(served: ServedModel) -> dict[str, int | float] | None:
    """What an engine says; None when it does not answer in time."""
    try:
        return await asyncio.wait_for(served.engine.stats(), _STATS_TIMEOUT_S)
    except (OctavoError, asyncio.TimeoutError):
        return None


class _Metrics:
    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def metrics(self, request: Request) -> Response:
        """`GET /metrics`, for Prometheus."""
        siblings = self._state.siblings
        text = await (exposition(self._state) if siblings is None else siblings.metrics())
        headers = {"vary": "accept-encoding"}
        # As every Prometheus asks for: a tenth of the bytes.
        if _takes_gzip(request.headers.get("accept-encoding", "")):
            text = await asyncio.to_thread(gzip.compress, text, 1)
            headers["content-encoding"] = "gzip"
        return Response(text, 200, headers, _TEXT_FORMAT)


def _takes_gzip(accepted: str) -> bool:
    for word in accepted.lower().split(","):
        coding, _, quality = word.partition(";")
        if coding.strip() == "gzip":
            return quality.replace(" ", "").rstrip("0.") != "q="
    return False


async def exposition(state: ServerState, *, engines: bool = True) -> bytes:
    """The text of this process's metrics.

    Args:
        state: of the server.
        engines: what the engines say too; else the part that is this process's own, to be added to another's.
    """
    readings = await asyncio.gather(*(_Reader(state, engines).read(entry) for entry in state.registry.entries))
    state.metrics.log_lines_dropped.labels().set(dropped_lines())
    return state.metrics.expose(readings)


class _Reader:
    def __init__(self, state: ServerState, engines: bool) -> None:
        self._state = state
        self._engines = engines

    async def read(self, entry: ModelEntry) -> EngineReading:
        metrics = self._state.metrics
        reading = EngineReading(
            entry.name, metrics.engine_label(entry.name, entry.id), state=entry.state.value, variant=entry.id
        )
        if entry.engine is None:
            return reading
        if not self._engines:
            reading.queue = self._state.admission_queue(entry.view(entry.id)).stats()
            reading.stats = _NOTHING
            return reading
        if entry.loaded_at is not None:
            reading.load_seconds = entry.load_seconds
        served, model = entry.view(entry.id), entry.engine.model
        reading.queue = self._state.admission_queue(served).stats()
        reading.info = {
            "version": entry.version or "",
            "root": str(model.name),
            "architecture": str(model.architecture),
            "dtype": str(model.dtype),
            "device": str(model.device),
            "max_model_len": str(model.max_model_len),
        }
        reading.cache_config = {
            "block_size": str(model.block_size),
            "num_gpu_blocks": str(model.num_blocks),
            "cache_dtype": str(model.dtype),
        }
        # A supervised engine says where it stands.
        state: Any = getattr(entry.engine, "state", None)
        said = state() if callable(state) else None
        if entry.state is ModelState.READY and said is not None:
            reading.state = str(said.name)
        elif entry.state is ModelState.READY and not entry.healthy():
            reading.state = "dead"
        reading.restarts = int(getattr(said, "restarts", 0))
        reading.stats = await _stats(served)
        return reading


def routes(state: ServerState) -> list[BaseRoute]:
    """`/metrics`."""
    return [Route("/metrics", _Metrics(state).metrics)]
