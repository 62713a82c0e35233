"""Messages between the processes of one server. Parent and child share a socket pair, and both may send requests."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

import msgspec

__all__ = ["Channel", "ChannelClosed", "PeerProcesses", "merge_metrics"]

_HEADER = struct.Struct("<I")
_MAX_BYTES = 1 << 26
# Gauges that are the same in all processes, or have no meaningful sum.
_SAME_IN_ALL = ("_info", "_start_time_seconds", "_state", "_config_info")


class ChannelClosed(Exception):
    """The other process has ended, or did not answer in time."""


class PeerProcesses(Protocol):
    """The other processes on the same port."""

    async def metrics(self) -> bytes:
        """The sum of the `/metrics` texts of all processes."""
        ...

    async def running(self) -> int:
        """Requests that all processes answer, including this one's."""
        ...


class _Message(msgspec.Struct, array_like=True):
    number: int
    kind: str | None
    data: bytes


class Channel:
    """One end of a channel: sends requests and answers those of the other end.

    Args:
        reader: of the socket.
        writer: of the socket.
        answer: answers a request of a kind with some data.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        answer: Callable[[str, bytes], Awaitable[bytes]],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._answer = answer
        self._last = 0
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = False

    async def ask(self, kind: str, data: bytes = b"", *, timeout: float = 5.0) -> bytes:
        """Send a request and return its answer.

        Raises:
            ChannelClosed: there is no answer.
        """
        if self._ended:
            raise ChannelClosed("the other process has ended")
        self._last += 1
        number = self._last
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._asked[number] = future
        try:
            self._send(_Message(number, kind, data))
            return await asyncio.wait_for(future, timeout)
        except asyncio.TimeoutError:
            raise ChannelClosed(f"no answer to {kind!r} within {timeout:g} s") from None
        finally:
            self._asked.pop(number, None)

    async def run(self) -> None:
        """Receive messages until the other end is closed or sends an invalid one."""
        try:
            while True:
                (length,) = _HEADER.unpack(await self._reader.readexactly(4))
                if length > _MAX_BYTES:
                    return
                self._take(msgspec.msgpack.decode(await self._reader.readexactly(length), type=_Message))
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.DecodeError):
            return
        finally:
            self._ended = True
            for future in self._asked.values():
                if not future.done():
                    future.set_exception(ChannelClosed("the other process has ended"))
            for task in self._tasks:
                task.cancel()
            self._writer.close()

    def _take(self, message: _Message) -> None:
        if message.kind is None:
            future = self._asked.get(message.number)
            if future is not None and not future.done():
                future.set_result(message.data)
            return
        task = asyncio.get_running_loop().create_task(self._reply(message.number, message.kind, message.data))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reply(self, number: int, kind: str, data: bytes) -> None:
        answer = await self._answer(kind, data)
        if not self._ended:
            self._send(_Message(number, None, answer))

    def _send(self, message: _Message) -> None:
        payload = msgspec.msgpack.encode(message)
        self._writer.write(_HEADER.pack(len(payload)) + payload)


class _Family:
    def __init__(self) -> None:
        self.comments: list[str] = []
        self.kind = ""
        self.samples: dict[str, float] = {}


def merge_metrics(texts: Iterable[str]) -> str:
    """Merge the metrics of several processes: sums, or the first value of what has no sum (infos, start times).

    If a process is restarted, its counters begin at 0 and the sums fall. Prometheus treats that as a reset.
    """
    families: dict[str, _Family] = {}
    for text in texts:
        family = _Family()
        for line in text.splitlines():
            if line.startswith("# "):
                _, what, name, rest = [*line.split(" ", 3), ""][:4]
                family = families.setdefault(name, _Family())
                if not any(comment.startswith(f"# {what} ") for comment in family.comments):
                    family.comments.append(line)
                if what == "TYPE":
                    family.kind = rest
            elif line:
                series, _, value = line.rpartition(" ")
                if series not in family.samples:
                    family.samples[series] = float(value)
                elif _adds(family.kind, series):
                    family.samples[series] += float(value)
    lines = []
    for family in families.values():
        lines += family.comments
        lines += [f"{series} {_number(value)}" for series, value in family.samples.items()]
    return "\n".join([*lines, ""])


def _adds(kind: str, series: str) -> bool:
    name = series.partition("{")[0]
    return kind != "gauge" or not name.endswith(_SAME_IN_ALL)


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() and abs(value) < 1 << 53 else repr(value)
