"""What stands before every route of an application: the Host check, other origins, the gate that keys open."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.middleware import Middleware

from octavo.server.access.api_keys import OPEN_PATHS, Gate
from octavo.server.access.hosts import HostCheck, allowed_hosts, cross_origin

if TYPE_CHECKING:
    from octavo.server.state import ServerState

__all__ = ["guard"]


def guard(state: ServerState, scope: str = "inference") -> list[Middleware]:
    """An application's middleware, all of it plain ASGI: nothing buffers a stream or hides that a client left.

    Args:
        state: the server's.
        scope: what a key must open here. An application of another scope than `inference` answers no other origins
            and has no open paths but the probes'.

    Raises:
        ConfigError: settings that cannot work.
    """
    settings, keys = state.settings, state.keys
    public = scope == "inference"
    origins = cross_origin(
        settings.allowed_origins,
        settings.allowed_methods,
        settings.allowed_headers,
        credentials=settings.allow_credentials,
    )
    return [
        Middleware(HostCheck, allowed=allowed_hosts(settings.allowed_hosts, settings.host, has_keys=keys.required)),
        *(origins if public else ()),
        Middleware(
            Gate, keys=keys, scope=scope, open_metrics=public and settings.metrics_public, open_paths=OPEN_PATHS
        ),
    ]
