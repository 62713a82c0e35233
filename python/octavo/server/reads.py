"""The GET routes: models, health, version, metrics."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from octavo._core import __version__
from octavo.server.errors import describe
from octavo.server.served import ServedModel
from octavo.server.state import ServerState

__all__ = ["json_response", "routes"]


def _failure(error: BaseException) -> Response:
    status, payload, headers = describe(error)
    return json_response(payload, status, headers)


def json_response(payload: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """An answer of one JSON value."""
    return Response(msgspec.json.encode(payload), status, headers, "application/json")


def _model_object(served: ServedModel, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "octavo",
        "root": str(served.engine.model.name),
        "parent": None,
        "max_model_len": served.max_model_len,
        "permission": [],
    }


class _Reads:
    """The GET routes."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        try:
            self._state.check_ready()
        except Exception as error:
            return _failure(error)
        data = [_model_object(served, name) for served in self._state.models for name in served.names]
        return json_response({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/{name}`; a name may hold slashes."""
        name = request.path_params["name"]
        try:
            return json_response(_model_object(self._state.resolve(name), name))
        except Exception as error:
            return _failure(error)

    async def health(self, request: Request) -> Response:
        """`GET /health`: 200 when requests can be served, 503 with the reason when not."""
        try:
            self._state.check_ready()
            for served in self._state.models:
                served.engine.check_health()
        except Exception as error:
            return _failure(error)
        return Response(b"", 200)

    async def version(self, request: Request) -> Response:
        """`GET /version`."""
        return json_response({"version": __version__})


def routes(state: ServerState) -> list[BaseRoute]:
    """All of them."""
    reads = _Reads(state)
    return [
        Route("/v1/models", reads.models),
        Route("/v1/models/{name:path}", reads.model),
        Route("/health", reads.health),
        Route("/version", reads.version),
    ]
