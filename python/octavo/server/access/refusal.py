"""How a request is turned away before any route sees it."""

from __future__ import annotations

from octavo.server.error_responses import describe
from octavo.server.observability.request_context import context_of
from octavo.server.transport.http import Reply, Scope, Send

__all__ = ["refuse"]


async def refuse(scope: Scope, send: Send, error: BaseException) -> None:
    """Answer with an error; the request's body is not read."""
    context = context_of(scope)
    status, payload, headers = describe(error)
    context.error_code = payload["error"]["code"]
    await Reply(send, context.headers).json(payload, status, headers)
