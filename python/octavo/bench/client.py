"""A small HTTP client that streams completions and times every piece."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

from octavo.errors import ConfigError

__all__ = ["Endpoint", "Key", "Timing", "find_key", "find_served"]

_OK = 200
_CONNECT_SECONDS = 10.0
_LIST_SECONDS = 30.0
# An answer may wait behind many others before its first token.
_SILENT_SECONDS = 600.0
_LONGEST_MESSAGE = 300
_NO_ENDPOINT = "--base-url is to be the address of an OpenAI endpoint, such as http://127.0.0.1:8000"

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


@dataclass(frozen=True)
class Key:
    """An API key.

    Attributes:
        text: the key.
        source: where it was given, for messages.
    """

    text: str = field(repr=False)
    source: str


class _Model(msgspec.Struct):
    id: str
    max_model_len: Any = None


class _Models(msgspec.Struct):
    data: list[_Model]


_decode_models = msgspec.json.Decoder(_Models).decode


class Endpoint:
    """An OpenAI endpoint.

    Args:
        base_url: such as `http://127.0.0.1:8000`; `/v1` at its end is ignored.
        key: sent with every request.

    Raises:
        ConfigError: no HTTP address.
    """

    def __init__(self, base_url: str, key: Key | None = None) -> None:
        parts = urlsplit(base_url if "//" in base_url else f"http://{base_url}")
        try:
            port = parts.port or 80
        except ValueError:
            port = 0
        if parts.scheme != "http" or not parts.hostname or not port:
            raise ConfigError(f"base_url: {base_url!r} is no address such as http://127.0.0.1:8000 (without TLS)")
        self._host, self._port = parts.hostname, port
        self._authority = f"[{self._host}]:{port}" if ":" in self._host else f"{self._host}:{port}"
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._key = key

    async def models(self) -> dict[str, int | None]:
        """The names that are served, one at least, with the context of each where it is told.

        Raises:
            ConfigError: there is no such server, it refuses to tell, or it has no models.
        """
        response = await self._exchange("GET", "/v1/models", b"", _LIST_SECONDS)
        url = self._url("/v1/models")
        try:
            entries = _decode_models(response.body).data
        except msgspec.DecodeError:
            raise ConfigError(f"{url} answers with no list of models; {_NO_ENDPOINT}") from None
        if not entries:
            raise ConfigError(f"{url} lists no model; load one there first")
        return {entry.id: entry.max_model_len if isinstance(entry.max_model_len, int) else None for entry in entries}

    async def complete(self, model: str, prompt: Sequence[int], max_tokens: int) -> Timing:
        """Stream one greedy completion of exactly `max_tokens` tokens.

        Raises:
            ConfigError: the server refused, failed, or gave another number of tokens.
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
        response = await self._exchange("POST", "/v1/completions", body, _SILENT_SECONDS)
        url = self._url("/v1/completions")
        if response.error is not None:
            raise ConfigError(f"{url} failed in the middle of an answer: {_clipped(response.error)}; see its log")
        if not response.pieces:
            raise ConfigError(f"{url} answered 200 without a stream of completion chunks; {_NO_ENDPOINT}")
        if response.tokens is None:
            raise ConfigError(
                f"{url} streamed no `usage`, by which tokens are counted; the bench needs a server that obeys "
                "`stream_options.include_usage`"
            )
        if response.tokens != max_tokens:
            raise ConfigError(
                f"{url} gave {response.tokens} tokens instead of {max_tokens}; the bench needs a server that obeys "
                "`ignore_eos` and `min_tokens`"
            )
        return Timing(response.pieces, response.end, response.tokens)

    def _url(self, path: str) -> str:
        return f"http://{self._authority}{self._path}{path}"

    async def _exchange(self, method: str, path: str, body: bytes, patience: float) -> _Response:
        """One request and its whole answer.

        Args:
            method: of HTTP.
            path: below the address.
            body: JSON.
            patience: seconds that the server may be silent.

        Raises:
            ConfigError: there is no answer, or one that is not 200.
        """
        url = self._url(path)
        begin = time.perf_counter()
        response = _Response(begin)
        try:
            opening = asyncio.open_connection(self._host, self._port)
            reader, writer = await asyncio.wait_for(opening, _CONNECT_SECONDS)
        except (OSError, asyncio.TimeoutError) as error:
            why = str(error) or f"not within {_CONNECT_SECONDS:.0f} s"
            raise ConfigError(f"base_url: nothing answers at {self._authority} ({why}); start a server there") from None
        watch = _SilenceWatch(writer, patience)
        try:
            writer.write(self._head(method, path, len(body)) + body)
            while not response.complete:
                data = await reader.read(1 << 16)
                if not data:
                    break
                watch.heard()
                response.parser.feed_data(data)
        except OSError as error:
            raise ConfigError(f"{url} broke the connection ({error}); see its log") from None
        except httptools.HttpParserError:
            raise ConfigError(f"{url} answers with what is no HTTP, or no stream of JSON; {_NO_ENDPOINT}") from None
        finally:
            watch.stop()
            writer.close()
        if watch.gave_up:
            raise ConfigError(f"{url} said nothing for {patience:g} s; see its log")
        response.end = time.perf_counter() - begin
        status = response.status
        if status and status != _OK:
            raise ConfigError(self._refusal(url, status, response))
        if not status or (response.framed and not response.complete):
            raise ConfigError(f"{url} closed the connection before the end of its answer; see its log")
        return response

    def _head(self, method: str, path: str, size: int) -> bytes:
        lines = [
            f"{method} {self._path}{path} HTTP/1.1",
            f"Host: {self._authority}",
            "Connection: close",
            "Content-Type: application/json",
            f"Content-Length: {size}",
        ]
        if self._key is not None:
            lines.append(f"Authorization: Bearer {self._key.text}")
        return "\r\n".join([*lines, "", ""]).encode()

    def _refusal(self, url: str, status: int, response: _Response) -> str:
        try:
            phrase = f"{status} {HTTPStatus(status).phrase}"
        except ValueError:
            phrase = str(status)
        said = _message(response.body)
        return f"{url} answered {phrase}{': ' if said else ''}{said}; {self._remedy(status, response.location)}"

    def _remedy(self, status: int, location: str) -> str:
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            if self._key is not None:
                return f"the key of {self._key.source} is not one that it takes for this"
            return "give a key with --api-key, or in OCTAVO_API_KEY or OPENAI_API_KEY in the environment"
        if status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
            return "it takes no more for now: try later, or with a lower --concurrency or --request-rate"
        if status in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED):
            return _NO_ENDPOINT
        if status < HTTPStatus.BAD_REQUEST:
            return f"give the address that it points to{', ' if location else ''}{location}"
        if status < HTTPStatus.INTERNAL_SERVER_ERROR:
            return "the workload does not suit this server: another one may, or other limits there"
        return "see its log"


def find_key(given: str | None) -> Key | None:
    """The key to send: the one given, else the first of `OCTAVO_API_KEY`, else that of `OPENAI_API_KEY`.

    Raises:
        ConfigError: it cannot be sent in a header.
    """
    for source, text in (
        ("--api-key", given),
        ("OCTAVO_API_KEY", os.environ.get("OCTAVO_API_KEY", "").partition(",")[0]),
        ("OPENAI_API_KEY", os.environ.get("OPENAI_API_KEY")),
    ):
        key = (text or "").strip()
        if key and not (key.isascii() and key.isprintable() and " " not in key):
            raise ConfigError(f"api_key: the one of {source} holds something else than visible ASCII characters")
        if key:
            return Key(key, source)
    return None


def find_served(base_url: str, model: str | None, api_key: str | None, context: int, workload: str) -> str:
    """The model to ask a server for: the one named, else the first that it lists.

    Args:
        base_url: of the server.
        model: its name; None for the first one.
        api_key: of the server; None for that of the environment.
        context: tokens of the longest request.
        workload: name of the bench, for messages.

    Raises:
        ConfigError: there is no such server, or no such model, or its context is too short for the workload.
    """
    endpoint = Endpoint(base_url, find_key(api_key))
    served = asyncio.run(endpoint.models())
    name = next(iter(served)) if model is None else model
    if name not in served:
        raise ConfigError(f"model: {name!r} is not served at {base_url}; there are {_clipped(', '.join(served))}")
    most = served[name]
    if most is not None and most < context:
        raise ConfigError(
            f"base_url: {name} at {base_url} has a context of {most} tokens, the longest request of "
            f"{workload} has {context}; start that server with a longer one"
        )
    return name


def _message(body: bytes) -> str:
    """The message of an error response in one short line; empty for an HTML page."""
    try:
        told = _decode(body)
    except msgspec.DecodeError:
        text = body.decode("utf-8", "replace").strip()
        return "" if text.startswith("<") else _clipped(text)
    return _clipped(told)


def _clipped(told: Any) -> str:
    for name in ("error", "message", "detail"):
        if isinstance(told, dict):
            told = told.get(name) or told
    text = told if isinstance(told, str) else msgspec.json.encode(told).decode()
    line = " ".join(text.split()).rstrip(".")
    return line if len(line) <= _LONGEST_MESSAGE else line[:_LONGEST_MESSAGE] + "..."


class _SilenceWatch:
    """Ends a connection on which nothing is heard for `patience` seconds; hearing costs no timer."""

    def __init__(self, writer: asyncio.StreamWriter, patience: float) -> None:
        self.gave_up = False
        self._transport = writer.transport
        self._patience = patience
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._timer = self._loop.call_later(patience, self._look)

    def heard(self) -> None:
        self._last = self._loop.time()

    def stop(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        left = self._last + self._patience - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
            return
        self.gave_up = True
        self._transport.abort()


class _Response:
    """Parses one response as it arrives; httptools calls the `on_` methods."""

    def __init__(self, begin: float) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.complete = False
        self.body = b""
        self.pieces: list[float] = []
        self.tokens: int | None = None
        self.error: Any = None
        self.framed = False
        self.location = ""
        self.end = 0.0
        self._begin = begin
        self._events = False
        self._rest = b""

    @property
    def status(self) -> int:
        """The HTTP status; 0 before there is one."""
        return int(self.parser.get_status_code())

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self._events |= name == b"content-type" and value.startswith(b"text/event-stream")
        # Without either, the end of the connection is that of the body.
        self.framed |= name in (b"content-length", b"transfer-encoding")
        if name == b"location":
            self.location = value.decode("latin-1")

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
