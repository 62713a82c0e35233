"""HTTP over plain ASGI: reads a request's body within its limit, and sends a JSON response or a stream of events."""

from __future__ import annotations

import random
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec
from starlette.responses import Response

from octavo.server.error_responses import BodyTooLarge, describe

__all__ = [
    "CHUNKS",
    "ERROR_CODE",
    "EVENTS",
    "FAULT",
    "REFUSED",
    "ClientGone",
    "ErrorFormat",
    "Receive",
    "Reply",
    "Scope",
    "Send",
    "header",
    "json_response",
    "read_body",
    "refuse",
    "request_id_of",
    "wait_gone",
]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

CHUNKS = "octavo.chunks"
"""Key of a request's `ChunkSender` in the extensions of its ASGI scope."""

ERROR_CODE = "octavo.error_code"
"""Scope key of the code of the error that `refuse` answered with."""

FAULT = "octavo.fault"
"""Scope key of the error that keeps the rest of a request's body from arriving."""

REFUSED = "octavo.refused"
"""Scope type of a request that cannot be parsed. The same key of the scope holds the error to answer with."""

# Not for secrets. The random numbers of the system would release the GIL, and the text threads compete for it.
_fresh = random.Random().getrandbits  # noqa: S311
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_JSON = [(b"content-type", b"application/json")]
EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_encoder = msgspec.json.Encoder()


class ErrorFormat:
    """Format of a route's errors: OpenAI's by default. `error` is the object from `describe`."""

    def status(self, status: int, error: dict[str, Any]) -> int:
        """The status of the response."""
        return status

    def body(self, status: int, error: dict[str, Any]) -> Any:
        """The JSON value of the response."""
        return {"error": error}

    def last_event(self, status: int, error: dict[str, Any]) -> bytes:
        """The last event of a stream that has begun."""
        payload = {"error": {**error, "code": error["code"] or status}}
        return b"data: " + _encoder.encode(payload) + b"\n\ndata: [DONE]\n\n"


class ClientGone(Exception):
    """The client left before its request was read."""


def header(scope: Scope, name: bytes) -> str | None:
    """The first header with a name, which must be in lower case."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value).decode("latin-1")
    return None


def request_id_of(scope: Scope) -> str:
    """The client's `X-Request-Id` if it is valid, else a new one."""
    given = header(scope, b"x-request-id")
    return given if given and _REQUEST_ID.fullmatch(given) else f"{_fresh(128):032x}"


async def read_body(scope: Scope, receive: Receive, limit: int, take: Callable[[int], None] | None = None) -> bytes:
    """The whole body of a request.

    Args:
        scope: ASGI's.
        receive: ASGI's.
        limit: maximum number of bytes.
        take: called with the number of bytes of each part before it is kept; may raise.

    Raises:
        BodyTooLarge, ClientGone.
        InvalidRequest: the rest of the body is malformed or does not arrive.
    """
    declared = header(scope, b"content-length")
    if declared and declared.isdigit() and int(declared) > limit:
        raise BodyTooLarge(f"The body has {declared} bytes and the limit is {limit}; send less")
    parts = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        fault: Exception | None = scope.get(FAULT)
        if fault is not None:
            raise fault
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise BodyTooLarge(f"The body is longer than the limit of {limit} bytes; send less")
        if take is not None:
            take(len(part))
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def wait_gone(receive: Receive) -> None:
    """Return once the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def refuse(scope: Scope, send: Send, error: BaseException) -> None:
    """Answer a request with an error, without reading its body."""
    status, payload, headers = describe(error)
    scope[ERROR_CODE] = payload["error"]["code"]
    await Reply(send).json(payload, status, headers)


def json_response(payload: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A Starlette response of one JSON value."""
    return Response(msgspec.json.encode(payload), status, headers, "application/json")


def _no_chunks(_: bytes) -> bool:
    return False


class Reply:
    """The response to one request: one JSON object, or a stream of server-sent events.

    Attributes:
        status: of the response; 0 until it has begun.
        streaming: whether events are being sent.
        num_events: number of sends of the stream so far, to detect silence.
        errors: format of errors from now on.
        headers: of any response; lower case.
        error_code: code of the error in the response.
    """

    def __init__(
        self,
        send: Send,
        headers: list[tuple[bytes, bytes]] | None = None,
        errors: ErrorFormat | None = None,
        chunks: Callable[[bytes], bool] | None = None,
    ) -> None:
        self._send = send
        self._chunks = chunks or _no_chunks
        self.headers = headers or []
        self.errors = errors or ErrorFormat()
        self.status = 0
        self.streaming = False
        self.num_events = 0
        self.error_code: str | None = None

    async def json(self, payload: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        """Send one JSON value."""
        await self.body(_encoder.encode(payload), status, _JSON, headers)

    async def body(
        self,
        body: bytes,
        status: int = 200,
        fixed: list[tuple[bytes, bytes]] = _JSON,
        headers: dict[str, str] | None = None,
    ) -> None:
        """Send a whole body."""
        extra = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, [*fixed, length, *extra])
        await self._send({"type": "http.response.body", "body": body})

    async def events(self, headers: list[tuple[bytes, bytes]] = EVENTS) -> None:
        """Begin a stream of events, or of the content type in `headers`."""
        self.streaming = True
        await self._start(200, headers)

    async def event(self, data: bytes) -> None:
        """Send `data`, one or several framed events."""
        if not self.try_event(data):
            self.num_events += 1
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    def try_event(self, data: bytes) -> bool:
        """Send `data` at once, without waking a task. False if that is impossible, as the client reads too slowly."""
        if self._chunks(data):
            self.num_events += 1
            return True
        return False

    async def comment(self, data: bytes, headers: list[tuple[bytes, bytes]] = EVENTS) -> None:
        """Send `data`, a comment that keeps proxies from closing the connection. Begins the stream if necessary."""
        if not self.streaming:
            await self.events(headers)
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end_stream(self, last: bytes = b"") -> None:
        """Send `last` and end the stream."""
        await self._send({"type": "http.response.body", "body": last, "more_body": False})

    async def fail(self, error: BaseException) -> None:
        """Send an error object, within a stream as its last event."""
        status, payload, headers = describe(error)
        self.error_code = payload["error"]["code"]
        if not self.status:
            body = self.errors.body(status, payload["error"])
            await self.json(body, self.errors.status(status, payload["error"]), headers)
        elif self.streaming:
            await self.end_stream(self.errors.last_event(status, payload["error"]))

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *self.headers]})
