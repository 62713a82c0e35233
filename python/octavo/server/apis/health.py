"""Health probes: `/livez`, `/readyz`, `/health`, `/ping`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from octavo.errors import OctavoError
from octavo.server.error_responses import ServerStopping, describe
from octavo.server.models.registry_entry import ModelState
from octavo.server.state import ServerState
from octavo.server.transport.http import json_response

__all__ = ["routes"]


class _Health:
    def __init__(self, state: ServerState) -> None:
        self._state = state

    def _trouble(self) -> OctavoError | None:
        """The reason why the server cannot answer requests for all of its loaded models."""
        state = self._state
        if state.draining:
            return ServerStopping("The server is shutting down")
        try:
            state.check_ready()
        except OctavoError as error:
            return error
        for entry in state.registry.entries:
            if entry.state is ModelState.READY and (trouble := entry.trouble()) is not None:
                return trouble
        return None

    async def livez(self, request: Request) -> Response:
        """`GET /livez`: 503 if only a restart of the server helps, because an engine has ended for good."""
        lost = [entry.id for entry in self._state.registry.entries if entry.lost()]
        if lost:
            return json_response({"status": "dead", "models": lost}, 503)
        return json_response({"status": "ok"})

    async def readyz(self, request: Request) -> Response:
        """`GET /readyz`: 200 if every loaded model answers; else 503 with the reason and the progress of loads."""
        state, registry = self._state, self._state.registry
        if state.draining:
            siblings = state.siblings
            running = state.num_running if siblings is None else await siblings.running()
            return json_response({"status": "draining", "running": running}, 503)
        if not registry.started:
            models = {entry.id: entry.state.value for entry in registry.entries}
            return json_response({"status": "loading", "progress": registry.progress(), "models": models}, 503)
        down = [entry for entry in registry.entries if entry.state is ModelState.READY and not entry.healthy()]
        if down:
            reasons = {entry.id: str(entry.trouble()) for entry in down}
            return json_response({"status": "unavailable", "models": reasons}, 503)
        return json_response({"status": "ready"})

    async def health(self, request: Request) -> Response:
        """`/health` and `/ping`: like `/readyz`, with an empty body or an error object, as vLLM's clients expect."""
        trouble = self._trouble()
        if trouble is None:
            return Response(b"", 200)
        status, payload, headers = describe(trouble)
        return json_response(payload, status, headers)


def routes(state: ServerState) -> list[BaseRoute]:
    """The probes."""
    health = _Health(state)
    return [
        Route("/livez", health.livez),
        Route("/readyz", health.readyz),
        Route("/health", health.health),
        Route("/ping", health.health, methods=["GET", "POST"]),
    ]
