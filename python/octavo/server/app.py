"""The ASGI application: the routes of all modules, behind the middleware."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from octavo.server.access.middleware import access_middleware
from octavo.server.apis import health, metrics
from octavo.server.apis.anthropic import routes as anthropic
from octavo.server.apis.ollama import routes as ollama
from octavo.server.apis.openai import chat, completions, models_route, responses_api, tokenization
from octavo.server.apis.openapi import docs, document
from octavo.server.apis.tgi import routes as tgi
from octavo.server.observability.middleware import ObservabilityMiddleware
from octavo.server.state import ServerState
from octavo.server.transport.http import json_response

__all__ = ["create_app", "http_exception", "observed"]

_MODULES = (
    anthropic,
    chat,
    completions,
    docs,
    health,
    metrics,
    ollama,
    document,
    models_route,
    responses_api,
    tgi,
    tokenization,
)


def _unknown_path(path: str, known: set[str]) -> str:
    """The message for a path without a route. Often a client's base_url lacks `/v1` or has it twice."""
    if path.endswith(("/embeddings", "/embed")):
        return f"The path {path} does not exist: this server does not support embeddings."
    for meant in (f"/v1{path}", path.removeprefix("/v1")):
        if meant in known - {"", "/", path}:
            return f"The path {path} does not exist; did you mean {meant}?"
    return f"The path {path} does not exist."


async def http_exception(request: Request, error: Exception) -> Response:
    """An error object for an unknown path or a wrong method."""
    assert isinstance(error, HTTPException)
    texts = {
        404: _unknown_path(request.url.path, {getattr(route, "path", "") for route in request.app.routes}),
        405: f"The method {request.method} is not allowed for {request.url.path}.",
    }
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    body = {
        "message": texts.get(error.status_code, str(error.detail)),
        "type": "invalid_request_error",
        "param": None,
        "code": code,
    }
    return json_response({"error": body}, error.status_code, dict(error.headers or {}))


def create_app(state: ServerState) -> ASGIApp:
    """The application that serves `state`. Models may be added while it serves."""
    routes = [route for module in _MODULES for route in module.routes(state)]
    app = Starlette(
        routes=routes,
        middleware=access_middleware(state.settings, state.keys),
        exception_handlers={HTTPException: http_exception},
    )
    return observed(app, state, routes)


def observed(app: ASGIApp, state: ServerState, routes: Sequence[BaseRoute]) -> ASGIApp:
    """An application whose requests are counted, logged and traced."""
    return ObservabilityMiddleware(app, routes, state.metrics, state.spans, log_requests=state.settings.access_log)
