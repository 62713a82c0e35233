"""The HTTP server. Knows no torch.

`ServerState` holds what is served, `create_app` makes the ASGI application over it, `octavo.server.lifecycle.serve`
runs it on a bound socket.
"""

from __future__ import annotations

from octavo.server.app import ServerState, create_app

__all__ = ["ServerState", "create_app"]
