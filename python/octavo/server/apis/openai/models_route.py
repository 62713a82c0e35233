"""The GET routes: models, version, metrics."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from octavo._core import __version__
from octavo.server.error_responses import describe
from octavo.server.models.registry_entry import RegistryEntry
from octavo.server.state import ServerState
from octavo.server.transport.http import json_response

__all__ = ["routes"]


def _failure(error: BaseException) -> Response:
    status, payload, headers = describe(error)
    return json_response(payload, status, headers)


def _model_object(entry: RegistryEntry, name: str) -> dict[str, Any]:
    info = entry.info
    root = info.name if info is not None else entry.config.model if entry.config is not None else entry.id
    return {
        "id": name,
        "object": "model",
        "created": entry.created,
        "owned_by": "octavo",
        "root": str(root),
        "parent": None,
        # Not known before the model was loaded for the first time.
        "max_model_len": None if info is None else int(info.max_model_len),
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
        registry = self._state.registry
        data = [_model_object(registry.targets(name)[0], name) for name in registry.names]
        return json_response({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/{name}`; a name may hold slashes."""
        name = request.path_params["name"]
        try:
            self._state.check_ready()
            return json_response(_model_object(self._state.registry.targets(name)[0], name))
        except Exception as error:
            return _failure(error)

    async def version(self, request: Request) -> Response:
        """`GET /version`."""
        return json_response({"version": __version__})


def routes(state: ServerState) -> list[BaseRoute]:
    """All of them."""
    reads = _Reads(state)
    return [
        Route("/v1/models", reads.models),
        Route("/v1/models/{name:path}", reads.model),
        Route("/version", reads.version),
    ]
