"""The worker's end of the socket: never blocks on a slow client, never spins on a silent one."""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from typing import Any

from octavo.engine.protocol import FrameReader, FromClient, FromWorker, encode_frame

__all__ = ["MAX_PENDING_BYTES", "ClientGone", "Connection"]

MAX_PENDING_BYTES = 8 << 20
_CHUNK = 1 << 18


class ClientGone(Exception):
    """The client's end is closed."""


class Connection:
    """Messages from and to the client.

    What the socket does not take at once waits in a buffer. When that holds more than `MAX_PENDING_BYTES`, because the
    client has stopped reading, `clogged` says so and the engine takes no step until it has drained.

    Args:
        sock: the worker's end.
        wake: a file descriptor that ends a blocking `exchange` when it becomes readable (signals).
    """

    def __init__(self, sock: socket.socket, wake: int | None = None) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._wake = wake
        self._reader = FrameReader(FromClient)
        self._pending: deque[memoryview] = deque()
        self._pending_bytes = 0
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        if wake is not None:
            self._poll.register(wake, select.POLLIN)

    @property
    def clogged(self) -> bool:
        """Whether the client is too far behind for another step."""
        return self._pending_bytes > MAX_PENDING_BYTES

    @property
    def pending(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._pending)

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def send(self, message: FromWorker) -> None:
        """Send as much as goes, keep the rest.

        Raises:
            ClientGone: nobody will read it.
        """
        frame = memoryview(encode_frame(message))
        self._pending.append(frame)
        self._pending_bytes += len(frame)
        self._flush()

    def exchange(self, *, block: bool) -> list[Any]:
        """Send what waits and take what came.

        Args:
            block: wait until there is something to do: a message, room for what waits, or a wake-up.

        Raises:
            ClientGone: the client's end is closed.
            ProtocolError: a frame that is none of ours.
        """
        self._poll.modify(self._socket, select.POLLIN | (select.POLLOUT if self._pending else 0))
        messages: list[Any] = []
        for descriptor, events in self._poll.poll(None if block else 0):
            if descriptor == self._wake:
                continue
            messages += self.attend(events)
        return messages

    def attend(self, events: int) -> list[Any]:
        """Send and take what `poll` found to be possible; errors as of `exchange`."""
        if events & select.POLLOUT:
            self._flush()
        if events & (select.POLLIN | select.POLLHUP | select.POLLERR):
            return self._receive()
        return []

    def flush(self, timeout: float) -> None:
        """Wait until everything is sent, at most so many seconds."""
        deadline = time.monotonic() + timeout
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        while self._pending and (left := deadline - time.monotonic()) > 0:
            poll.poll(1000 * left)
            self._flush()

    def _receive(self) -> list[Any]:
        messages: list[Any] = []
        while True:
            try:
                data = self._socket.recv(_CHUNK)
            except BlockingIOError:
                return messages
            except ConnectionError as error:
                raise ClientGone from error
            if not data:
                raise ClientGone
            messages += self._reader.feed(data)
            if len(data) < _CHUNK:
                return messages

    def _flush(self) -> None:
        while self._pending:
            head = self._pending[0]
            try:
                sent = self._socket.send(head)
            except BlockingIOError:
                return
            except ConnectionError as error:
                raise ClientGone from error
            self._pending_bytes -= sent
            if sent < len(head):
                self._pending[0] = head[sent:]
            else:
                self._pending.popleft()
