"""A server of several fake models on real sockets, with its admin listener."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from typing import Any

import httpx
import uvloop
from octavo.config import EngineConfig
from octavo.server.access.api_keys import KeyRing
from octavo.server.admin.routes import AdminKeys, create_admin_app
from octavo.server.lifecycle import Events, serve
from octavo.server.settings import ServerSettings
from octavo.server.state import ServerState
from octavo.server.transport.listen import bind
from registry_fakes import Engines

ADMIN_KEY = "the-key-of-the-admin"


class Routed:
    """A server in a thread with a loop of its own.

    Args:
        models: `id` or `id=text` each; see `Engines` for the text. Those behind a `~` are not loaded at the start.
        start_engine: fakes when None.
        keys: the server's.
        settings: of the server.
    """

    def __init__(
        self, *models: str, start_engine: Any = None, keys: KeyRing | None = None, ready: bool = True, **settings: Any
    ) -> None:
        self.engines = Engines()
        self.http = httpx.Client(timeout=20)
        self.state = ServerState(ServerSettings(**settings), start_engine or self.engines, keys=keys)
        self.registry = self.state.registry
        for model in models:
            id, _, text = model.lstrip("~").partition("=")
            self.registry.register(id, EngineConfig(model=text or id), at_start=not model.startswith("~"))
        listener, admin = bind("127.0.0.1", 0), bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.admin_url = f"http://127.0.0.1:{admin.getsockname()[1]}"
        self._ready = threading.Event()
        self.loop = uvloop.new_event_loop()

        async def main() -> None:
            self._task = asyncio.current_task()
            await serve(
                listener,
                grace=0.2,
                events=Events(ready=lambda served: self._ready.set()),
                state=self.state,
                signals=False,
                admin=(admin, create_admin_app(self.state, AdminKeys(ADMIN_KEY, self.state.keys))),
            )

        def run() -> None:
            try:
                self.loop.run_until_complete(main())
            except asyncio.CancelledError:
                pass
            finally:
                self.loop.close()

        self._thread = threading.Thread(target=run)
        self._thread.start()
        if ready:
            assert self._ready.wait(20)

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run something in the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    def ask(self, model: str | None, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        """One short completion."""
        body = {"prompt": "Hi", "max_tokens": 2, **fields} | ({} if model is None else {"model": model})
        return self.http.post(f"{self.url}/v1/completions", json=body, headers=headers)

    def admin(self, method: str, path: str, body: Any = None, key: str | None = ADMIN_KEY) -> httpx.Response:
        """One admin request."""
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return self.http.request(method, f"{self.admin_url}/admin/{path}", json=body, headers=headers)

    def get(self, path: str) -> httpx.Response:
        """Read something."""
        return self.http.get(f"{self.url}/{path}")

    def stop(self) -> None:
        self.http.close()
        assert self._task is not None
        self.loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(20)
        assert not self._thread.is_alive()


def versions(answers: Sequence[httpx.Response]) -> set[str]:
    """The models that gave some answers."""
    return {answer.headers["x-model-version"] for answer in answers}
