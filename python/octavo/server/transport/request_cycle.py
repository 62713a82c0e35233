"""One request on a client's connection, as an ASGI application sees it: its body comes in, its answer goes out."""

from __future__ import annotations

import asyncio
import http
import logging
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.server.transport.connection import ClientConnection

__all__ = ["CHUNKS", "ChunkSender", "RequestCycle"]

CHUNKS = "octavo.chunks"
"""The key of an exchange's `ChunkSender` among the extensions of ASGI's scope."""

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in http.HTTPStatus}
_NOT_IN_A_HEADER = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
# How an answer's end is known: by its length, by a last chunk, by the connection's close; of some there is no body.
_LENGTH, _CHUNKED, _UNTIL_CLOSE, _NO_BODY = range(4)

logger = logging.getLogger("octavo.server")


class ChunkSender:
    """Sends chunks of a body that has begun through ASGI, at once and past ASGI, which costs more than the chunk.

    Args:
        connection: of the client.
        cycle: of the exchange.
    """

    __slots__ = ("_connection", "_cycle", "_write")

    def __init__(self, connection: ClientConnection, cycle: RequestCycle) -> None:
        self._connection = connection
        self._cycle = cycle
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
        if not cycle.open or self._connection.write_paused:
            return False
        self._write(b"%x\r\n%b\r\n" % (len(data), data) if cycle.chunked else data)
        return True


class RequestCycle:
    """One request and its answer.

    Args:
        connection: of the client.
        scope: ASGI's.
        keep_alive: whether the client wants the connection kept.
        expects_continue: whether it sends its body only when told to.

    Attributes:
        scope: ASGI's.
        keep_alive: whether another request may follow.
        whole: all of the request is here.
        started: the answer has begun.
        complete: the answer is written.
        open: its body has begun and can be added to.
        chunked: it goes out in chunks.
        gone: the client has left.
        fault: why the rest of the request will never come.
    """

    __slots__ = (
        "_connection", "_expects_continue", "_framing", "_left", "_news", "_parts", "_told_whole", "_waiting",
        "chunked", "complete", "fault", "gone", "keep_alive", "open", "scope", "started", "whole",
    )  # fmt: skip

    def __init__(
        self,
        connection: ClientConnection,
        scope: MutableMapping[str, Any],
        *,
        keep_alive: bool,
        expects_continue: bool = False,
    ) -> None:
        self._connection = connection
        self.scope = scope
        self.keep_alive = keep_alive
        self._expects_continue = expects_continue
        self._parts: list[bytes] = []
        self._waiting = 0
        self._news = asyncio.Event()
        self._told_whole = False
        self._framing = _NO_BODY
        self._left = 0
        self.whole = self.started = self.complete = self.open = self.chunked = self.gone = False
        self.fault: Exception | None = None

    # ------------------------------------------------------- for the connection

    def add(self, body: bytes) -> int:
        """A part of the request's body; how many bytes wait to be taken."""
        if not self.complete:
            self._parts.append(body)
            self._waiting += len(body)
            self._news.set()
        return self._waiting

    def end(self) -> None:
        """The request is whole."""
        self.whole = True
        self._news.set()

    def fail(self, fault: Exception) -> None:
        """The rest will not come: whoever waits for it is told why."""
        self.fault = fault
        self._news.set()

    def leave(self) -> None:
        """The client has gone."""
        self.gone = not self.complete
        self.open = False
        self._forget()
        self._news.set()

    def _forget(self) -> None:
        self._parts = []
        self._waiting = 0

    async def run(self, app: Callable[..., Awaitable[None]]) -> None:
        """Let the application answer; its failures are logged, and no answer is left half told as if it were whole."""
        try:
            await app(self.scope, self.receive, self.send)
        except asyncio.CancelledError:
            self._connection.transport.abort()
            raise
        except Exception:
            logger.exception("a request failed")
        if not self.complete and not self.gone:
            if self.started:
                self._connection.transport.abort()
            else:
                logger.error("a request was not answered")
                await self.send({"type": "http.response.start", "status": 500, "headers": [(b"content-length", b"0")]})
                await self.send({"type": "http.response.body"})
        # It refers to this.
        self.scope.pop("extensions", None)

    # ------------------------------------------------------- ASGI

    async def receive(self) -> MutableMapping[str, Any]:
        """The next part of the request's body; then, once there is one, the client's leave or the answer's end."""
        while True:
            if self.gone or self.complete:
                return {"type": "http.disconnect"}
            if self._parts or (self.whole and not self._told_whole):
                body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
                self._forget()
                self._told_whole = self.whole
                self._connection.read_on()
                return {"type": "http.request", "body": body, "more_body": not self.whole}
            if self.fault is not None:
                raise self.fault
            if self._expects_continue and not self.whole and not self.started:
                self._expects_continue = False
                self._connection.transport.write(_CONTINUE)
            self._news.clear()
            await self._news.wait()

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """The answer's head, then parts of its body; waits while the client is behind with reading."""
        if self._connection.write_paused and not self.gone:
            await self._connection.drain()
        if self.gone:
            return
        kind = message["type"]
        if self.complete or kind != ("http.response.body" if self.started else "http.response.start"):
            raise RuntimeError(f"{kind} was sent out of turn")
        if self.started:
            self._send_body(message.get("body", b""), message.get("more_body", False))
        else:
            self._send_head(message["status"], message.get("headers", ()))

    def _send_head(self, status: int, headers: Any) -> None:
        if not self.whole:
            # What is still to come of the request would be taken for the next one.
            self.keep_alive = False
        parts = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
        length: int | None = None
        said_close = False
        for name, value in (*self._connection.server_state.default_headers, *headers):
            if _NOT_IN_A_HEADER.search(name) or _NOT_IN_A_HEADER.search(value):
                raise RuntimeError(f"the answer's header {name!r} cannot be sent")
            lower = name.lower()
            if lower == b"content-length":
                length = int(value)
            elif lower == b"connection" and b"close" in value.lower():
                self.keep_alive, said_close = False, True
            parts.append(b"%b: %b\r\n" % (lower, value))
        if self.scope["method"] == "HEAD" or status in (204, 304):
            self._framing = _NO_BODY
        elif length is not None:
            self._framing, self._left = _LENGTH, length
        elif self.scope["http_version"] == "1.0":
            self._framing, self.keep_alive = _UNTIL_CLOSE, False
        else:
            self._framing, self.chunked = _CHUNKED, True
            parts.append(b"transfer-encoding: chunked\r\n")
        if not self.keep_alive and not said_close:
            parts.append(b"connection: close\r\n")
        parts.append(b"\r\n")
        self.started = True
        self.open = self._framing in (_CHUNKED, _UNTIL_CLOSE)
        self._connection.transport.write(b"".join(parts))

    def _send_body(self, body: bytes, more: bool) -> None:
        write = self._connection.transport.write
        if self._framing == _LENGTH:
            self._left -= len(body)
            if self._left < 0 or (self._left and not more):
                raise RuntimeError("the answer's body is not as long as its content-length")
            write(body)
        elif self._framing == _CHUNKED:
            # In one write, which is one packet.
            chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            write(chunk if more else chunk + b"0\r\n\r\n")
        elif self._framing == _UNTIL_CLOSE:
            write(body)
        if not more:
            self.complete, self.open = True, False
            self._forget()
            self._news.set()
            self._connection.on_answered(self)
