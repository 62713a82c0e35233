"""One more process that answers on the server's port, with another process's engines.

    python -m octavo.cli.api_process --listener N --talk N --asks N --parent PID

Started by `octavo serve --api-processes`; ends with the process that started it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import functools
import logging
import os
import socket
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from octavo.cli.api_processes import Ask, Brief, Given
from octavo.cli.serve_plan import ServeOptions
from octavo.config import EngineConfig
from octavo.engine.attached import AttachedEngine
from octavo.engine.gc_policy import set_aside
from octavo.engine.process import die_with
from octavo.errors import EngineDead, EngineRestarting
from octavo.log_format import log_complaints
from octavo.server.access.api_keys import KeyRing
from octavo.server.apis.metrics import exposition
from octavo.server.config_file import ModelPlan, populate
from octavo.server.ipc import Channel, ChannelClosed
from octavo.server.lifecycle import Events, serve
from octavo.server.models.aliases import Alias
from octavo.server.models.engine_start import Progress
from octavo.server.observability.logs import configure_logging
from octavo.server.settings import ServerSettings
from octavo.server.state import ServerState

__all__ = ["main"]

_METRICS_TIMEOUT_S = 8.0
_LAST_WORDS_S = 2.0


class _Connector:
    """Asks the parent for connections to its engines."""

    def __init__(self, asks: socket.socket) -> None:
        asks.setblocking(False)
        self._socket = asks
        self._last = 0
        self._waiting: dict[int, asyncio.Future[socket.socket]] = {}
        asyncio.get_running_loop().add_reader(asks, self._take)

    async def connect(self, config: EngineConfig) -> socket.socket:
        """A connection to the engine of these settings."""
        self._last += 1
        number = self._last
        future: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            self._socket.send(msgspec.msgpack.encode(Ask(number, config)))
            return await future
        except OSError:
            raise EngineDead("the process that has the engines does not answer") from None
        finally:
            self._waiting.pop(number, None)

    def _take(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, 1 << 16, 1)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        if not data:
            asyncio.get_running_loop().remove_reader(self._socket)
            return
        given = msgspec.msgpack.decode(data, type=Given)
        sock = socket.socket(fileno=descriptors[0]) if descriptors else None
        future = self._waiting.get(given.number)
        if future is None or future.done():
            if sock is not None:
                sock.close()
        elif sock is not None:
            future.set_result(sock)
        elif given.error is not None and given.retry_after is not None:
            future.set_exception(EngineRestarting(given.error.message, given.retry_after))
        elif given.error is not None:
            future.set_exception(given.error.exception())


class _Parent:
    """The process that started this one, as the server's routes know it."""

    def __init__(self, talk: Channel, state: ServerState) -> None:
        self._talk = talk
        self._state = state

    async def metrics(self) -> bytes:
        """Of all processes."""
        return await self._talk.ask("metrics", timeout=_METRICS_TIMEOUT_S)

    async def running(self) -> int:
        """Of all processes."""
        try:
            return msgspec.msgpack.decode(await self._talk.ask("running"), type=int)
        except ChannelClosed:
            return self._state.num_running

    async def ended(self, finished: int, aborted: int) -> None:
        """Tell how this process's last answers ended."""
        with contextlib.suppress(ChannelClosed):
            await self._talk.ask("ended", msgspec.msgpack.encode((finished, aborted)), timeout=_LAST_WORDS_S)


def _note_end(finished: int, aborted: int, seconds: float) -> None:
    fields = {"finished": finished, "aborted": aborted, "seconds": round(seconds, 3)}
    logging.getLogger("octavo.server").info("stopped", extra={"fields": fields})


async def _run(listener: socket.socket, talk_socket: socket.socket, asks: socket.socket) -> None:
    state: ServerState | None = None

    async def answer(kind: str, data: bytes) -> bytes:
        if kind == "running":
            return msgspec.msgpack.encode(0 if state is None else state.num_running)
        return b"" if state is None else await exposition(state, engines=False)

    reader, writer = await asyncio.open_unix_connection(sock=talk_socket)
    talk = Channel(reader, writer, answer)
    talking = asyncio.ensure_future(talk.run())
    brief = msgspec.msgpack.decode(await talk.ask("brief", timeout=30), type=Brief)
    options = msgspec.msgpack.decode(brief.options, type=ServeOptions)
    settings = msgspec.msgpack.decode(brief.settings, type=ServerSettings)
    process = {"process": f"api-{brief.number}", "pid": os.getpid()}
    configure_logging(options.log_format, options.log_level, process)
    log_complaints()
    keys = KeyRing(options.api_key_file, brief.environment_key, options.api_key, follows=True)
    connector = _Connector(asks)

    async def start_engine(config: EngineConfig, progress: Progress) -> AttachedEngine:
        engine = AttachedEngine(config, functools.partial(connector.connect, config), brief.number)
        await engine.load(progress=progress)
        return engine

    aliases: Mapping[str, Alias] = {name: Alias(name, weights) for name, weights in brief.aliases.items()}
    state = ServerState(settings, start_engine, keys=keys)
    populate(state.registry, msgspec.msgpack.decode(brief.models, type=list[ModelPlan]), aliases)
    parent = _Parent(talk, state)
    state.siblings = parent
    last = (0, 0)

    def ready(_: Any) -> None:
        set_aside()

    def end(finished: int, aborted: int, seconds: float) -> None:
        nonlocal last
        last = finished, aborted
        _note_end(finished, aborted, seconds)

    try:
        # Connections wait in the listener's queue meanwhile; the first process answers those that come to it.
        await state.registry.start()
        await serve(
            listener,
            grace=options.shutdown_timeout,
            drain_delay=brief.drain_delay,
            log_level=options.uvicorn_log_level,
            events=Events(ready=ready, end=end),
            state=state,
        )
        await parent.ended(*last)
    finally:
        talking.cancel()


def main() -> int:
    """The process."""
    faulthandler.enable()
    parser = argparse.ArgumentParser(prog="octavo.cli.api_process", description="Started by Octavo's own processes.")
    for name in ("listener", "talk", "asks", "parent"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    die_with(options.parent)
    listener, talk, asks = (socket.socket(fileno=number) for number in (options.listener, options.talk, options.asks))
    for sock in (listener, talk, asks):
        sock.set_inheritable(False)
    import uvloop

    uvloop.run(_run(listener, talk, asks))
    return 0


if __name__ == "__main__":
    sys.exit(main())
