"""Runs the server: from a bound port to loaded models, and to a graceful shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from typing import Any, NamedTuple, Protocol

import uvicorn

from octavo.server.access.api_keys import KeyRing
from octavo.server.app import create_app
from octavo.server.models.model_handle import ClosableEngine, ModelHandle
from octavo.server.state import ServerState
from octavo.server.transport.http_protocol import HttpProtocol
from octavo.server.transport.listen import BACKLOG, allow_many_files
from octavo.server.transport.tls import tls_context, watch_certificate

__all__ = ["Events", "Processes", "Server", "serve"]

_GRACEFUL_SHUTDOWN_S = 5
_KEEP_ALIVE_S = 75
_LOG = logging.getLogger("octavo.server")


class Processes(Protocol):
    """Other processes of the same server.

    Attributes:
        finished: requests of ended processes that were completed after the signal.
        aborted: requests of ended processes that were cut short.
    """

    finished: int
    aborted: int

    async def running(self) -> int:
        """Requests that all processes answer, including this one's."""
        ...

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all of them."""
        ...

    async def close(self) -> None:
        """End all of them."""
        ...


class Events(NamedTuple):
    """Callbacks for the events of a server's life.

    Attributes:
        ready: all models are loaded. Gets the models.
        stop: a signal asks for the shutdown. Gets the signal, the number of running requests, and the seconds for which
            requests are still accepted.
        wait: the shutdown waits for running requests. Gets their number.
        end: everything is closed after a signal. Gets the number of requests that were completed since, the number of
            those that were cut short, and the seconds since.
    """

    ready: Callable[[list[ModelHandle]], None] | None = None
    stop: Callable[[signal.Signals, int, float], None] | None = None
    wait: Callable[[int], None] | None = None
    end: Callable[[int, int, float], None] | None = None


_NO_EVENTS = Events()


class Server(uvicorn.Server):
    """uvicorn's server without its signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Do not handle signals."""
        yield


async def serve(
    listener: socket.socket,
    starting: Awaitable[ClosableEngine] | None = None,
    *,
    names: Sequence[str] = (),
    grace: float = 5.0,
    drain_delay: float = 0.0,
    log_level: str = "warning",
    events: Events = _NO_EVENTS,
    state: ServerState | None = None,
    signals: bool = True,
    admin: tuple[socket.socket, Any] | None = None,
    processes: Processes | None = None,
    early: Sequence[signal.Signals] = (),
) -> None:
    """Answer on `listener` at once (503 while models load), load the models, and serve until a signal.

    After SIGTERM, `/readyz` answers 503 at once. Requests are accepted for `drain_delay` more seconds, then refused
    with 503. Running requests get `grace` more seconds, then end with an error event.

    Args:
        listener: from `bind`; closed at the end.
        starting: gives a loaded engine; closed at the end. None to load the registry's models.
        names: names of the model of `starting`.
        grace: seconds.
        drain_delay: seconds.
        log_level: of uvicorn.
        events: callbacks.
        state: of the server; a new one if None.
        signals: handle signals (main thread only); else cancel the task to stop.
        admin: a second listener and its application.
        processes: others that use this one's engines. They get its signals and end before the engines do.
        early: signals that were received before; they count as if received now.

    Raises:
        OctavoError: a model could not be loaded.
    """
    allow_many_files()
    state = state or ServerState()
    tls = tls_context(state.settings)
    servers = [(_server(create_app(state), log_level, tls, state.settings.root_path), listener)]
    servers += [] if admin is None else [(_server(admin[1], log_level, tls), admin[0])]
    serving, *others = (asyncio.ensure_future(server.serve(sockets=[own])) for server, own in servers)
    loading = asyncio.ensure_future(_load(state, starting, names))
    watching = asyncio.gather(state.keys.watch(), watch_certificate([] if tls is None else [tls], state.settings))
    life = _Lifecycle(state, processes, loading, events)
    if signals:
        life.handle_signals(drain_delay, early)
    try:
        await life.run(serving)
    finally:
        aborted = await life.drain(serving, grace)
        for server, _ in servers:
            server.should_exit = True
        watching.cancel()
        await asyncio.gather(serving, *others, loading, watching, return_exceptions=True)
        await life.close(aborted)


class _Lifecycle:
    """Signals, the drain of running requests, and the callbacks.

    SIGINT skips the delay of SIGTERM. A second signal ends everything at once. Signals count before a model is loaded
    too. SIGHUP reloads the API keys; if standard error is a terminal, it means that the terminal was closed and counts
    as SIGINT. If SIGHUP is ignored (`nohup`), it stays ignored.
    """

    def __init__(
        self,
        state: ServerState,
        processes: Processes | None,
        loading: asyncio.Future[None],
        events: Events,
    ) -> None:
        self._state = state
        self._processes = processes
        self._loading = loading
        self._events = events
        self._requested = asyncio.Event()
        self._forced = asyncio.Event()
        self._delay = 0.0
        # The first signal, its time, and the number of requests that had ended by then.
        self._first: tuple[signal.Signals, float, int] | None = None
        self._handled: list[signal.Signals] = []

    def handle_signals(self, drain_delay: float, early: Sequence[signal.Signals]) -> None:
        """Install the handlers of all signals, and take the early ones."""
        loop = asyncio.get_running_loop()
        delays = {signal.SIGINT: 0.0, signal.SIGTERM: drain_delay}
        for number, delay in delays.items():
            loop.add_signal_handler(number, self._receive, number, delay)
        self._handled += delays
        for number in early:
            self._receive(number, delays[number])
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
            self._handled.append(signal.SIGHUP)
            if sys.stderr.isatty():
                loop.add_signal_handler(signal.SIGHUP, self._receive, signal.SIGHUP, 0.0)
            else:
                keys = self._state.keys
                loop.add_signal_handler(signal.SIGHUP, lambda: loop.run_in_executor(None, _reload_keys, keys))

    def _receive(self, number: signal.Signals, delay: float) -> None:
        if self._loading.done():
            self._delay = delay
        if self._first is None:
            self._first = number, time.monotonic(), self._state.num_ended
        if self._processes is not None:
            self._processes.signal(number)
        (self._forced if self._requested.is_set() else self._requested).set()

    async def run(self, serving: asyncio.Future[None]) -> None:
        """Return once a signal asks for the shutdown or the server ends.

        Raises:
            OctavoError: a model could not be loaded.
        """
        stopped = asyncio.ensure_future(self._requested.wait())
        try:
            await asyncio.wait((serving, self._loading, stopped), return_when=asyncio.FIRST_COMPLETED)
            if self._loading.done():
                self._loading.result()
                if self._events.ready is not None:
                    self._events.ready(self._state.models)
                await asyncio.wait((serving, stopped), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()

    async def _running(self) -> int:
        return self._state.num_running if self._processes is None else await self._processes.running()

    async def drain(self, serving: asyncio.Future[None], grace: float) -> int:
        """Let running requests end, then abort the others.

        Returns:
            The number of aborted requests.
        """
        state = self._state
        if not self._loading.done():
            self._loading.cancel()
            self._delay = 0.0
        state.draining = True
        if self._events.stop is not None and self._first is not None:
            self._events.stop(self._first[0], await self._running(), self._delay)
        await _wait_any(self._delay, serving, self._forced.wait())
        state.refuse()
        if self._events.wait is not None and grace > 0 and (count := await self._running()):
            self._events.wait(count)
        await _wait_any(grace, serving, self._forced.wait(), state.quiet())
        aborted = state.num_running
        state.abort_all()
        return aborted

    async def close(self, aborted: int) -> None:
        """Close the other processes and the engines, and report the end."""
        if self._processes is not None:
            await self._processes.close()
        await self._state.registry.close()
        if self._events.end is not None and self._first is not None:
            finished = self._state.num_ended - self._first[2] - aborted
            if self._processes is not None:
                finished, aborted = finished + self._processes.finished, aborted + self._processes.aborted
            self._events.end(finished, aborted, time.monotonic() - self._first[1])
        for number in self._handled:
            asyncio.get_running_loop().remove_signal_handler(number)


def _reload_keys(keys: KeyRing) -> None:
    if not keys.reload():
        _LOG.info("SIGHUP: the API keys have not changed")


def _server(app: Any, log_level: str, tls: ssl.SSLContext | None, root_path: str = "") -> Server:
    config = uvicorn.Config(
        app,
        http=HttpProtocol,
        loop="none",
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        log_level=log_level,
        backlog=BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GRACEFUL_SHUTDOWN_S,
        root_path=root_path,
    )
    config.load()
    config.ssl = tls
    return Server(config)


async def _load(state: ServerState, starting: Awaitable[ClosableEngine] | None, names: Sequence[str]) -> None:
    if starting is None:
        await state.registry.start()
    else:
        state.registry.adopt(await starting, names)


async def _wait_any(seconds: float, serving: asyncio.Future[None], *others: Coroutine[Any, Any, Any]) -> None:
    """Wait until the server ends, one of the others ends, or the time is over."""
    tasks = [asyncio.ensure_future(other) for other in others]
    await asyncio.wait((serving, *tasks), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
