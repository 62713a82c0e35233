"""Loading, unloading and swapping models while they serve: routes of a listener of its own, behind a key of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from octavo.config import EngineConfig
from octavo.errors import ConfigError, InvalidRequest, ModelError, NotEnoughMemory
from octavo.server.aliases import parse_aliases
from octavo.server.auth import Gate, Identity, KeyRing
from octavo.server.config_file import engine_config
from octavo.server.errors import describe
from octavo.server.hosts import HostCheck, allowed_hosts
from octavo.server.http import ClientGone, read_body
from octavo.server.observe import observed
from octavo.server.protocol import RequestBody, decode
from octavo.server.reads import json_response
from octavo.server.state import ServerState

__all__ = ["AdminKeys", "create_admin_app"]

_MAX_BODY_BYTES = 1 << 20


class AdminKeys(KeyRing):
    """The keys of the admin listener: its own, and those of the server that have the scope `admin`.

    Args:
        environment: value of `OCTAVO_ADMIN_KEY`: keys separated by commas.
        others: the server's keys.

    Raises:
        ConfigError: there is no key at all.
    """

    def __init__(self, environment: str | None, others: KeyRing) -> None:
        super().__init__(environment=environment)
        self._others = others
        if not len(self) and not others.required:
            raise ConfigError(
                "admin_port: there is no key for it; set OCTAVO_ADMIN_KEY, or give a key of the API key file "
                "scopes=admin"
            )

    @property
    def required(self) -> bool:
        """Always: a file may be reloaded without keys, and then nobody gets in."""
        return True

    def find(self, presented: Iterable[bytes]) -> Identity | None:
        """Whom any of the presented keys stands for."""
        keys = list(presented)
        own = super().find(keys)
        if own is not None:
            return msgspec.structs.replace(own, scopes=frozenset(("admin",)))
        return self._others.find(keys) if self._others.required else None


class LoadBody(RequestBody, kw_only=True):
    """Of `/admin/models/load`.

    Attributes:
        model: id of a known model, or of a new one with `path`.
        path: what to load, as `octavo serve MODEL`.
        engine: settings of its engine.
        keep_alive: idle seconds after which it is unloaded; negative: never.
        pinned: never unload it to make room.
        wait: answer when it is loaded; else at once, with 202.
    """

    model: str
    path: str | None = None
    engine: dict[str, Any] | None = None
    keep_alive: float | None = None
    pinned: bool | None = None
    wait: bool | None = None


class UnloadBody(RequestBody, kw_only=True):
    """Of `/admin/models/unload`.

    Attributes:
        model: id, or alias of one model.
        timeout: seconds that running requests get.
        remove: forget the model too.
        wait: answer when its engine is closed; else at once, with 202.
    """

    model: str
    timeout: float | None = None
    remove: bool | None = None
    wait: bool | None = None


class SwapBody(LoadBody, kw_only=True):
    """Of `/admin/models/swap`.

    Attributes:
        model: the name, alias or id, that is to be answered by another model.
        to: id of that one; the name with the next number as its version when left out.
        replace: of an alias of several models the one that is replaced.
        wait: answer when the old model's engine is closed; else when the new one serves.
    """

    to: str | None = None
    replace: str | None = None


_STATUSES: tuple[tuple[type[Exception], int, str], ...] = (
    (NotEnoughMemory, 409, "not_enough_memory"),
    (ModelError, 422, "model_error"),
    (ConfigError, 400, "invalid_value"),
)


def _failure(error: Exception) -> Response:
    status, payload, headers = describe(error)
    for kind, own_status, code in _STATUSES:
        if isinstance(error, kind):
            status, headers = own_status, {}
            payload["error"].update(message=str(error), type="invalid_request_error", code=code)
            break
    return json_response(payload, status, headers)


def _answering(work: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    async def handler(request: Request) -> Response:
        try:
            return await work(request)
        except (HTTPException, ClientGone):
            raise
        except Exception as error:
            return _failure(error)

    return handler


async def _body(request: Request) -> bytes:
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    # A page of another origin can send anything else without being asked for its origin first.
    if kind != "application/json":
        raise InvalidRequest(f"Content-Type: {kind[:60]!r} is not supported; send application/json")
    return await read_body(request.scope, request.receive, _MAX_BODY_BYTES)


def _config(body: LoadBody) -> EngineConfig | None:
    if body.path is None:
        if body.engine:
            raise InvalidRequest("engine: settings are of a new model; give its `path` too", "engine")
        return None
    for name in ("model", "served_model_name"):
        if name in (body.engine or {}):
            raise InvalidRequest(f"engine.{name}: is given by `path` and `model`; leave it out", "engine")
    return engine_config({**(body.engine or {}), "model": body.path})


def _options(body: LoadBody, config: EngineConfig | None) -> dict[str, Any]:
    return {} if config is None else {"keep_alive": body.keep_alive, "pinned": bool(body.pinned)}


class _Admin:
    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._registry = state.registry
        # What is answered with 202 goes on without its request.
        self._background: set[asyncio.Future[Any]] = set()

    async def models(self, request: Request) -> Response:
        """`GET /admin/models`: states, progress, use, memory."""
        settings = self._state.settings
        budget = {
            "loaded": len(self._registry.loaded),
            "max_loaded_models": settings.max_loaded_models,
            "bytes": sum(entry.bytes for entry in self._registry.loaded),
            "model_memory": settings.model_memory,
        }
        return json_response({"models": self._registry.snapshot(), "budget": budget, "default": self._registry.default})

    async def model(self, request: Request) -> Response:
        """`GET /admin/models/{id}`."""
        return json_response(self._registry.describe(self._registry.find(request.path_params["id"])))

    async def load(self, request: Request) -> Response:
        """`POST /admin/models/load`."""
        body = decode(LoadBody, await _body(request))
        config = _config(body)
        if config is None:
            entry = self._registry.find(body.model)
            if body.keep_alive is not None:
                self._registry.set_keep_alive(entry.id, body.keep_alive)
        else:
            entry = self._registry.register(body.model, config, **_options(body, config))
        return await self._answer(entry.id, self._registry.load(entry.id), body.wait is not False)

    async def unload(self, request: Request) -> Response:
        """`POST /admin/models/unload`."""
        body = decode(UnloadBody, await _body(request))
        if body.timeout is not None and not 0 <= body.timeout < float("inf"):
            raise InvalidRequest(f"timeout: {body.timeout} is no number of seconds; give one from 0 up", "timeout")
        entry = self._registry.find(body.model)
        work = self._registry.unload(body.model, timeout=body.timeout, remove=bool(body.remove))
        return await self._answer(entry.id, work, body.wait is not False)

    async def swap(self, request: Request) -> Response:
        """`POST /admin/models/swap`."""
        body = decode(SwapBody, await _body(request))
        config = _config(body)
        entry = await asyncio.shield(
            self._keep(
                self._registry.swap(
                    body.model,
                    body.to,
                    config,
                    replace=body.replace,
                    wait=bool(body.wait),
                    **_options(body, config),
                )
            )
        )
        return json_response(
            {
                "model": body.model,
                "to": entry.id,
                "weights": self._registry.aliases.get(body.model, {entry.id: 1}),
                "models": self._registry.snapshot(),
            }
        )

    async def _answer(self, id: str, work: Any, wait: bool) -> Response:
        task = self._keep(work)
        if wait:
            entry = await asyncio.shield(task)
            return json_response(self._registry.describe(entry))
        # It has its say on what is wrong with the request itself.
        await asyncio.wait((task,), timeout=0.05)
        if task.done():
            task.result()
        return json_response(self._registry.describe(self._registry.find(id)), 202)

    def _keep(self, work: Any) -> asyncio.Future[Any]:
        task: asyncio.Future[Any] = asyncio.ensure_future(work)
        self._background.add(task)

        def over(task: asyncio.Future[Any]) -> None:
            self._background.discard(task)
            if not task.cancelled():
                task.exception()

        task.add_done_callback(over)
        return task

    async def aliases(self, request: Request) -> Response:
        """`GET /admin/aliases`: weights by model, by alias."""
        return json_response({"aliases": self._registry.aliases})

    async def replace_aliases(self, request: Request) -> Response:
        """`PUT /admin/aliases`: all of them, at once."""
        given = _object(await _body(request))
        given = given.get("aliases", given) if set(given) == {"aliases"} else given
        if not isinstance(given, dict):
            raise InvalidRequest("aliases: is no object of names", "aliases")
        self._registry.set_aliases(parse_aliases(given))
        return await self.aliases(request)

    async def set_alias(self, request: Request) -> Response:
        """`PUT /admin/aliases/{name}`: a model's id, or an object of weights by id."""
        given = _decode(await _body(request))
        name = request.path_params["name"]
        alias = parse_aliases({name: given})[name]
        self._registry.set_alias(name, alias.weights)
        return await self.aliases(request)

    async def remove_alias(self, request: Request) -> Response:
        """`DELETE /admin/aliases/{name}`."""
        self._registry.remove_alias(request.path_params["name"])
        return await self.aliases(request)


def _decode(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}") from None


def _object(body: bytes) -> Mapping[str, Any]:
    value = _decode(body)
    if not isinstance(value, dict):
        raise InvalidRequest("The body is no JSON object; send names and the models they stand for")
    return value


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = {"message": str(error.detail), "type": "invalid_request_error", "param": None, "code": None}
    return json_response({"error": body}, error.status_code, dict(error.headers or {}))


def create_admin_app(state: ServerState, keys: AdminKeys, host: str = "127.0.0.1") -> ASGIApp:
    """The admin listener's application.

    Args:
        state: of the server whose models it commands.
        keys: that it asks for, on every route.
        host: that it listens on.
    """
    admin = _Admin(state)

    def route(path: str, method: str, work: Callable[[Request], Awaitable[Response]]) -> Route:
        return Route(path, _answering(work), methods=[method])

    routes = [
        route("/admin/models", "GET", admin.models),
        route("/admin/models/load", "POST", admin.load),
        route("/admin/models/unload", "POST", admin.unload),
        route("/admin/models/swap", "POST", admin.swap),
        route("/admin/models/{id:path}", "GET", admin.model),
        route("/admin/aliases", "GET", admin.aliases),
        route("/admin/aliases", "PUT", admin.replace_aliases),
        route("/admin/aliases/{name:path}", "PUT", admin.set_alias),
        route("/admin/aliases/{name:path}", "DELETE", admin.remove_alias),
    ]
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(HostCheck, allowed=allowed_hosts(state.settings.allowed_hosts, host, has_keys=True)),
            Middleware(Gate, keys=keys, scope="admin", open_paths=frozenset()),
        ],
        exception_handlers={HTTPException: _http_exception},
    )
    return observed(app, state, routes)
