"""From a bound port to a served model, and to a clean end."""

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
from typing import Any, Protocol

import uvicorn

from octavo.server.access.api_keys import KeyRing
from octavo.server.app import create_app
from octavo.server.models.model_handle import ClosableEngine, ModelHandle
from octavo.server.state import ServerState
from octavo.server.transport.http_protocol import HttpProtocol
from octavo.server.transport.listen import BACKLOG, allow_many_files
from octavo.server.transport.tls import tls_context, watch_certificate

__all__ = ["Processes", "Server", "serve"]

_LAST_WORDS_S = 5
_KEEP_ALIVE_S = 75
_LOG = logging.getLogger("octavo.server")


class Processes(Protocol):
    """More processes of the same server.

    Attributes:
        finished: answers of those that have ended which came to their end after the signal.
        aborted: answers of the same that were cut short.
    """

    finished: int
    aborted: int

    async def running(self) -> int:
        """Exchanges that all processes answer, this one's too."""
        ...

    def signal(self, number: signal.Signals) -> None:
        """Pass a signal on."""
        ...

    async def close(self) -> None:
        """End them."""
        ...


class Server(uvicorn.Server):
    """uvicorn's server, with signals handled by whoever runs it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave the signals alone."""
        yield


async def serve(
    listener: socket.socket,
    starting: Awaitable[ClosableEngine] | None = None,
    *,
    names: Sequence[str] = (),
    grace: float = 5.0,
    drain_delay: float = 0.0,
    log_level: str = "warning",
    on_ready: Callable[[list[ModelHandle]], None] | None = None,
    on_stop: Callable[[signal.Signals, int, float], None] | None = None,
    on_wait: Callable[[int], None] | None = None,
    on_end: Callable[[int, int, float], None] | None = None,
    state: ServerState | None = None,
    signals: bool = True,
    admin: tuple[socket.socket, Any] | None = None,
    processes: Processes | None = None,
    early: Sequence[signal.Signals] = (),
) -> None:
    """Answer on `listener` at once (503 while models load), load the models, serve until a signal.

    SIGTERM makes `/readyz` answer 503 at once; after `drain_delay` seconds, in which balancers notice, new requests are
    refused with 503; running answers get `grace` seconds more and then end with an error event. SIGINT leaves
    the delay out. A second signal ends everything at once. Signals count from before a model is loaded. SIGHUP has
    the API keys read again; with a terminal it means that this was closed, and counts as SIGINT; where it is ignored
    (`nohup`) it stays so.

    Args:
        listener: from `bind`; closed at the end.
        starting: gives an engine once its model is loaded; closed at the end. None: the registry's models are loaded.
        names: the model of `starting` answers to.
        grace: seconds.
        drain_delay: seconds.
        log_level: of uvicorn.
        on_ready: called with what is served when all is loaded.
        on_stop: called when a signal asks for the end, with it, the number of running answers, and the seconds for
            which requests are still taken.
        on_wait: called when the end waits for running answers, with their number.
        on_end: called when all is closed after a signal, with the numbers of answers that finished since and that were
            cut short, and the seconds since.
        state: to serve from; a fresh one when None.
        signals: handle SIGINT and SIGTERM (the main thread only); else cancel the task to stop.
        admin: a second listener and the application behind it.
        processes: others that serve with this one's engines: they get its signals, and end before the engines do.
        early: signals that came before; they count as if they came now.

    Raises:
        OctavoError: a model could not be loaded.
    """
    allow_many_files()
    state = state or ServerState()
    settings = state.settings
    tls = tls_context(settings)
    server = _server(create_app(state), log_level, tls, settings.root_path)
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    force = asyncio.Event()
    patience = 0.0
    # Which signal came first, when, and how many answers had been given by then.
    asked: tuple[signal.Signals, float, int] | None = None

    async def running() -> int:
        return state.num_running if processes is None else await processes.running()

    def on_signal(number: signal.Signals, delay: float) -> None:
        nonlocal patience, asked
        if loading.done():
            patience = delay
        if asked is None:
            asked = number, time.monotonic(), state.num_ended
        if processes is not None:
            processes.signal(number)
        (force if stop.is_set() else stop).set()

    handled = {signal.SIGINT: 0.0, signal.SIGTERM: drain_delay} if signals else {}
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    admin_server = None if admin is None else _server(admin[1], log_level, tls)
    administering = None
    if admin is not None and admin_server is not None:
        administering = asyncio.ensure_future(admin_server.serve(sockets=[admin[0]]))
    loading = asyncio.ensure_future(_load(state, starting, names))
    for number, delay in handled.items():
        loop.add_signal_handler(number, on_signal, number, delay)
    for number in early:
        on_signal(number, handled[number])
    if signals and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        handled[signal.SIGHUP] = 0.0
        if sys.stderr.isatty():
            loop.add_signal_handler(signal.SIGHUP, on_signal, signal.SIGHUP, 0.0)
        else:
            loop.add_signal_handler(signal.SIGHUP, lambda: loop.run_in_executor(None, _read_keys, state.keys))
    watching = asyncio.gather(state.keys.watch(), watch_certificate([] if tls is None else [tls], settings))
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((serving, loading, stopped), return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()
            if on_ready is not None:
                on_ready(state.models)
            await asyncio.wait((serving, stopped), return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not loading.done():
            loading.cancel()
            patience = 0.0
        state.draining = True
        if on_stop is not None and asked is not None:
            on_stop(asked[0], await running(), patience)
        await _wait_any(patience, serving, force.wait())
        state.refuse()
        if on_wait is not None and grace > 0 and (count := await running()):
            on_wait(count)
        await _wait_any(grace, serving, force.wait(), state.quiet())
        aborted = state.num_running
        state.abort_all()
        server.should_exit = True
        if admin_server is not None:
            admin_server.should_exit = True
        stopped.cancel()
        watching.cancel()
        await asyncio.gather(
            serving, loading, stopped, watching, *filter(None, [administering]), return_exceptions=True
        )
        if processes is not None:
            await processes.close()
        await state.registry.close()
        if on_end is not None and asked is not None:
            finished = state.num_ended - asked[2] - aborted
            if processes is not None:
                finished, aborted = finished + processes.finished, aborted + processes.aborted
            on_end(finished, aborted, time.monotonic() - asked[1])
        for number in handled:
            loop.remove_signal_handler(number)


def _read_keys(keys: KeyRing) -> None:
    if not keys.reload():
        _LOG.info("SIGHUP: there are no other API keys than before")


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
        timeout_graceful_shutdown=_LAST_WORDS_S,
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
    """Until the server ends, one of the others does, or the time is over."""
    tasks = [asyncio.ensure_future(other) for other in others]
    await asyncio.wait((serving, *tasks), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
