"""Clients that do not read their answer, and those that have gone without its being seen by whoever reads."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import select
import sys
import termios
from collections.abc import Callable

__all__ = ["MIN_READ_BYTES", "PresenceWatch", "ReaderWatch"]

MIN_READ_BYTES = 1 << 12
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.002, 0.25


class ReaderWatch:
    """Drops a client that has much to read and does not read it.

    Args:
        transport: of the client.
        loop: whose clock it goes by.
        seconds: in which `MIN_READ_BYTES` must be read.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._transport = transport
        self._loop = loop
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Watch from now on, unless it is watched."""
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._judge, self._unread())

    def stop(self) -> None:
        """Watch no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _judge(self, before: int) -> None:
        self._timer = None
        if before - self._unread() >= MIN_READ_BYTES:
            self.start()
        else:
            self._transport.abort()

    def _unread(self) -> int:
        """Bytes that the client has not taken yet, of ours and of the kernel's, whose buffer may hold megabytes."""
        queued = bytes(4)
        with contextlib.suppress(OSError, ValueError):
            queued = fcntl.ioctl(self._transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued)
        return self._transport.get_write_buffer_size() + int.from_bytes(queued, sys.byteorder)


class PresenceWatch:
    """Looks whether a client is still there while nobody reads from its connection.

    A client that says it will send no more (a half-closed connection) looks like one that has gone until something is
    written: a client that has gone then answers with a reset. So `probe` is called, and the connection looked at, soon
    at first and then four times a second.

    Args:
        transport: of the client; aborted when it has gone.
        loop: whose clock it goes by.
        probe: writes something harmless now and then, where it may; False when that has not been for too long.
    """

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, probe: Callable[[], bool]
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._probe = probe
        self._timer: asyncio.TimerHandle | None = None
        self._delay = _FIRST_LOOK_S

    def start(self) -> None:
        """Look, and again and again."""
        self._look()

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if self._transport.is_closing():
            return
        if self._is_reset() or not self._probe():
            self._transport.abort()
            return
        self._timer = self._loop.call_later(self._delay, self._look)
        self._delay = min(2 * self._delay, _LONGEST_LOOK_S)

    def _is_reset(self) -> bool:
        poll = select.poll()
        with contextlib.suppress(OSError, ValueError):
            poll.register(self._transport.get_extra_info("socket").fileno(), 0)
            return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))
        return False
