"""A client's connection: uvicorn's, with bounds on a request's head and on slow clients, and a short way for chunks."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import sys
import termios
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

__all__ = [
    "CHUNKS",
    "MAX_HEADERS",
    "MAX_HEAD_BYTES",
    "MAX_URL_BYTES",
    "MIN_READ_BYTES",
    "ChunkSender",
    "ClientConnection",
]

CHUNKS = "octavo.chunks"
"""The key of an exchange's `ChunkSender` among the extensions of ASGI's scope."""

MAX_HEAD_BYTES = 1 << 15
MAX_HEADERS = 100
MAX_URL_BYTES = 1 << 13
MIN_READ_BYTES = 1 << 12
_ARRIVAL_S = 60.0
_WRITE_S = 30.0


class ChunkSender:
    """Sends chunks of a body that has begun through ASGI, at once and past ASGI, which costs more than the chunk.

    Args:
        connection: of the client.
        cycle: uvicorn's, of the exchange.
    """

    __slots__ = ("_cycle", "_flow", "_write")

    def __init__(self, connection: HttpToolsProtocol, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = connection.flow
        self._write = connection.transport.write

    def __call__(self, data: bytes) -> bool:
        """Send one chunk.

        Args:
            data: not empty.

        Returns:
            False when it was not sent, because the client is behind with reading, has gone, or the body is none that
            can be added to: ASGI's `send` then knows what to do.
        """
        cycle = self._cycle
        if self._flow.write_paused or cycle.disconnected or cycle.response_complete or not cycle.chunked_encoding:
            return False
        self._write(b"%x\r\n%b\r\n" % (len(data), data))
        return True


class _Logger:
    """uvicorn's logger, in which anybody who sends what is no HTTP could write a line."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self.warning = logger.debug

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)


class ClientConnection(HttpToolsProtocol):
    """Closes on clients that send headers without end, never the whole of a request, or do not read their answer.

    What waits to be sent is bounded: past uvicorn's high water the answer's task waits, and whoever makes the answer
    merges what comes meanwhile.

    Attributes:
        arrival_s: seconds that a request may take to arrive.
        write_s: seconds in which a client that has much to read must read `MIN_READ_BYTES`.
    """

    arrival_s = _ARRIVAL_S
    write_s = _WRITE_S

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.logger: Any = _Logger(self.logger)
        self._since_body = 0
        self._head = 0
        self._awaited: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._refused: bytes | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for a request."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._stop_waiting()
        self._stop_patience()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse, and count what is no body: lines and headers pile up in the parser until they are whole."""
        self._since_body += len(data)
        super().data_received(data)
        if self._refused is not None and not self.transport.is_closing():
            self._refuse(self._refused)
        if self._since_body > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(b"431 Request Header Fields Too Large")

    def on_message_begin(self) -> None:
        """The next request has begun to arrive."""
        super().on_message_begin()
        self._head = 0
        if self._awaited is None:
            self._await_request()

    def on_url(self, url: bytes) -> None:
        """The URL, or a part of it."""
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            self._refused = b"414 URI Too Long"

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self._head += len(name) + len(value)
        if len(self.headers) >= MAX_HEADERS or self._head > MAX_HEAD_BYTES:
            self._refused = b"431 Request Header Fields Too Large"
        else:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The application may begin, unless the request is refused."""
        if self._refused is not None:
            return
        super().on_headers_complete()
        if self.scope["method"] != "HEAD":
            extensions: dict[str, Any] = self.scope.setdefault("extensions", {})
            extensions[CHUNKS] = ChunkSender(self, self.cycle)

    def on_body(self, body: bytes) -> None:
        """The body's own limit is the application's."""
        self._since_body = 0
        if self._refused is None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """All of a request is here."""
        self._since_body = 0
        self._stop_waiting()
        if self._refused is None:
            super().on_message_complete()

    def pause_writing(self) -> None:
        """The client reads more slowly than it is answered."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """It has read."""
        super().resume_writing()
        self._stop_patience()

    def on_response_complete(self) -> None:
        """An answer has been written."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._watch_reader()

    def timeout_keep_alive_handler(self) -> None:
        """No further request came."""
        super().timeout_keep_alive_handler()
        self._watch_reader()

    def _watch_reader(self) -> None:
        """Drop the client unless it reads on: a connection that is closed waits for that too."""
        if self._unread is None:
            self._unread = self.loop.call_later(self.write_s, self._judge_reader, self._unread_bytes())

    def _judge_reader(self, before: int) -> None:
        self._unread = None
        if before - self._unread_bytes() >= MIN_READ_BYTES:
            self._watch_reader()
        else:
            self.transport.abort()

    def _unread_bytes(self) -> int:
        """What the client has not taken yet, of ours and of the kernel's, whose buffer may hold megabytes."""
        queued = bytes(4)
        with contextlib.suppress(OSError, ValueError):
            queued = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued)
        return self.transport.get_write_buffer_size() + int.from_bytes(queued, sys.byteorder)

    def _stop_patience(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _await_request(self) -> None:
        self._awaited = self.loop.call_later(self.arrival_s, self._expire)

    def _stop_waiting(self) -> None:
        if self._awaited is not None:
            self._awaited.cancel()
            self._awaited = None

    def _expire(self) -> None:
        if self._is_answering():
            # It is a later request that is late: reading may be paused until the answer is out.
            self._await_request()
        elif not self.transport.is_closing():
            self._refuse(b"408 Request Timeout")

    def _is_answering(self) -> bool:
        cycle = self.cycle
        return bool(self.pipeline) or (cycle is not None and not cycle.response_complete and not cycle.more_body)

    def _refuse(self, status: bytes) -> None:
        """Answer, unless an answer has begun, and close."""
        self._stop_waiting()
        if not self._is_answering() and (self.cycle is None or not self.cycle.response_started):
            self.transport.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        self.transport.close()
        self._watch_reader()
