"""From a bound port to a served model, and to a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Protocol

import uvicorn

from octavo.server.app import create_app
from octavo.server.connection import ClientConnection
from octavo.server.listen import BACKLOG
from octavo.server.served import Engine, ServedModel
from octavo.server.state import ServerState

__all__ = ["ClosableEngine", "Server", "serve"]


class ClosableEngine(Engine, Protocol):
    """An engine that is ended with the server."""

    async def close(self) -> None:
        """End it."""
        ...


class Server(uvicorn.Server):
    """uvicorn's server, with signals handled by whoever runs it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave the signals alone."""
        yield


async def serve(
    listener: socket.socket,
    starting: Awaitable[ClosableEngine],
    *,
    names: Sequence[str] = (),
    grace: float = 5.0,
    log_level: str = "warning",
    on_ready: Callable[[ServedModel], None] | None = None,
    on_wait: Callable[[int], None] | None = None,
    state: ServerState | None = None,
    signals: bool = True,
) -> None:
    """Answer on `listener` at once (503 while the model loads), load the model, serve until a signal.

    SIGINT or SIGTERM stops accepting, lets running answers finish for `grace` seconds, then ends them with an error
    event; a second signal ends them at once.

    Args:
        listener: from `bind`; closed at the end.
        starting: gives the engine once its model is loaded; closed at the end.
        names: the model answers to.
        grace: seconds.
        log_level: of uvicorn.
        on_ready: called when the model is served.
        on_wait: called when the end waits for running answers, with their number.
        state: to serve from; a fresh one when None.
        signals: handle SIGINT and SIGTERM (the main thread only); else cancel the task to stop.

    Raises:
        OctavoError: the model could not be loaded.
    """
    state = state or ServerState()
    config = uvicorn.Config(
        create_app(state),
        http=ClientConnection,
        loop="none",
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        log_level=log_level,
        backlog=BACKLOG,
        timeout_graceful_shutdown=round(grace) + 2,
    )
    server = Server(config)
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    force = asyncio.Event()

    def on_signal() -> None:
        (force if stop.is_set() else stop).set()

    handled = (signal.SIGINT, signal.SIGTERM) if signals else ()
    for number in handled:
        loop.add_signal_handler(number, on_signal)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    loading = asyncio.ensure_future(starting)
    stopped = asyncio.ensure_future(stop.wait())
    engine: ClosableEngine | None = None
    try:
        await asyncio.wait((serving, loading, stopped), return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            engine = loading.result()
            served = state.add(engine, names)
            if on_ready is not None:
                on_ready(served)
            await asyncio.wait((serving, stopped), return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not loading.done():
            loading.cancel()
        server.should_exit = True
        if on_wait is not None and grace > 0 and state.num_running:
            on_wait(state.num_running)
        await _drain(serving, state, force, grace)
        stopped.cancel()
        await asyncio.gather(serving, loading, stopped, return_exceptions=True)
        if engine is not None:
            await engine.close()
        for number in handled:
            loop.remove_signal_handler(number)


async def _drain(serving: asyncio.Future[None], state: ServerState, force: asyncio.Event, grace: float) -> None:
    forced = asyncio.ensure_future(force.wait())
    await asyncio.wait((serving, forced), timeout=grace, return_when=asyncio.FIRST_COMPLETED)
    forced.cancel()
    if not serving.done():
        state.abort_all()
