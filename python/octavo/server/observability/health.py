"""What probes ask: `/livez`, `/readyz`, `/health`, `/ping`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from octavo.errors import OctavoError
from octavo.server.apis.openai.models_route import json_response
from octavo.server.error_responses import ServerStopping, describe
from octavo.server.models.entry import ModelState
from octavo.server.state import ServerState

__all__ = ["routes"]


class _Health:
    """The probes' routes."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def _trouble(self) -> OctavoError | None:
        """What keeps the server from answering requests for any of its models."""
        state = self._state
        if state.draining:
            return ServerStopping("The server is shutting down.")
        try:
            state.check_ready()
        except OctavoError as error:
            return error
        for entry in state.registry.entries:
            if entry.state is ModelState.READY and (trouble := entry.trouble()) is not None:
                return trouble
        return None

    async def livez(self, request: Request) -> Response:
        """`GET /livez`: 503 when nothing but a new process helps: an engine has ended for good."""
        lost = [entry.id for entry in self._state.registry.entries if entry.lost()]
        if lost:
            return json_response({"status": "dead", "models": lost}, 503)
        return json_response({"status": "ok"})

    async def readyz(self, request: Request) -> Response:
        """`GET /readyz`: 200 when every loaded model answers; else 503 with the reason, and the progress of a load."""
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
        """`/health` and `/ping`: as `/readyz`, with an empty body or an error object, as vLLM's clients know it."""
        trouble = self._trouble()
        if trouble is None:
            return Response(b"", 200)
        status, payload, headers = describe(trouble)
        return json_response(payload, status, headers)


def routes(state: ServerState) -> list[BaseRoute]:
    """All of them."""
    health = _Health(state)
    return [
        Route("/livez", health.livez),
        Route("/readyz", health.readyz),
        Route("/health", health.health),
        Route("/ping", health.health, methods=["GET", "POST"]),
    ]
