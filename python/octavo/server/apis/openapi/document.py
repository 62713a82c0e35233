"""`GET /openapi.json`: every route of the application, its requests from the types that decode them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from octavo._core import __version__
from octavo.server.apis.openapi.operations import OPERATIONS, Operation

if TYPE_CHECKING:
    from octavo.server.state import ServerState

__all__ = ["document", "routes"]

_JSON = "application/json"
# Responses that are not JSON.
_OTHER_TYPES: dict[str, tuple[str, ...]] = {
    "/metrics": ("text/plain",),
    "/docs": ("text/html",),
    "/": ("text/plain", "text/html", _JSON),
    "/health": (),
    "/ping": (),
}
# The error object of `describe`.
_ERROR: dict[str, Any] = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "integer", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
_PARAMETER = re.compile(r"{(\w+)(:\w+)?}")


def document(
    routes: Sequence[BaseRoute],
    root_path: str = "",
    operations: Mapping[tuple[str, str], Operation] = OPERATIONS,
    title: str = "Octavo",
    description: str = "OpenAI's API, with Anthropic's, Ollama's and TGI's beside it.",
) -> dict[str, Any]:
    """The OpenAPI 3.1 document of an application's routes.

    Args:
        routes: of the application.
        root_path: under which a proxy shows them.
        operations: what their code does not say, by method and path.
        title: of the whole.
        description: of the whole.
    """
    both = [kind for operation in operations.values() for kind in (operation.request, operation.response)]
    types = list({kind: None for kind in both if kind is not None})
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    by_type = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        if not isinstance(route, Route):
            continue
        path = _PARAMETER.sub(r"{\1}", route.path)
        for method in sorted(route.methods or ()):
            if method != "HEAD":
                known = operations.get((method, path)) or Operation("Server", path)
                paths.setdefault(path, {})[method.lower()] = _operation(known, route, method, path, by_type)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": title,
            "version": __version__,
            "description": description,
        },
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(known: Operation, route: Route, method: str, path: str, by_type: dict[Any, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for kind in _OTHER_TYPES.get(path, (_JSON,)) if known.request is None else (_JSON,):
        content[kind] = {} if known.response is None else {"schema": by_type[known.response]}
    if known.stream is not None:
        content[known.stream] = {}
    error = {"schema": {"$ref": "#/components/schemas/Error"}} if known.openai_errors else {}
    operation: dict[str, Any] = {
        "summary": known.summary,
        "operationId": f"{method.lower()}_{re.sub(r'[^a-z0-9]+', '_', path.lower()).strip('_') or 'root'}",
        "tags": [known.tag],
        "responses": {
            "200": {"description": "The response.", **({"content": content} if content else {})},
            "default": {"description": "The error.", "content": {_JSON: error, "text/plain": {}}},
        },
    }
    if known.description:
        operation["description"] = known.description
    names = [match.group(1) for match in _PARAMETER.finditer(route.path)]
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in names
        ]
    if known.request is not None:
        body: dict[str, Any] = {"schema": by_type[known.request]}
        if known.example is not None:
            body["example"] = known.example
        operation["requestBody"] = {"required": True, "content": {_JSON: body}}
    return operation


def routes(state: ServerState) -> list[BaseRoute]:
    """`/openapi.json`."""
    made: list[bytes] = []

    async def openapi(request: Request) -> Response:
        """`GET /openapi.json`: this document."""
        if not made:
            made.append(msgspec.json.encode(document(request.app.routes, state.settings.root_path)))
        return Response(made[0], 200, None, "application/json")

    return [Route("/openapi.json", openapi)]
