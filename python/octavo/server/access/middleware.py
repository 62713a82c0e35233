"""Middleware in front of the routes: Host check, origin check, API key check."""

from __future__ import annotations

from collections.abc import Sequence

from starlette._utils import get_route_path
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from octavo.errors import OctavoError
from octavo.server.access.api_keys import KeyRing
from octavo.server.access.hosts import AUTHORITY, allowed_hosts, check_origins, is_address
from octavo.server.access.identity import IDENTITY, Identity
from octavo.server.error_responses import Forbidden, HostNotAllowed, MalformedRequest, Unauthorized
from octavo.server.observability.request_telemetry import telemetry_of
from octavo.server.settings import ServerSettings
from octavo.server.transport.http import Receive, Scope, Send, refuse

__all__ = ["OPEN_PATHS", "ApiKeyCheck", "HostCheck", "access_middleware"]

OPEN_PATHS = frozenset(("/health", "/livez", "/readyz", "/ping"))
"""Paths that need no key. Probes send none, and these only say whether the server is up."""


class HostCheck:
    """Refuses requests with a Host header that names another server. ASGI middleware.

    Args:
        app: the application behind it.
        allowed: from `allowed_hosts`.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        self._app = app
        self._any = "*" in allowed
        self._names = frozenset(name for name in allowed if not name.startswith("*")) | {"localhost"}
        self._endings = (".localhost", *(name[1:] for name in allowed if name.startswith("*.")))
        # Clients send the same few names again and again.
        self._known: dict[bytes, bool] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "http":
            hosts = [value for name, value in scope["headers"] if name == b"host"]
            if len(hosts) > 1 or (not hosts and scope["http_version"] != "1.0"):
                await refuse(scope, send, MalformedRequest("The request must have exactly one Host header"))
                return
            if hosts and not self._is_allowed(hosts[0]):
                shown = hosts[0][:100].decode("ascii", "replace")
                error = HostNotAllowed(f"The host {shown!a} is not allowed; add it to the server's --allowed-hosts")
                await refuse(scope, send, error)
                return
        await self._app(scope, receive, send)

    def _is_allowed(self, host: bytes) -> bool:
        known = self._known.get(host)
        if known is None:
            known = self._matches(host.decode("latin-1"))
            if len(self._known) < 1000 and len(host) < 300:
                self._known[host] = known
        return known

    def _matches(self, host: str) -> bool:
        found = AUTHORITY.fullmatch(host)
        if not found:
            return False
        if self._any:
            return True
        name = found.group(1).lower().rstrip(".")
        return is_address(name) or name in self._names or name.endswith(self._endings)


class ApiKeyCheck:
    """Passes a request on only with a key of the right scope. ASGI middleware in front of the router.

    All paths need a key unless they are listed as open, so a route added later is protected too.

    Args:
        app: the application behind it.
        keys: the valid keys. If there are none, every client is anonymous and allowed.
        scope: that a key must have.
        open_metrics: `/metrics` needs no key.
        open_paths: paths that need no key.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: KeyRing,
        *,
        scope: str = "inference",
        open_metrics: bool = False,
        open_paths: frozenset[str] = OPEN_PATHS,
    ) -> None:
        self._app = app
        self._keys = keys
        self._scope = scope
        self._open = open_paths | {"/metrics"} if open_metrics else open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "lifespan" or (scope["type"] == "http" and not self._keys.required):
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        # The router's function: the path checked here must be the path that answers.
        path = get_route_path(scope)
        identity = self._keys.find(_presented_keys(scope))
        if identity is not None:
            scope[IDENTITY] = identity
            telemetry_of(scope).key_name = identity.name
        error = None if path in self._open else self._check(identity, path)
        if error is None:
            await self._app(scope, receive, send)
        else:
            await refuse(scope, send, error)

    def _check(self, identity: Identity | None, path: str) -> OctavoError | None:
        if identity is None:
            return Unauthorized(
                "A valid API key is required: send it as `Authorization: Bearer KEY` or as `X-Api-Key: KEY`"
            )
        if self._scope in identity.scopes or (path == "/metrics" and "metrics" in identity.scopes):
            return None
        return Forbidden(f"This API key does not have the scope `{self._scope}`")


def _presented_keys(scope: Scope) -> list[bytes]:
    keys: list[bytes] = []
    for name, value in scope["headers"]:
        if name == b"x-api-key":
            keys.append(value.strip())
        elif name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            if scheme.lower() == b"bearer" and key:
                keys.append(key.strip())
    return keys[:2]


def access_middleware(settings: ServerSettings, keys: KeyRing) -> list[Middleware]:
    """The middleware of the public application. All of it is plain ASGI: it buffers no stream.

    Raises:
        ConfigError: settings that do not fit together.
    """
    checks = [
        Middleware(HostCheck, allowed=allowed_hosts(settings.allowed_hosts, settings.host, has_keys=keys.required))
    ]
    if settings.allowed_origins:
        check_origins(settings)
        checks.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(settings.allowed_origins),
                allow_methods=list(settings.allowed_methods),
                allow_headers=list(settings.allowed_headers),
                allow_credentials=settings.allow_credentials,
                expose_headers=["X-Request-Id", "Retry-After", "X-Model-Version"],
            )
        )
    checks.append(Middleware(ApiKeyCheck, keys=keys, open_metrics=settings.metrics_public))
    return checks
