"""`GET /v1/models`, `GET /v1/models/{name}` and `GET /version`."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from octavo._core import __version__
from octavo.server.error_responses import describe
from octavo.server.models.registry_entry import RegistryEntry
from octavo.server.state import ServerState
from octavo.server.transport.http import json_response

__all__ = ["Model", "ModelList", "Version", "routes"]


def _failure(error: BaseException) -> Response:
    status, payload, headers = describe(error)
    return json_response(payload, status, headers)


class Model(msgspec.Struct):
    """One model of `GET /v1/models`."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int | None
    permission: list[Any]


class ModelList(msgspec.Struct):
    """The response of `GET /v1/models`."""

    object: Literal["list"]
    data: list[Model]


class Version(msgspec.Struct):
    """The response of `GET /version`."""

    version: str


def _model_object(entry: RegistryEntry, name: str) -> Model:
    info = entry.info
    root = info.name if info is not None else entry.config.model if entry.config is not None else entry.id
    return Model(
        id=name,
        object="model",
        created=entry.created,
        owned_by="octavo",
        root=str(root),
        parent=None,
        # Not known before the model was loaded for the first time.
        max_model_len=None if info is None else int(info.max_model_len),
        permission=[],
    )


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
        return json_response(ModelList("list", data))

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
        return json_response(Version(__version__))


def routes(state: ServerState) -> list[BaseRoute]:
    """The routes for models."""
    reads = _Reads(state)
    return [
        Route("/v1/models", reads.models),
        Route("/v1/models/{name:path}", reads.model),
        Route("/version", reads.version),
    ]
