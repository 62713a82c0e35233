"""A small HTTP client that streams completions and times every piece."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

from octavo.errors import ConfigError

__all__ = ["Endpoint", "Timing"]

_decode = msgspec.json.Decoder().decode


class Timing(msgspec.Struct):
    """One request, in seconds since its start.

    Attributes:
        pieces: when each piece with something of the answer arrived.
        end: when the stream ended.
        tokens: of the answer, by its usage.
    """

    pieces: list[float]
    end: float
    tokens: int

    @property
    def first(self) -> float:
        """Time to the first token."""
        return self.pieces[0]

    @property
    def per_token(self) -> float:
        """Mean time a token after the first."""
        return (self.pieces[-1] - self.pieces[0]) / max(self.tokens - 1, 1)

    @property
    def gaps(self) -> list[float]:
        """Times between pieces."""
        return [after - before for before, after in zip(self.pieces, self.pieces[1:], strict=False)]


class Endpoint:
    """An OpenAI endpoint.

    Args:
        base_url: such as `http://127.0.0.1:8000`; `/v1` at its end is ignored.

    Raises:
        ConfigError: no HTTP address.
    """

    def __init__(self, base_url: str) -> None:
        parts = urlsplit(base_url if "//" in base_url else f"http://{base_url}")
        try:
            port = parts.port or 80
        except ValueError:
            port = 0
        if parts.scheme != "http" or not parts.hostname or not port:
            raise ConfigError(f"base_url: {base_url!r} is no address such as http://127.0.0.1:8000")
        self._host, self._port = parts.hostname, port
        self._path = parts.path.rstrip("/").removesuffix("/v1")

    async def first_model(self) -> str:
        """The name of the first model that is served.

        Raises:
            ConfigError: there is no such server.
        """
        response = await self._exchange("GET", "/v1/models", b"")
        return str(_decode(response.body)["data"][0]["id"])

    async def complete(self, model: str, prompt: Sequence[int], max_tokens: int) -> Timing:
        """Stream one greedy completion of exactly `max_tokens` tokens.

        Raises:
            RuntimeError: the server refused, failed, or gave another number of tokens.
        """
        body = msgspec.json.encode(
            {
                "model": model,
                "prompt": list(prompt),
                "max_tokens": max_tokens,
                "min_tokens": max_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        response = await self._exchange("POST", "/v1/completions", body)
        if response.error is not None:
            raise RuntimeError(f"the server failed: {response.error}")
        if response.tokens != max_tokens or not response.pieces:
            raise RuntimeError(f"an answer has {response.tokens} tokens instead of {max_tokens}")
        return Timing(response.pieces, response.end, response.tokens)

    async def _exchange(self, method: str, path: str, body: bytes) -> _Response:
        begin = time.perf_counter()
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port)
        except OSError as error:
            raise ConfigError(f"base_url: nothing answers at {self._host}:{self._port} ({error})") from None
        response = _Response(begin)
        try:
            head = (
                f"{method} {self._path}{path} HTTP/1.1\r\nHost: {self._host}\r\nConnection: close\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            while not response.complete:
                data = await reader.read(1 << 16)
                if not data:
                    break
                response.parser.feed_data(data)
        finally:
            writer.close()
        response.end = time.perf_counter() - begin
        status = response.parser.get_status_code()
        if status != 200:
            raise RuntimeError(f"the server answered {status}: {response.body[:300].decode('utf-8', 'replace')}")
        return response


class _Response:
    """Parses one response as it arrives; httptools calls the `on_` methods."""

    def __init__(self, begin: float) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.complete = False
        self.body = b""
        self.pieces: list[float] = []
        self.tokens = 0
        self.error: Any = None
        self.end = 0.0
        self._begin = begin
        self._events = False
        self._rest = b""

    def on_header(self, name: bytes, value: bytes) -> None:
        self._events |= name.lower() == b"content-type" and value.startswith(b"text/event-stream")

    def on_body(self, data: bytes) -> None:
        if not self._events:
            self.body += data
            return
        now = time.perf_counter() - self._begin
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            payload = event.strip().removeprefix(b"data:").strip()
            if not payload.startswith(b"{"):
                continue
            chunk = _decode(payload)
            if chunk.get("choices"):
                self.pieces.append(now)
            if chunk.get("usage"):
                self.tokens = chunk["usage"]["completion_tokens"]
            self.error = chunk.get("error") or self.error

    def on_message_complete(self) -> None:
        self.complete = True
