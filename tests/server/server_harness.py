"""A server on a real socket, for tests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import uvloop
from octavo.server.app import create_app
from octavo.server.lifecycle import Events, serve
from octavo.server.state import ServerState
from octavo.server.transport.listen import bind
from starlette.applications import Starlette


class Running:
    """A server on a socket of 127.0.0.1, in a thread with a loop of its own.

    Args:
        engine: what answers; `starting` gives another in the server's own loop.
    """

    def __init__(
        self, engine: Any, state: ServerState, *, starting: Callable[[], Awaitable[Any]] | None = None
    ) -> None:
        self.engine = engine
        self.state = state
        listener = bind("127.0.0.1", 0)
        self.port: int = listener.getsockname()[1]
        self._ready = threading.Event()
        self.loop = uvloop.new_event_loop()

        async def start() -> Any:
            if starting is not None:
                self.engine = await starting()
            return self.engine

        async def main() -> None:
            self._task = asyncio.current_task()
            await serve(
                listener,
                start(),
                names=("fake", "org/alias"),
                grace=0.2,
                events=Events(ready=lambda served: self._ready.set()),
                state=state,
                signals=False,
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
        assert self._ready.wait(30)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=20)

    def stop(self) -> None:
        assert self._task is not None
        self.loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(10)
        assert not self._thread.is_alive()


def application(state: ServerState) -> Starlette:
    """The router beneath whatever stands before it."""
    app: Any = create_app(state)
    while not isinstance(app, Starlette):
        app = app.app
    return app
