"""A client's connection: HTTP/1.1 over httptools, with bounds on what is sent to the server and on how slowly."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import MutableMapping
from typing import Any

import httptools

from octavo.server.error_responses import (
    HeadTooLarge,
    MalformedRequest,
    RequestTimeout,
    UriTooLong,
)
from octavo.server.transport.client_watch import PresenceWatch, ReaderWatch
from octavo.server.transport.request_cycle import CHUNKS, ChunkSender, RequestCycle
from octavo.server.transport.request_head import check_framing, target_of

__all__ = ["MAX_HEADERS", "MAX_HEAD_BYTES", "MAX_URL_BYTES", "REFUSED", "ClientConnection"]

REFUSED = "octavo.refused"
"""The type of the scope of a request that cannot be understood; the error to answer stands under the same key."""

logger = logging.getLogger("octavo.server")

MAX_HEAD_BYTES = 1 << 15
MAX_HEADERS = 100
MAX_URL_BYTES = 1 << 13
_MAX_BODY_WAITING = 1 << 16
_MAX_AHEAD = 1 << 16
# So many bytes are parsed at once: few enough that no crowd of tiny requests is made of them, and that a head that
# begins among them is not much longer than it may be.
_PIECE = 1 << 14
_LINGER_BYTES = 1 << 28
_PROBE_S = 5.0
_PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"


class ClientConnection(asyncio.Protocol):
    """Takes one request after the other, and answers them in turn.

    What comes behind a request that is being answered waits unparsed, so that nothing but the answer can get into the
    answer. Whatever cannot be understood is answered through the application too, by a scope of the type `REFUSED`, so
    that it is counted and logged as anything else.

    A client may end its side of the connection once its request is whole, and gets its answer. As one that has gone
    looks the same until something is written, it is sent an interim answer (`100 Continue`, which every client of
    HTTP/1.1 has to skip) now and then until the answer begins: one that has gone resets the connection then. Clients
    of HTTP/1.0, which know no interim answers, get `half_closed_s`. Over TLS the end of a side is the connection's.

    What waits to be sent is bounded: past the transport's high water the answer's task waits, and whoever makes the
    answer merges what comes meanwhile.

    Args:
        config: uvicorn's, of the server.
        server_state: uvicorn's: its connections, tasks and the headers of every answer.
        app_state: uvicorn's; not used.

    Attributes:
        arrival_s: seconds that a request may take to arrive.
        keep_alive_s: seconds that a connection may wait for its next request.
        write_s: seconds in which a client that has much to read must read `client_watch.MIN_READ_BYTES`.
        linger_s: seconds for which a connection that is closed while its client sends is read on, so that no reset
            overtakes the answer.
        linger_idle_s: seconds without a byte that end this.
        half_closed_s: seconds for which a client of HTTP/1.0 that has ended its side may wait for its answer's start.
        transport: of the connection.
        write_paused: the client is behind with reading.
    """

    arrival_s = 60.0
    keep_alive_s = 75.0
    write_s = 30.0
    linger_s = 30.0
    linger_idle_s = 5.0
    half_closed_s = 30.0

    transport: asyncio.Transport

    def __init__(
        self, config: Any, server_state: Any, app_state: Any, _loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self.server_state = server_state
        self.write_paused = False
        self._app = config.loaded_app
        self._root_path: str = config.root_path
        self._asgi = {"version": config.asgi_version, "spec_version": "2.3"}
        self._loop = _loop or asyncio.get_running_loop()
        self._parser: Any = httptools.HttpRequestParser(self)
        self._presence: PresenceWatch | None = None
        self._writable = asyncio.Event()
        self._answering: RequestCycle | None = None
        self._arriving: RequestCycle | None = None
        self._next: deque[RequestCycle] = deque()
        self._ahead = bytearray()
        # Of the head under way; None before its first byte.
        self._url: bytes | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        self._since_body = 0
        # The body of a message whose upgrade is not taken is read by another parser.
        self._resuming = False
        # Nothing that still comes is looked at.
        self._deaf = False
        self._dropped = 0
        self._lingering = False
        self._read_paused = False
        # The client sends no more.
        self._ended = False
        self._silent_since: float | None = None
        self._probed_at: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    # ------------------------------------------------------- the transport's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for a request."""
        self.transport = transport  # type: ignore[assignment]
        self.server_state.connections.add(self)
        peer, own = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
        self._client = (str(peer[0]), int(peer[1])) if isinstance(peer, tuple) else None
        self._server = (str(own[0]), int(own[1])) if isinstance(own, tuple) else None
        self._tls = transport.get_extra_info("sslcontext") is not None
        self._reader = ReaderWatch(self.transport, self._loop, self.write_s)
        self._wait(self.arrival_s, self._expire)

    def connection_lost(self, exc: Exception | None) -> None:
        """Whatever is being answered need not be."""
        self.server_state.connections.discard(self)
        self._deaf = True
        self._stop_waiting()
        self._watch_no_more()
        self._next.clear()
        self._ahead.clear()
        for cycle in (self._answering, self._arriving):
            if cycle is not None:
                cycle.leave()
        # What refers to each other would be kept until the next full garbage collection.
        self._answering = self._arriving = self._parser = None
        self.resume_writing()

    def eof_received(self) -> bool:
        """The client sends no more: it has gone, or it has asked all it wants to ask."""
        answering = self._answering
        if self._tls or self._lingering or answering is None or answering is self._arriving:
            return False
        self._ended = True
        self._watch_no_more()
        self._watch()
        return True

    def data_received(self, data: bytes) -> None:
        """Parse, unless a whole request waits for its answer."""
        if self._deaf:
            self._drop(len(data))
        elif self._ahead or self._is_busy():
            self._keep(data)
        else:
            self._parse(data)

    def pause_writing(self) -> None:
        """The client reads more slowly than it is answered."""
        self.write_paused = True
        self._writable.clear()
        self._reader.start()

    def resume_writing(self) -> None:
        """It has read."""
        self.write_paused = False
        self._writable.set()
        self._reader.stop()

    # ------------------------------------------------------- the server's and the cycles' calls

    def shutdown(self) -> None:
        """Take no further request."""
        if self._answering is None or self._lingering:
            self._close()
        else:
            self._answering.keep_alive = False

    async def drain(self) -> None:
        """Return once the client has read."""
        await self._writable.wait()

    def read_on(self) -> None:
        """Read from the client again, unless enough waits."""
        if self._read_paused and len(self._ahead) <= _MAX_AHEAD and not self.transport.is_closing():
            self._read_paused = False
            self.transport.resume_reading()

    def on_answered(self, cycle: RequestCycle) -> None:
        """An answer has been written: another request's turn has come, or the connection's end."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            self._reader.start()
            return
        self._answering = None
        if not cycle.keep_alive:
            self._finish(clean=cycle.whole)
            return
        if self._next:
            self._start(self._next.popleft())
        if self._ahead and not self._is_busy():
            # Also where the next request's turn has come and the rest of its body is among it.
            data = bytes(self._ahead)
            self._ahead.clear()
            self._parse(data)
        if self._ended and self._answering is self._arriving:
            # Nothing is left to answer, or what is will never be whole.
            self._close()
        elif self._answering is None:
            self._watch_no_more()
            if self._url is None:
                self._wait(self.keep_alive_s, self._close)
            else:
                self._wait(self.arrival_s, self._expire)
        if not self._ahead:
            self.read_on()

    # ------------------------------------------------------- the parser's calls

    def on_message_begin(self) -> None:
        """A request has begun to arrive."""
        if self._resuming or self._deaf:
            return
        self._url = b""
        self._headers = []
        self._head_bytes = 0
        if self._answering is None:
            self._wait(self.arrival_s, self._expire)

    def on_url(self, url: bytes) -> None:
        """The request's target, or a part of it."""
        if self._resuming or self._deaf or self._url is None:
            return
        self._url += url
        if len(self._url) > MAX_URL_BYTES:
            self._refuse(UriTooLong(f"The request's URL is longer than {MAX_URL_BYTES} bytes"))

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header; those behind a body are nobody's."""
        if self._resuming or self._deaf or self._arriving is not None:
            return
        self._head_bytes += len(name) + len(value)
        if len(self._headers) >= MAX_HEADERS:
            self._refuse(HeadTooLarge(f"The request has more than {MAX_HEADERS} headers"))
        elif self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(HeadTooLarge(f"The request's headers are longer than {MAX_HEAD_BYTES} bytes"))
        else:
            # The parser leaves blanks behind a value, which are none of it (RFC 9110, 5.5).
            self._headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        """The application may begin, unless the request is refused."""
        if self._resuming or self._deaf:
            return
        scope: MutableMapping[str, Any] = {"type": "http"}
        version = self._parser.get_http_version()
        try:
            expects_continue = check_framing(version, self._headers)
            self._fill(scope, target_of(self._url or b"", self._headers, self._root_path))
        except MalformedRequest as error:
            self._refuse(error)
            return
        scope["http_version"] = version
        cycle = RequestCycle(
            self,
            scope,
            keep_alive=version == "1.1" and self._parser.should_keep_alive(),
            expects_continue=expects_continue,
        )
        scope["extensions"] = {CHUNKS: ChunkSender(self, cycle)}
        self._url = None
        self._arriving = cycle
        self._add(cycle)

    def on_body(self, body: bytes) -> None:
        """A part of a body, whose limit is the application's."""
        self._since_body = 0
        if self._arriving is None or self._deaf:
            return
        if self._arriving.add(body) > _MAX_BODY_WAITING:
            self._pause_reading()

    def on_message_complete(self) -> None:
        """All of a request is here."""
        if self._arriving is None or self._deaf or (self._parser.should_upgrade() and not self._resuming):
            return
        self._since_body = 0
        self._stop_waiting()
        cycle, self._arriving = self._arriving, None
        cycle.end()
        if not cycle.keep_alive:
            self._deaf = True

    # ------------------------------------------------------- what comes in

    def _is_busy(self) -> bool:
        return self._answering is not None and self._answering.whole

    def _parse(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            if self._deaf:
                self._drop(len(rest))
                return
            if self._is_busy():
                self._keep(rest)
                return
            size = _PIECE if self._arriving is None else _MAX_BODY_WAITING
            self._feed(rest[:size])
            rest = rest[size:]

    def _feed(self, piece: memoryview) -> None:
        # Counted by hand: lines and headers pile up in the parser until they are whole.
        self._since_body += len(piece)
        try:
            self._parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(piece[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            if isinstance(error, httptools.HttpParserCallbackError):
                logger.error("a request could not be taken", exc_info=error.__context__)
            self._refuse(MalformedRequest(f"The request is not HTTP/1.1: {error}"))
        if self._since_body > MAX_HEAD_BYTES:
            self._refuse(HeadTooLarge(f"The request's headers are longer than {MAX_HEAD_BYTES} bytes"))

    def _ignore_upgrade(self, rest: memoryview) -> None:
        """Read on as if the request had asked for no other protocol: its parser takes its head for its end."""
        if self._arriving is None or self._deaf:
            return
        lengths = [
            b"%b: %b\r\n" % (name, value)
            for name, value in self._arriving.scope["headers"]
            if name in (b"content-length", b"transfer-encoding")
        ]
        self._parser = httptools.HttpRequestParser(self)
        self._resuming = True
        try:
            self._parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(lengths) + b"\r\n")
        finally:
            self._resuming = False
        if rest:
            self._feed(rest)

    def _keep(self, data: bytes | memoryview) -> None:
        """Keep what came too early."""
        self._ahead += data
        if len(self._ahead) > _MAX_AHEAD:
            self._pause_reading()
            self._watch()

    def _drop(self, count: int) -> None:
        self._dropped += count
        if self._dropped > _LINGER_BYTES:
            if self._lingering:
                self._close()
            else:
                self._pause_reading()
                self._watch()

    def _pause_reading(self) -> None:
        if not self._read_paused and not self.transport.is_closing():
            self._read_paused = True
            self.transport.pause_reading()

    def _refuse(self, error: Exception) -> None:
        """Answer what arrives with an error, once what came before is answered, and look at nothing more."""
        if self._deaf:
            return
        self._deaf = True
        self._stop_waiting()
        if self._arriving is not None:
            self._arriving.fail(error)
            self._arriving = None
            return
        scope: MutableMapping[str, Any] = {"type": REFUSED, REFUSED: error, "http_version": "1.1"}
        url = (self._url or b"")[:MAX_URL_BYTES]
        path = url.partition(b"?")[0].decode("ascii", "replace")
        self._fill(scope, (path, b"", b""))
        if not url:
            scope["method"] = ""
        self._add(RequestCycle(self, scope, keep_alive=False))

    def _fill(self, scope: MutableMapping[str, Any], target: tuple[str, bytes, bytes]) -> None:
        path, raw_path, query = target
        scope.update(
            asgi=self._asgi,
            server=self._server,
            client=self._client,
            scheme="https" if self._tls else "http",
            method=self._parser.get_method().decode("ascii"),
            root_path=self._root_path,
            path=path,
            raw_path=raw_path,
            query_string=query,
            headers=self._headers,
        )

    def _add(self, cycle: RequestCycle) -> None:
        if self._answering is None:
            self._start(cycle)
        else:
            self._next.append(cycle)

    def _start(self, cycle: RequestCycle) -> None:
        self._answering = cycle
        tasks = self.server_state.tasks
        task = self._loop.create_task(cycle.run(self._app))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        if cycle is self._arriving and self._timer is None:
            self._wait(self.arrival_s, self._expire)

    # ------------------------------------------------------- waiting, and the end

    def _wait(self, seconds: float, then: Any) -> None:
        self._stop_waiting()
        self._timer = self._loop.call_later(seconds, then)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        if self._url is None and self._arriving is None:
            self._close()
        else:
            self._refuse(RequestTimeout(f"The request was not whole within {self.arrival_s:g} seconds"))

    def _watch(self) -> None:
        """Watch whether the client is there."""
        if self._presence is None:
            self._presence = PresenceWatch(self.transport, self._loop, self._probe)
            self._presence.start()

    def _watch_no_more(self) -> None:
        if self._presence is not None:
            self._presence.stop()
            self._presence = None

    def _probe(self) -> bool:
        """Let a client show whether it is still there, where the answer's bytes do not; see `PresenceWatch`."""
        cycle = self._answering
        if cycle is None or cycle.started:
            return True
        now = self._loop.time()
        if cycle.scope["http_version"] == "1.0":
            self._silent_since = self._silent_since or now
            return now - self._silent_since < self.half_closed_s
        if self._probed_at is None and not self._ended:
            # It is only far ahead with its requests.
            self._probed_at = now
        if self._probed_at is None or now - self._probed_at >= _PROBE_S:
            self._probed_at = now
            self.transport.write(_PROBE)
        return True

    def _finish(self, *, clean: bool) -> None:
        """Close after the last answer; while the client sends, read on first, lest a reset overtake the answer."""
        self._deaf = True
        self._next.clear()
        self._watch_no_more()
        unread = not clean or self._ahead or self._dropped or self._read_paused
        self._ahead.clear()
        self._arriving = None
        if not unread or self._ended:
            self._close()
            return
        self._lingering = True
        self._dropped = 0
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._reader.start()
        self.read_on()
        self._linger(self._loop.time() + self.linger_s, -1)

    def _linger(self, until: float, dropped: int) -> None:
        now = self._loop.time()
        if now >= until or dropped == self._dropped:
            self._close()
        else:
            seen = self._dropped
            self._wait(min(self.linger_idle_s, until - now), lambda: self._linger(until, seen))

    def _close(self) -> None:
        self._stop_waiting()
        self._watch_no_more()
        if not self.transport.is_closing():
            self.transport.close()
            self._reader.start()
