"""More processes that answer on the server's port: started, watched and ended by the one that has the engines."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING

import msgspec

from octavo.cli.serve_plan import ServePlan
from octavo.config import EngineConfig
from octavo.engine.protocol import ErrorRecord
from octavo.engine.supervisor import SupervisedEngine
from octavo.errors import EngineDead, OctavoError
from octavo.log_relay import StandardError, relayed
from octavo.server.ipc import Channel, ChannelClosed, merge_metrics

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from octavo.server.state import ServerState

__all__ = ["ApiProcesses", "Ask", "Brief", "Given"]

_LOG = logging.getLogger("octavo.server")
_FIRST_DELAY_S, _MAX_DELAY_S, _STABLE_S = 0.5, 30.0, 60.0
_LAST_WORDS_S = 8.0
_MAX_ASK_BYTES = 1 << 16
_COUNT_TIMEOUT_S = 1.0


class Brief(msgspec.Struct, kw_only=True):
    """Settings of a child process; sent over a socket because they contain secrets.

    Attributes:
        number: 1 for the first child.
        plan: `models`, `settings` and `options` of the `ServePlan`.
        aliases: weights by model, by alias.
        environment_key: what `OCTAVO_API_KEY` held.
        drain_delay: seconds.
    """

    number: int
    models: bytes
    settings: bytes
    options: bytes
    aliases: dict[str, dict[str, float]]
    environment_key: str | None
    drain_delay: float


class Ask(msgspec.Struct, array_like=True):
    """A child asks for a connection to the engine of these settings."""

    number: int
    config: EngineConfig


class Given(msgspec.Struct, array_like=True):
    """The answer, with the connection's descriptor where there is no error."""

    number: int
    error: ErrorRecord | None = None
    retry_after: float | None = None


class _Child:
    def __init__(self, number: int, listener: socket.socket) -> None:
        self.number = number
        self.listener = listener
        self.process: asyncio.subprocess.Process | None = None
        self.output: StandardError | None = None
        self.talk: Channel | None = None
        self.asks: socket.socket | None = None


class ApiProcesses:
    """The children.

    Each has a listener of its own, which stays open here too: connections of a child that ends wait for the next.

    Args:
        plan: what this process serves, and they will.
        environment_key: what `OCTAVO_API_KEY` held.
        drain_delay: seconds.
        listeners: one a child.
        state: of this process, whose registry has the engines.
        own_metrics: this process's metrics.

    Attributes:
        finished: answers of children that have ended which came to their end after the signal.
        aborted: answers of the same that were cut short.
    """

    def __init__(
        self,
        plan: ServePlan,
        environment_key: str | None,
        drain_delay: float,
        listeners: list[socket.socket],
        state: ServerState,
        own_metrics: Callable[[], Awaitable[bytes]],
    ) -> None:
        self._plan = plan
        self._environment_key = environment_key
        self._drain_delay = drain_delay
        self._state = state
        self._own_metrics = own_metrics
        self._children = [_Child(number, listener) for number, listener in enumerate(listeners, 1)]
        self._tasks: set[asyncio.Task[None]] = set()
        self.finished = 0
        self.aborted = 0
        self._ending = False
        self._asked_to_end = 0.0

    def start(self) -> None:
        """Start them all; each again when it ends."""
        for child in self._children:
            self._spawn(self._keep(child))

    def signal(self, number: signal.Signals) -> None:
        """Pass a signal on; from now on none is started again."""
        if not self._ending:
            self._ending = True
            self._asked_to_end = time.monotonic()
        for child in self._children:
            if child.process is not None and child.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.process.send_signal(number)

    async def close(self) -> None:
        """End them, by force in the end, and close their listeners."""
        if not self._ending:
            self.signal(signal.SIGTERM)
        # They let running answers finish as this process does.
        grace = self._drain_delay + self._plan.options.shutdown_timeout
        deadline = self._asked_to_end + grace + _LAST_WORDS_S
        for child in self._children:
            if child.process is not None:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(child.process.wait(), max(deadline - time.monotonic(), 0.01))
                if child.process.returncode is None:
                    child.process.kill()
                    await child.process.wait()
            if child.output is not None:
                await asyncio.to_thread(child.output.ended)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for child in self._children:
            child.listener.close()

    async def metrics(self) -> bytes:
        """Of this process and all children that answer."""
        own, *others = await asyncio.gather(self._own_metrics(), *map(self._metrics_of, self._children))
        return merge_metrics(text.decode() for text in (own, *others) if text).encode()

    async def running(self) -> int:
        """Exchanges that this process and all children that answer have under way."""
        others = await asyncio.gather(*map(self._running_of, self._children))
        return self._state.num_running + sum(others)

    async def _running_of(self, child: _Child) -> int:
        if child.talk is None:
            return 0
        try:
            return msgspec.msgpack.decode(await child.talk.ask("running", timeout=_COUNT_TIMEOUT_S), type=int)
        except (ChannelClosed, msgspec.DecodeError):
            return 0

    async def _metrics_of(self, child: _Child) -> bytes:
        if child.talk is None:
            return b""
        try:
            return await child.talk.ask("metrics")
        except ChannelClosed:
            return b""

    # -------------------------------------------------------- a child's life

    async def _keep(self, child: _Child) -> None:
        failures = 0
        while True:
            began = time.monotonic()
            try:
                how: object = await self._run(child)
            except OSError as error:
                how = error
            if self._ending:
                return
            failures = 1 if time.monotonic() - began >= _STABLE_S else failures + 1
            delay = min(_MAX_DELAY_S, _FIRST_DELAY_S * 2.0 ** min(failures - 1, 16))
            _LOG.error("API process %d ended (%s); it is started again in %.1f s", child.number, how, delay)
            await asyncio.sleep(delay)

    async def _run(self, child: _Child) -> int:
        """Start a child and wait for its end; its exit code."""
        child.output = output = relayed()
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            ours.callback(output.abandoned)
            talk, their_talk = socket.socketpair()
            ours.enter_context(talk), theirs.enter_context(their_talk)
            child.asks, their_asks = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.enter_context(child.asks), theirs.enter_context(their_asks)
            child.asks.setblocking(False)
            descriptors = (child.listener.fileno(), their_talk.fileno(), their_asks.fileno())
            names = ("--listener", "--talk", "--asks")
            arguments = [part for name, number in zip(names, descriptors, strict=True) for part in (name, str(number))]
            child.process = process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "octavo.cli.api_process", "--parent", str(os.getpid()), *arguments,
                pass_fds=descriptors, stdin=asyncio.subprocess.DEVNULL, stdout=output.descriptor,
                stderr=output.descriptor, start_new_session=True,
            )  # fmt: skip
            ours.pop_all()
        output.started(f"api-{child.number}", process.pid)
        if self._ending:
            # The signal came while it was being started.
            process.terminate()
        loop = asyncio.get_running_loop()
        reader, writer = await asyncio.open_unix_connection(sock=talk)
        child.talk = Channel(reader, writer, functools.partial(self._answer, child))
        loop.add_reader(child.asks, self._take_ask, child.asks)
        talking = loop.create_task(child.talk.run())
        try:
            code = await process.wait()
            await asyncio.to_thread(output.ended)
            return code
        finally:
            loop.remove_reader(child.asks)
            child.asks.close()
            child.talk = None
            await asyncio.wait((talking,), timeout=1)
            talking.cancel()

    async def _answer(self, child: _Child, kind: str, data: bytes) -> bytes:
        if kind == "metrics":
            return await self.metrics()
        if kind == "running":
            return msgspec.msgpack.encode(await self.running())
        if kind == "ended":
            finished, aborted = msgspec.msgpack.decode(data, type=tuple[int, int])
            self.finished += finished
            self.aborted += aborted
            return b""
        plan = self._plan
        brief = Brief(
            number=child.number,
            models=msgspec.msgpack.encode(plan.models),
            settings=msgspec.msgpack.encode(plan.settings),
            options=msgspec.msgpack.encode(plan.options),
            aliases={name: dict(alias.weights) for name, alias in plan.aliases.items()},
            environment_key=self._environment_key,
            drain_delay=self._drain_delay,
        )
        return msgspec.msgpack.encode(brief)

    def _take_ask(self, asks: socket.socket) -> None:
        try:
            data = asks.recv(_MAX_ASK_BYTES)
            ask = msgspec.msgpack.decode(data, type=Ask) if data else None
        except BlockingIOError:
            return
        except (OSError, msgspec.DecodeError):
            ask = None
        if ask is None:
            asyncio.get_running_loop().remove_reader(asks)
        else:
            self._spawn(self._give(asks, ask))

    async def _give(self, asks: socket.socket, ask: Ask) -> None:
        try:
            sock = await self._engine(ask.config).invite()
        except OctavoError as error:
            given = Given(ask.number, ErrorRecord.of(error), getattr(error, "retry_after", None))
            with contextlib.suppress(OSError):
                asks.send(msgspec.msgpack.encode(given))
            return
        with sock, contextlib.suppress(OSError):
            socket.send_fds(asks, [msgspec.msgpack.encode(Given(ask.number))], [sock.fileno()])

    def _engine(self, config: EngineConfig) -> SupervisedEngine:
        for entry in self._state.registry.entries:
            if entry.config == config and isinstance(entry.engine, SupervisedEngine):
                return entry.engine
        raise EngineDead(f"the model `{config.model}` is not loaded")

    def _spawn(self, work: Awaitable[None]) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
