"""A client's connection: uvicorn's, with bounds on a request's head and time to arrive, and a short way for chunks."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

__all__ = ["CHUNKS", "MAX_HEAD_BYTES", "ChunkSender", "ClientConnection"]

CHUNKS = "octavo.chunks"
"""The key of an exchange's `ChunkSender` among the extensions of ASGI's scope."""

MAX_HEAD_BYTES = 1 << 16
_ARRIVAL_S = 60.0


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


class ClientConnection(HttpToolsProtocol):
    """Closes on clients that send headers without end, or never the whole of a request.

    Attributes:
        arrival_s: seconds that a request may take to arrive.
    """

    arrival_s = _ARRIVAL_S

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._since_body = 0
        self._awaited: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for a request."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse, and count what is no body: lines and headers pile up in the parser until they are whole."""
        self._since_body += len(data)
        super().data_received(data)
        if self._since_body > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(b"431 Request Header Fields Too Large")

    def on_message_begin(self) -> None:
        """The next request has begun to arrive."""
        super().on_message_begin()
        if self._awaited is None:
            self._await_request()

    def on_headers_complete(self) -> None:
        """The application may begin."""
        super().on_headers_complete()
        if self.scope["method"] != "HEAD":
            extensions: dict[str, Any] = self.scope.setdefault("extensions", {})
            extensions[CHUNKS] = ChunkSender(self, self.cycle)

    def on_body(self, body: bytes) -> None:
        """The body's own limit is the application's."""
        self._since_body = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """All of a request is here."""
        self._since_body = 0
        self._stop_waiting()
        super().on_message_complete()

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
