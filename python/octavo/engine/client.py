"""The client's end of the socket, for asyncio."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Sequence
from typing import Any, cast

from octavo.engine.process import WORKER_COMMAND, WorkerProcess
from octavo.engine.protocol import FrameReader, FromClient, FromWorker, ProtocolError, encode_frame

__all__ = ["EngineClient"]

_LOG = logging.getLogger(__name__)
# So much at once means that this process does not keep up, or did not for a while.
_BEHIND_MESSAGES = 8
_BEHIND_BYTES = 1 << 16
_EPITAPH_WAIT_S = 0.5
_CLOSE_WAIT_S = 5.0


class EngineClient(asyncio.Protocol):
    """A worker process and the messages to and from it; for one event loop.

    Args:
        on_message: called with every message of the worker.
        on_dead: called once, with the reason, when the worker is of no use any more: it ended, closed its end, or sent
            what is no message.

    Attributes:
        dead: whether `on_dead` was called.
        behind: whether the messages being handed on are many steps that waited for this process.
    """

    def __init__(self, on_message: Callable[[Any], None], on_dead: Callable[[str], None]) -> None:
        self._on_message = on_message
        self._on_dead = on_dead
        self._reader = FrameReader(FromWorker)
        self._transport: asyncio.WriteTransport | None = None
        self._process: WorkerProcess | None = None
        self._burial: asyncio.Task[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._ended = asyncio.Event()
        self._fault: str | None = None
        self.dead = False
        self.behind = False

    async def start(self, command: Sequence[str] = WORKER_COMMAND) -> None:
        """Start the worker and connect to it.

        Raises:
            EngineDead: the program cannot be started.
        """
        loop = asyncio.get_running_loop()

        def tell() -> None:
            try:
                loop.call_soon_threadsafe(self._ended.set)
            except RuntimeError:
                _LOG.debug("the worker outlived the event loop")

        self._process = WorkerProcess(command, on_exit=tell)
        await loop.create_unix_connection(lambda: self, sock=self._process.socket)

    async def attach(self, sock: socket.socket) -> None:
        """Connect to a worker that another process has started; see `WorkerProcess.invite`."""
        sock.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=sock)

    @property
    def process(self) -> WorkerProcess | None:
        """The worker, where it was started here."""
        return self._process

    @property
    def pid(self) -> int:
        """The worker's process id; 0 before it is started."""
        return 0 if self._process is None else self._process.pid

    def send(self, message: FromClient) -> None:
        """Queue a message; dropped when the worker is dead."""
        # uvloop's transports refuse to be written to between their end and the burial.
        if self._transport is not None and not self.dead and not self._transport.is_closing():
            self._transport.write(encode_frame(message))

    async def drain(self) -> None:
        """Wait while the worker is behind with reading what was sent."""
        await self._writable.wait()

    async def close(self) -> None:
        """End the worker: first by closing the socket, in the end by force."""
        if self._transport is not None:
            self._transport.close()
        elif self._process is not None:
            self._process.socket.close()
        await self._end_process()
        # The burial begins when the event loop gets to it.
        await asyncio.sleep(0)
        if self._burial is not None:
            await asyncio.wait((self._burial,))

    async def _end_process(self) -> None:
        if self._process is None:
            return
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            if number is not None:
                self._process.send_signal(number)
            try:
                await asyncio.wait_for(self._ended.wait(), _CLOSE_WAIT_S)
            except asyncio.TimeoutError:
                continue
            return

    def condemn(self, reason: str) -> None:
        """End a worker that is of no use any more, and give `reason` as the reason of its end."""
        if self._fault is None:
            self._fault = reason
        self.kill()
        # It may take its time to die, with a device that does not answer: nobody is to wait for that.
        if self._transport is not None:
            self._transport.abort()

    async def wait_ended(self, timeout: float) -> bool:
        """Whether the worker's process has ended; waits for it for a while."""
        if self._process is None:
            return True
        try:
            await asyncio.wait_for(self._ended.wait(), timeout)
        except asyncio.TimeoutError:
            return False
        return True

    def kill(self) -> None:
        """End the worker at once."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)

    # -------------------------------------------------------- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        """Cut the stream into messages; one that is malformed ends the worker."""
        if self.dead or self._fault is not None:
            return
        try:
            messages = self._reader.feed(data)
            count = len(messages)
            self.behind = count > _BEHIND_MESSAGES or (count > 2 and len(data) > _BEHIND_BYTES)
            for message in messages:
                self._on_message(message)
        except ProtocolError as error:
            self._fault = f"the engine process sent what is no message: {error}"
            cast(asyncio.WriteTransport, self._transport).close()

    def pause_writing(self) -> None:
        """The worker is behind."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """The worker has caught up."""
        self._writable.set()

    def connection_lost(self, error: Exception | None) -> None:
        """A worker without a connection is of no use: end it, find out how it ended, and say so."""
        self._writable.set()
        # Its exit code is there an instant after its socket closes; a worker that closed it and lives on is killed.
        self._burial = asyncio.get_running_loop().create_task(self._bury())

    async def _bury(self) -> None:
        epitaph = "the engine process closed its connection"
        if self._process is not None:
            if not await self.wait_ended(_EPITAPH_WAIT_S):
                self.kill()
            epitaph = self._process.epitaph()
        self.dead = True
        self._on_dead(self._fault or epitaph)
