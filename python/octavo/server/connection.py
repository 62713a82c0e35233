"""A client's connection: uvicorn's, with an end to how much head and how much time a request may take to arrive."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["MAX_HEAD_BYTES", "ClientConnection"]

MAX_HEAD_BYTES = 1 << 16
_ARRIVAL_S = 60.0


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
