"""Admin routes to load, unload and swap models at run time, on a separate listener with a separate key."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from octavo.errors import ConfigError, InvalidRequest, ModelError, ModelNotServed, NotEnoughMemory
from octavo.server.access.api_keys import KeyRing
from octavo.server.access.hosts import allowed_hosts
from octavo.server.access.identity import Identity
from octavo.server.access.middleware import ApiKeyCheck, HostCheck
from octavo.server.admin.requests import LoadBody, SwapBody, UnloadBody, decode_command, decode_json, decode_object
from octavo.server.apis.openapi.document import document
from octavo.server.apis.openapi.operations import Operation
from octavo.server.app import http_exception, observed
from octavo.server.error_responses import ServerStopping, describe
from octavo.server.models.aliases import parse_aliases
from octavo.server.models.registry_entry import RegistryEntry
from octavo.server.observability.request_telemetry import telemetry_of
from octavo.server.request.decoding import RequestBody
from octavo.server.state import ServerState
from octavo.server.transport.http import ClientGone, Receive, Scope, Send, json_response, read_body

__all__ = ["AdminKeys", "create_admin_app"]

logger = logging.getLogger("octavo.server")

_MAX_BODY_BYTES = 1 << 20
_SHUTDOWN_REPLY_S = 1.0
_EARLY_ERROR_S = 0.05

Body = TypeVar("Body", bound=RequestBody)


class AdminKeys(KeyRing):
    """Keys of the admin listener: its own, and the server's keys with the scope `admin`.

    Args:
        environment: value of `OCTAVO_ADMIN_KEY`: keys separated by commas.
        others: the server's keys.

    Raises:
        ConfigError: there are no keys.
    """

    def __init__(self, environment: str | None, others: KeyRing) -> None:
        super().__init__(environment=environment, variable="OCTAVO_ADMIN_KEY")
        self._others = others
        if not len(self) and not others.required:
            raise ConfigError(
                "admin_port: the admin listener needs a key; set OCTAVO_ADMIN_KEY, or add scopes=admin to a key of the "
                "API key file"
            )

    @property
    def required(self) -> bool:
        """Always true: a key file may become empty, and then all requests are refused."""
        return True

    def find(self, presented: Iterable[bytes]) -> Identity | None:
        """The identity of any of the presented keys; None if all are unknown."""
        keys = list(presented)
        own = super().find(keys)
        if own is not None:
            name = own.name.replace("environment", "admin")
            return msgspec.structs.replace(own, name=name, tenant=name, scopes=frozenset(("admin",)))
        return self._others.find(keys) if self._others.required else None


_STATUSES: tuple[tuple[type[Exception], int, str], ...] = (
    (NotEnoughMemory, 409, "not_enough_memory"),
    (ModelError, 422, "model_error"),
    (ConfigError, 400, "invalid_value"),
)


def _failure(error: Exception, request: Request) -> Response:
    status, payload, headers = describe(error)
    for kind, own_status, code in _STATUSES:
        if isinstance(error, kind):
            status, headers = own_status, {}
            payload["error"].update(message=str(error), type="invalid_request_error", code=code)
            break
    telemetry_of(request.scope).error_code = payload["error"]["code"]
    return json_response(payload, status, headers)


class _NoAnswer(Response):
    """The response to a client that has left."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send nothing."""


def _answering(
    work: Callable[[Request], Awaitable[Response]], state: ServerState
) -> Callable[[Request], Awaitable[Response]]:
    async def handler(request: Request) -> Response:
        task = asyncio.ensure_future(work(request))
        stopped = asyncio.ensure_future(state.stopped.wait())
        try:
            await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                # A cancelled command reports its own error.
                await asyncio.wait((task,), timeout=_SHUTDOWN_REPLY_S)
            if not task.done():
                raise ServerStopping("The server is shutting down; the command may not be complete")
            return task.result()
        except HTTPException:
            raise
        except ClientGone:
            telemetry_of(request.scope).disconnected = True
            return _NoAnswer()
        except Exception as error:
            return _failure(error, request)
        finally:
            task.cancel()
            stopped.cancel()

    return handler


async def _body(request: Request) -> bytes:
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    # A web page of another origin can send any other type without a preflight request.
    if kind != "application/json":
        raise InvalidRequest(f"Content-Type: {kind[:60]!r} is not supported; send application/json")
    return await read_body(request.scope, request.receive, _MAX_BODY_BYTES)


class _Admin:
    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._registry = state.registry
        # Commands that were answered with 202 go on without their request.
        self._background: set[asyncio.Future[Any]] = set()

    async def _command(self, kind: type[Body], request: Request) -> Body:
        command = decode_command(kind, await _body(request))
        telemetry_of(request.scope).model = getattr(command, "model", None)
        return command

    def _check_loads(self) -> None:
        if self._state.draining:
            raise ServerStopping("The server is shutting down; no model is loaded")

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
        body = await self._command(LoadBody, request)
        self._check_loads()
        config = body.config()
        if config is None:
            try:
                entry = self._registry.find(body.model)
            except ModelNotServed as error:
                raise ModelNotServed(f"{error}; add a path to load a new model", "model") from None
            if body.pinned is not None:
                entry.pinned = body.pinned
            if body.keep_alive is not None:
                self._registry.set_keep_alive(entry.id, body.keep_alive)
        else:
            entry = self._registry.register(
                body.model,
                config,
                keep_alive=body.keep_alive,
                pinned=bool(body.pinned),
                tentative=True,
                on_request=False,
            )
        return await self._answer(entry, self._registry.load(entry.id), body.wait is not False)

    async def unload(self, request: Request) -> Response:
        """`POST /admin/models/unload`."""
        body = await self._command(UnloadBody, request)
        entry = self._registry.find(body.model)
        work = self._registry.unload(entry.id, timeout=body.timeout, remove=bool(body.remove))
        return await self._answer(entry, work, body.wait is not False)

    async def swap(self, request: Request) -> Response:
        """`POST /admin/models/swap`."""
        body = await self._command(SwapBody, request)
        self._check_loads()
        config = body.config()
        options = {} if config is None else {"keep_alive": body.keep_alive, "pinned": bool(body.pinned)}
        work = self._registry.swap(body.model, body.to, config, replace=body.replace, wait=bool(body.wait), **options)
        done = await asyncio.shield(self._keep(work))
        return json_response(
            {
                "model": body.model,
                "to": done.entry.id,
                "weights": self._registry.aliases.get(body.model, {done.entry.id: 1}),
                "unloading": list(done.unloading),
                "kept": [{"id": id, "aliases": aliases} for id, aliases in done.kept.items()],
                "models": self._registry.snapshot(),
            }
        )

    async def _answer(self, entry: RegistryEntry, work: Any, wait: bool) -> Response:
        task = self._keep(work)
        if wait:
            await asyncio.shield(task)
            return json_response(self._registry.describe(entry))
        # Errors of the request itself come at once.
        await asyncio.wait((task,), timeout=_EARLY_ERROR_S)
        if task.done():
            task.result()
        # From now on only the model's state shows the result, so the registration is kept.
        entry.undo = None
        return json_response(self._registry.describe(entry), 202)

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
        """`PUT /admin/aliases`: replace all aliases at once."""
        given = decode_object(await _body(request))
        given = given.get("aliases", given) if set(given) == {"aliases"} else given
        if not isinstance(given, dict):
            raise InvalidRequest("aliases: the value is not an object of names", "aliases")
        self._registry.set_aliases(parse_aliases(given))
        logger.info("the aliases are %s", self._registry.aliases)
        return await self.aliases(request)

    async def set_alias(self, request: Request) -> Response:
        """`PUT /admin/aliases/{name}`: a model's id, or an object of weights by id."""
        given = decode_json(await _body(request))
        name = request.path_params["name"]
        alias = parse_aliases({name: given})[name]
        self._registry.set_alias(name, alias.weights)
        logger.info("the alias %s leads to %s", name, alias.weights)
        return await self.aliases(request)

    async def remove_alias(self, request: Request) -> Response:
        """`DELETE /admin/aliases/{name}`."""
        name = request.path_params["name"]
        self._registry.remove_alias(name)
        logger.info("the alias %s is removed", name)
        return await self.aliases(request)


_OPERATIONS: dict[tuple[str, str], Operation] = {
    ("GET", "/admin/models"): Operation(
        "Models", "List models", "Each with its state, the progress of its load, its use and its memory."
    ),
    ("GET", "/admin/models/{id}"): Operation("Models", "Describe one model", "By its id, or an alias of one model."),
    ("POST", "/admin/models/load"): Operation(
        "Models",
        "Load a model",
        "A registered one, or a new one with `path` and settings of its `engine`. A new one is removed if its load "
        "fails. With `wait: false` the response is 202 and comes at once. If the load fails later, the model is "
        "`failed` and shows the reason until it is loaded or removed.",
        LoadBody,
        example={"model": "chat@v2", "path": "/models/next"},
        openai_errors=True,
    ),
    ("POST", "/admin/models/unload"): Operation(
        "Models",
        "Unload a model",
        "Running requests get up to `timeout` seconds, then the engine is closed. A later request loads the model "
        "again, unless `remove` is true or the server runs with `--no-autoload`.",
        UnloadBody,
        example={"model": "chat@v1"},
        openai_errors=True,
    ),
    ("POST", "/admin/models/swap"): Operation(
        "Models",
        "Replace a model by another",
        "Loads and tests the new model, then switches the name to it; until then nothing changes. The response lists "
        "the old models that are `unloading`, and those that are `kept` because other aliases lead to them.",
        SwapBody,
        example={"model": "chat", "to": "chat@v2", "path": "/models/next"},
        openai_errors=True,
    ),
    ("GET", "/admin/aliases"): Operation("Aliases", "List aliases", "Weights by model, by alias."),
    ("PUT", "/admin/aliases"): Operation(
        "Aliases",
        "Replace all aliases",
        "At once. Each leads to one model, or splits its requests among several by weight.",
        dict[str, str | dict[str, float]],
        example={"gpt": "chat@v1", "chat": {"chat@v1": 90, "chat@v2": 10}},
        openai_errors=True,
    ),
    ("PUT", "/admin/aliases/{name}"): Operation(
        "Aliases",
        "Set one alias",
        "To a model's id, or to weights by id.",
        str | dict[str, float],
        example={"chat@v1": 90, "chat@v2": 10},
        openai_errors=True,
    ),
    ("DELETE", "/admin/aliases/{name}"): Operation("Aliases", "Remove one alias", openai_errors=True),
    ("GET", "/openapi.json"): Operation("Server", "This document"),
}


def create_admin_app(state: ServerState, keys: AdminKeys, host: str = "127.0.0.1") -> ASGIApp:
    """The admin listener's application.

    Args:
        state: of the server.
        keys: required on every route.
        host: that it listens on.
    """
    admin = _Admin(state)

    def route(path: str, method: str, work: Callable[[Request], Awaitable[Response]]) -> Route:
        return Route(path, _answering(work, state), methods=[method])

    async def openapi(request: Request) -> Response:
        """`GET /openapi.json`: this document."""
        return json_response(
            document(routes, "", _OPERATIONS, "Octavo's admin routes", "Models and their names at run time.")
        )

    routes: list[BaseRoute] = [
        route("/admin/models", "GET", admin.models),
        route("/admin/models/load", "POST", admin.load),
        route("/admin/models/unload", "POST", admin.unload),
        route("/admin/models/swap", "POST", admin.swap),
        route("/admin/models/{id:path}", "GET", admin.model),
        route("/admin/aliases", "GET", admin.aliases),
        route("/admin/aliases", "PUT", admin.replace_aliases),
        route("/admin/aliases/{name:path}", "PUT", admin.set_alias),
        route("/admin/aliases/{name:path}", "DELETE", admin.remove_alias),
        route("/openapi.json", "GET", openapi),
    ]
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(HostCheck, allowed=allowed_hosts(state.settings.allowed_hosts, host, has_keys=True)),
            Middleware(ApiKeyCheck, keys=keys, scope="admin", open_paths=frozenset()),
        ],
        exception_handlers={HTTPException: http_exception},
    )
    return observed(app, state, routes)
