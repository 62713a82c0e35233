"""The ASGI application: every module's routes, and what stands before them."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from octavo.server.access.guard import guard
from octavo.server.apis.anthropic import routes as anthropic
from octavo.server.apis.ollama import routes as ollama
from octavo.server.apis.openai import chat, completions, models_route, responses_api, tokenization
from octavo.server.apis.openai.models_route import json_response
from octavo.server.apis.openapi import docs, document
from octavo.server.apis.tgi import routes as tgi
from octavo.server.observability import health, middleware
from octavo.server.state import ServerState

__all__ = ["create_app", "http_exception"]

_MODULES = (
    anthropic,
    chat,
    completions,
    docs,
    health,
    middleware,
    ollama,
    document,
    models_route,
    responses_api,
    tgi,
    tokenization,
)


def _nothing_at(path: str, known: set[str]) -> str:
    """What to say of a path without a route: mostly a client's base_url lacks `/v1`, or has it twice."""
    if path.endswith(("/embeddings", "/embed")):
        return f"There is nothing at {path}: this server makes no embeddings."
    for meant in (f"/v1{path}", path.removeprefix("/v1")):
        if meant in known - {"", "/", path}:
            return f"There is nothing at {path}; did you mean {meant}?"
    return f"There is nothing at {path}."


async def http_exception(request: Request, error: Exception) -> Response:
    """What is answered where there is no route, or not for the method: an error object as everywhere."""
    assert isinstance(error, HTTPException)
    texts = {
        404: _nothing_at(request.url.path, {getattr(route, "path", "") for route in request.app.routes}),
        405: f"The method {request.method} is not allowed at {request.url.path}.",
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
    """The application over `state`; models may be added to it before and while it serves."""
    routes = [route for module in _MODULES for route in module.routes(state)]
    app = Starlette(routes=routes, middleware=guard(state), exception_handlers={HTTPException: http_exception})
    return middleware.observed(app, state, routes)
