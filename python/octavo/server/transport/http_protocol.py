"""The HTTP/1.1 protocol of a client connection: uvicorn's, with limits on requests and on slow clients."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import sys
import termios
from collections import deque
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from octavo.errors import InvalidRequest
from octavo.server.error_responses import HeadTooLarge, MalformedRequest, RequestTimeout, UriTooLong
from octavo.server.transport.http import CHUNKS, FAULT, REFUSED, Receive, Scope, Send
from octavo.server.transport.request_head import check_framing, origin_form

__all__ = ["MAX_HEADERS", "MAX_HEAD_BYTES", "MAX_URL_BYTES", "ChunkSender", "HttpProtocol"]

logger = logging.getLogger("octavo.server")

MAX_HEAD_BYTES = 1 << 15
MAX_HEADERS = 100
MAX_URL_BYTES = 1 << 13
_MAX_AHEAD_BYTES = 1 << 16
# Of a body that was refused. Reading it lets the client see the response, and keeps the connection.
_MAX_DROPPED_BYTES = 1 << 26
# Bytes parsed at once: few, so that one packet holds a bounded number of requests and a long head is seen early.
_HEAD_PIECE_BYTES = 1 << 14
_BODY_PIECE_BYTES = 1 << 16
_MIN_READ_BYTES = 1 << 12


class ChunkSender:
    """Writes chunks of a response body directly to the transport. ASGI's `send` would cost more than the chunk.

    Attributes:
        cycle: uvicorn's state of this request.
        until_close: the end of the connection ends the body (HTTP/1.0), so chunks are written without a frame.
    """

    __slots__ = ("_flow", "_write", "cycle", "until_close")

    def __init__(self, protocol: HttpProtocol, cycle: RequestResponseCycle) -> None:
        self.cycle = cycle
        self.until_close = False
        self._flow = protocol.flow
        self._write = protocol.transport.write

    def __call__(self, data: bytes) -> bool:
        """Send one chunk.

        Args:
            data: not empty.

        Returns:
            False if nothing was sent: the client reads too slowly or has left, or the response is not a stream that has
            begun. Use ASGI's `send` then.
        """
        cycle = self.cycle
        if self._flow.write_paused or cycle.disconnected or cycle.response_complete:
            return False
        if cycle.chunked_encoding:
            self._write(b"%x\r\n%b\r\n" % (len(data), data))
            return True
        if self.until_close:
            self._write(data)
        return self.until_close


class HttpProtocol(HttpToolsProtocol):
    """Answers the requests of one connection in turn, within limits.

    Data behind a request waits unparsed until that request is answered, so an error in it cannot corrupt the response.
    A request that cannot be parsed also goes to the application, with the scope type `REFUSED`, and is counted and
    logged like any other. A client that closes its side of the connection counts as gone.

    Attributes:
        arrival_s: seconds within which a whole request must arrive.
        write_s: seconds within which a client with unread data must read at least 4 KiB.
    """

    arrival_s = 60.0
    write_s = 30.0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._app = self.app
        # Requests without a complete response; the first one is being answered.
        self._cycles: deque[RequestResponseCycle] = deque()
        self._ahead = bytearray()
        self._in_head = False
        self._in_body = False
        self._head_bytes = 0
        self._since_body = 0
        self._dropped_bytes = 0
        # An upgrade was not accepted, and a second parser reads the request's body.
        self._resuming = False
        # All further data is dropped.
        self._ended = False
        self._arrival: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the first request."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the requests of this connection."""
        self._ended = True
        self._stop_waiting()
        self._stop_keep_alive()
        self._stop_reader_watch()
        self._disconnect()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """Treat a client that closes its side as gone."""
        self._disconnect()
        self._watch_reader()

    def data_received(self, data: bytes) -> None:
        """Parse the data, or keep it while a whole request waits for its response."""
        self._stop_keep_alive()
        rest = memoryview(data)
        while rest and not self._ended:
            if self._is_busy():
                self._ahead += rest
                if len(self._ahead) > _MAX_AHEAD_BYTES:
                    self.flow.pause_reading()
                return
            size = _BODY_PIECE_BYTES if self._in_body else _HEAD_PIECE_BYTES
            self._feed(rest[:size])
            rest = rest[size:]
        if not self._cycles and self._arrival is None and not self._ended:
            self._await_request()

    def pause_writing(self) -> None:
        """The client reads too slowly; watch it."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """The client has read."""
        super().resume_writing()
        self._stop_reader_watch()

    def shutdown(self) -> None:
        """Take no further request."""
        super().shutdown()
        if self.transport.is_closing():
            self._watch_reader()

    def on_response_complete(self) -> None:
        """A response is complete; continue with the next request."""
        self._cycles.popleft().scope.pop("extensions", None)
        super().on_response_complete()
        if self.transport.is_closing():
            self._watch_reader()
            return
        if self._is_busy():
            return
        if (self._in_head or self._in_body) and self._arrival is None:
            self._await_request()
        if self._ahead:
            data = bytes(self._ahead)
            self._ahead.clear()
            self.data_received(data)

    def timeout_keep_alive_handler(self) -> None:
        """No further request came."""
        super().timeout_keep_alive_handler()
        self._watch_reader()

    def on_message_begin(self) -> None:
        """A request begins to arrive."""
        if self._resuming:
            return
        if self._ended:
            raise MalformedRequest("This connection takes no further request")
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = 0
        if not self._cycles:
            self._await_request()

    def on_url(self, url: bytes) -> None:
        """A part of the request's URL."""
        if not self._resuming:
            super().on_url(url)
            if len(self.url) > MAX_URL_BYTES:
                raise UriTooLong(f"The request URL is longer than {MAX_URL_BYTES} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header. Trailers are ignored."""
        if self._resuming or not self._in_head:
            return
        self._head_bytes += len(name) + len(value)
        if len(self.headers) >= MAX_HEADERS:
            raise HeadTooLarge(f"The request has more than {MAX_HEADERS} headers")
        if self._head_bytes > MAX_HEAD_BYTES:
            raise HeadTooLarge(f"The request headers are longer than {MAX_HEAD_BYTES} bytes")
        # The parser keeps spaces after a value; they are not part of it (RFC 9110, 5.5).
        super().on_header(name, value.rstrip(b" \t"))

    def on_headers_complete(self) -> None:
        """Start the application, unless the head is refused."""
        if self._resuming:
            return
        version = self.parser.get_http_version()
        check_framing(version, self.headers)
        self.url = origin_form(self.url, self.headers, self.root_path)
        if version == "1.0":
            self.expect_100_continue = False
        self._add_request(version)
        if self.expect_100_continue:
            # The client may omit the body after a refusal, so its next request would have no known start.
            self.cycle.keep_alive = False
        self._in_body = True
        self._dropped_bytes = 0

    def on_body(self, body: bytes) -> None:
        """A part of a body. The application limits its size."""
        self._since_body = 0
        super().on_body(body)
        if self.cycle.response_complete:
            self._dropped_bytes += len(body)
            if self._dropped_bytes > _MAX_DROPPED_BYTES:
                self.transport.close()

    def on_message_complete(self) -> None:
        """A request is whole."""
        if self.parser.should_upgrade() and not self._resuming:
            return
        self._since_body = 0
        self._in_body = False
        self._stop_waiting()
        super().on_message_complete()
        if not self.cycle.keep_alive:
            self._ended = True

    def _is_busy(self) -> bool:
        """Whether a whole request waits for its response."""
        return len(self._cycles) > 1 or (bool(self._cycles) and not self._in_body)

    def _feed(self, piece: memoryview) -> None:
        # Lines and headers collect in the parser until they are whole, so they are counted here.
        self._since_body += len(piece)
        upgrade_at = None
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            upgrade_at = upgrade.args[0]
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            if not isinstance(cause, InvalidRequest):
                logger.error("a parser callback failed", exc_info=cause)
                cause = MalformedRequest("The request cannot be read")
            self._refuse(cause)
        except httptools.HttpParserError as error:
            self._refuse(MalformedRequest(f"The request is not valid HTTP/1.1: {error}"))
        if self._since_body > MAX_HEAD_BYTES:
            self._refuse(HeadTooLarge(f"The request headers are longer than {MAX_HEAD_BYTES} bytes"))
        if upgrade_at is not None and not self._ended:
            self._ignore_upgrade(piece[upgrade_at:])

    def _ignore_upgrade(self, rest: memoryview) -> None:
        """Read the body of a request that asked for another protocol; its parser stops behind the head."""
        lengths = [
            b"%b: %b\r\n" % (name, value)
            for name, value in self.headers
            if name in (b"content-length", b"transfer-encoding")
        ]
        self.parser = httptools.HttpRequestParser(self)
        self._resuming = True
        try:
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(lengths) + b"\r\n")
        finally:
            self._resuming = False
        if rest:
            self._feed(rest)

    def _add_request(self, version: str) -> None:
        """Give the parsed head to the application, behind the requests before it."""
        self.app = self._answer_until_close if version == "1.0" else self._app
        super().on_headers_complete()
        cast("Scope", self.cycle.scope)["extensions"] = {CHUNKS: ChunkSender(self, self.cycle)}
        self._cycles.append(self.cycle)
        self._in_head = False
        # uvicorn pauses behind a second request, and would not see the client leave.
        self.flow.resume_reading()

    async def _answer_until_close(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a client of HTTP/1.0, which does not know chunks: the end of the connection ends a stream."""
        sender: ChunkSender = scope["extensions"][CHUNKS]
        cycle = sender.cycle

        async def send_plain(message: Any) -> None:
            if message["type"] == "http.response.start":
                if not any(name.lower() == b"content-length" for name, _ in message.get("headers", ())):
                    cycle.chunked_encoding = False
                    sender.until_close = message["status"] not in (204, 304) and scope["method"] != "HEAD"
            elif sender.until_close:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, send_plain)

    def _refuse(self, error: InvalidRequest) -> None:
        """Answer the arriving request with an error after the requests before it, and drop all further data."""
        if self._ended:
            return
        self._stop_waiting()
        if self._in_body:
            self._ended = True
            cycle, scope = self.cycle, cast("Scope", self.cycle.scope)
            cycle.keep_alive = False
            scope[FAULT] = error
            cycle.message_event.set()
            if cycle.response_complete:
                self.transport.close()
            return
        begun = self._in_head and bool(self.url)
        method = self.parser.get_method().decode("ascii") if begun else ""
        url, headers = (self.url[:MAX_URL_BYTES], self.headers) if begun else (b"", [])
        super().on_message_begin()
        self.url, self.headers[:] = b"/", headers
        self.parser = httptools.HttpRequestParser(self)
        self._resuming = True
        self.parser.feed_data(b"POST / HTTP/1.0\r\ncontent-length: 1\r\n\r\n")
        self._resuming = False
        self._add_request("1.1")
        path = url.partition(b"?")[0].decode("ascii", "replace")
        cast("Scope", self.cycle.scope).update({"type": REFUSED, REFUSED: error, "method": method, "path": path})
        self.cycle.more_body = False
        self._ended = True

    def _disconnect(self) -> None:
        self._ahead.clear()
        for cycle in self._cycles:
            cycle.disconnected = True
            cycle.message_event.set()
            cycle.scope.pop("extensions", None)
        self.flow.resume_writing()

    def _await_request(self) -> None:
        self._stop_waiting()
        self._arrival = self.loop.call_later(self.arrival_s, self._expire)

    def _stop_keep_alive(self) -> None:
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None

    def _stop_waiting(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def _expire(self) -> None:
        self._arrival = None
        if self._in_head or self._in_body:
            self._refuse(RequestTimeout(f"The request did not arrive within {self.arrival_s:g} seconds"))
        else:
            self.transport.close()

    def _watch_reader(self) -> None:
        """Drop the client unless it goes on reading. A connection that is being closed waits for that too."""
        if self._unread is None:
            self._unread = self.loop.call_later(self.write_s, self._check_reader, self._unread_bytes())

    def _stop_reader_watch(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _check_reader(self, before: int) -> None:
        self._unread = None
        if before - self._unread_bytes() >= _MIN_READ_BYTES:
            self._watch_reader()
        else:
            self.transport.abort()

    def _unread_bytes(self) -> int:
        """Bytes that the client has not taken, in our buffer and in the kernel's, which may hold megabytes."""
        queued = bytes(4)
        with contextlib.suppress(OSError, ValueError):
            queued = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued)
        return self.transport.get_write_buffer_size() + int.from_bytes(queued, sys.byteorder)
