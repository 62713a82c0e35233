"""The ASGI application: routes, and what every exchange has in common."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo._core import __version__
from octavo.errors import EngineDead, InvalidRequest, ModelNotServed
from octavo.server.chat import chat_completions
from octavo.server.completions import completions
from octavo.server.errors import EngineLoading, ServerStopping, describe
from octavo.server.http import ClientGone, Receive, Reply, Scope, Send, header, read_body, request_id_of, wait_gone
from octavo.server.metrics import Metrics
from octavo.server.served import Engine, ServedModel

__all__ = ["MAX_BODY_BYTES", "ServerState", "create_app"]

MAX_BODY_BYTES = 8 << 20

Process = Callable[["ServerState", bytes, Reply, str], Awaitable[None]]


class ServerState:
    """What all exchanges of one server share.

    Attributes:
        metrics: of this server.
        max_body_bytes: of a request.
    """

    def __init__(self, *, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self.metrics = Metrics(__version__)
        self.max_body_bytes = max_body_bytes
        self._models: list[ServedModel] = []
        self._by_name: dict[str, ServedModel] = {}
        self._running: set[asyncio.Future[None]] = set()
        self._stopping = False

    def add(self, engine: Engine, names: Sequence[str] = ()) -> ServedModel:
        """Serve an engine under `names`, or its model's own name."""
        served = ServedModel(engine, names)
        self._models.append(served)
        for name in served.names:
            self._by_name[name] = served
        return served

    @property
    def models(self) -> list[ServedModel]:
        """What is served, in the order it came."""
        return list(self._models)

    def resolve(self, name: str | None) -> ServedModel:
        """The model a request names; the first one when it names none.

        Raises:
            EngineLoading: nothing is served yet.
            ModelNotServed: no model of that name.
            EngineDead: its engine has ended.
        """
        self.check_ready()
        served = self._models[0] if name is None else self._by_name.get(name)
        if served is None:
            served_names = ", ".join(f"`{known}`" for known in self._by_name)
            raise ModelNotServed(
                f"The model `{str(name)[:200]}` does not exist; this server has {served_names}.", "model"
            )
        served.engine.check_health()
        return served

    def check_ready(self) -> None:
        """Raise what keeps the whole server from answering.

        Raises:
            ServerStopping, EngineLoading.
        """
        if self._stopping:
            raise ServerStopping("The server is shutting down.")
        if not self._models:
            raise EngineLoading("The model is still loading; try again in a moment.")

    @property
    def num_running(self) -> int:
        """Exchanges that are being answered."""
        return len(self._running)

    @property
    def stopping(self) -> bool:
        """Whether `abort_all` was called."""
        return self._stopping

    def abort_all(self) -> None:
        """End every running exchange with an error; new ones are refused."""
        self._stopping = True
        for task in list(self._running):
            task.cancel()

    async def run(self, work: Awaitable[None], receive: Receive) -> bool:
        """Run an exchange while its client is there.

        Returns:
            False when the client left first and the work was cancelled.
        """
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(wait_gone(receive))
        self._running.add(task)
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            stayed = task.done()
        finally:
            self._running.discard(task)
            if not task.done():
                task.cancel()
            gone.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)
        return stayed


class _Exchange:
    """A POST route: reads the body, runs the work while the client is there, answers every failure."""

    def __init__(self, state: ServerState, process: Process) -> None:
        self._state = state
        self._process = process

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = request_id_of(scope)
        reply = Reply(send, request_id)
        state = self._state
        try:
            body = await self._body(scope, receive)
        except ClientGone:
            return
        except InvalidRequest as error:
            await reply.fail(error)
        else:
            if not await state.run(self._work(body, reply, request_id), receive):
                state.metrics.client_disconnects.inc()
        state.metrics.http_requests.labels(scope["path"], str(reply.status or 499)).inc()

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        kind = header(scope, b"content-type")
        body = await read_body(scope, receive, self._state.max_body_bytes)
        if kind is not None and kind.split(";")[0].strip().lower() not in ("application/json", ""):
            raise InvalidRequest(f"Content-Type: {kind[:60]!r} is not supported; send application/json")
        return body

    async def _work(self, body: bytes, reply: Reply, request_id: str) -> None:
        try:
            await self._process(self._state, body, reply, request_id)
        except asyncio.CancelledError:
            if not self._state.stopping:
                raise
            await reply.fail(ServerStopping("The server is shutting down; this answer was cut short."))
        except Exception as error:
            await reply.fail(error)


def _failure(error: BaseException) -> Response:
    status, payload, headers = describe(error)
    return _json(payload, status, headers)


def _json(payload: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
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
        return _json({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/{name}`; a name may hold slashes."""
        name = request.path_params["name"]
        try:
            return _json(_model_object(self._state.resolve(name), name))
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
        return _json({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        """`GET /metrics`, for Prometheus."""
        stats = {}
        for served in self._state.models:
            try:
                stats[served.name] = await asyncio.wait_for(served.engine.stats(), 5)
            except (EngineDead, asyncio.TimeoutError):
                continue
        return Response(self._state.metrics.expose(stats), 200, None, "text/plain; version=0.0.4; charset=utf-8")


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    texts = {
        404: f"There is nothing at {request.url.path}.",
        405: f"The method {request.method} is not allowed at {request.url.path}.",
    }
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    body = {
        "message": texts.get(error.status_code, str(error.detail)),
        "type": "invalid_request_error",
        "param": None,
        "code": code,
    }
    return _json({"error": body}, error.status_code, dict(error.headers or {}))


def create_app(state: ServerState) -> Starlette:
    """The application over `state`; models may be added to it before and while it serves."""
    reads = _Reads(state)
    routes = [
        Route("/v1/chat/completions", _Exchange(state, chat_completions), methods=["POST"]),
        Route("/v1/completions", _Exchange(state, completions), methods=["POST"]),
        Route("/v1/models", reads.models),
        Route("/v1/models/{name:path}", reads.model),
        Route("/health", reads.health),
        Route("/version", reads.version),
        Route("/metrics", reads.metrics),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _http_exception})
