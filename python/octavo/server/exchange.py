"""One POST exchange: its body is read, its work runs while the client is there, every failure is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from octavo.errors import InvalidRequest
from octavo.server.errors import ServerStopping
from octavo.server.http import ClientGone, ErrorFormat, Receive, Reply, Scope, Send, header, read_body, request_id_of
from octavo.server.metrics import RequestRecord

if TYPE_CHECKING:
    from octavo.server.served import ServedModel
    from octavo.server.state import ServerState

__all__ = ["Call", "Exchange", "Process"]

Process = Callable[["Call"], Awaitable[None]]


class Call:
    """What a route's work is given.

    Attributes:
        state: the server's.
        scope: ASGI's, of this exchange.
        body: bytes, whole.
        reply: the answer, not begun.
        request_id: the client's where harmless, else a fresh one; in every answer's `X-Request-Id`.
    """

    __slots__ = ("body", "reply", "request_id", "scope", "state")

    def __init__(self, state: ServerState, scope: Scope, body: bytes, reply: Reply, request_id: str) -> None:
        self.state = state
        self.scope = scope
        self.body = body
        self.reply = reply
        self.request_id = request_id

    def header(self, name: bytes) -> str | None:
        """The first request header of a (lower case) name."""
        return header(self.scope, name)

    async def route(self, name: str | None) -> ServedModel:
        """The model that is to answer a request for `name`; the first one for None.

        Raises:
            EngineLoading, ModelNotServed, EngineDead.
        """
        return self.state.resolve(name)

    def record(self, served: ServedModel, prompt_tokens: int, num_prompts: int = 1) -> RequestRecord:
        """The request's times and counts, from now on."""
        return RequestRecord(self.state.metrics, served.name, prompt_tokens, num_prompts)


class Exchange:
    """A POST route: reads the body, runs the work while the client is there, answers every failure.

    Args:
        process: the work.
        errors: how its errors look; OpenAI's way when None.
        any_content_type: take a body that does not say it is JSON, except from a web page.
    """

    def __init__(
        self,
        state: ServerState,
        process: Process,
        errors: ErrorFormat | None = None,
        *,
        any_content_type: bool = False,
    ) -> None:
        self._state = state
        self._process = process
        self._errors = errors
        self._any_content_type = any_content_type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request_id = request_id_of(scope)
        reply = Reply(send, request_id, self._errors)
        state = self._state
        try:
            body = await self._body(scope, receive)
        except ClientGone:
            return
        except InvalidRequest as error:
            await reply.fail(error)
        else:
            if not await state.run(self._work(Call(state, scope, body, reply, request_id)), receive):
                state.metrics.client_disconnects.inc()
        state.metrics.http_requests.labels(scope["path"], str(reply.status or 499)).inc()

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        kind = header(scope, b"content-type")
        body = await read_body(scope, receive, self._state.settings.max_body_bytes)
        if self._any_content_type and header(scope, b"origin") is None:
            return body
        if kind is not None and kind.split(";")[0].strip().lower() not in ("application/json", ""):
            raise InvalidRequest(f"Content-Type: {kind[:60]!r} is not supported; send application/json")
        return body

    async def _work(self, call: Call) -> None:
        reply = call.reply
        try:
            await self._process(call)
        except asyncio.CancelledError:
            if not self._state.stopping:
                raise
            await reply.fail(ServerStopping("The server is shutting down; this answer was cut short."))
        except Exception as error:
            await reply.fail(error)
