"""`octavo serve` as a process of its own, and clients that take down how each of their requests ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import psutil

__all__ = ["Outcome", "ServerProcess", "ask", "exchange", "free_port", "request_bytes", "wait_until"]

_READY = re.compile(r'"msg":"ready",.*"address":"http://127\.0\.0\.1:(\d+)"(?:,"admin_address":"([^"]+)")?')
_SAMPLE = re.compile(r"^([\w:]+)(?:\{(.*)\})? (\S+)$", re.M)
_START_S = 40.0
ADMIN_KEY = "a-key-for-the-admin-listener-of-tests"


def wait_until(condition: Callable[[], Any], seconds: float, what: str) -> None:
    """Return once the condition holds.

    Raises:
        AssertionError: not in time.
    """
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)


class ServerProcess:
    """A server of a fake model on a free port of 127.0.0.1.

    Args:
        model: with options of the fake and a name other than `fake`, as in `chat@v1=fake?step_ms=5`.
        options: of `octavo serve`.
        port: to listen on; then the model may still be loading. 0: any free one, and the model is loaded.

    Attributes:
        port: it listens on.
        output: what it has written so far, both streams.
    """

    def __init__(self, model: str = "fake", options: Sequence[str] = (), port: int = 0) -> None:
        command = [sys.executable, "-m", "octavo", "serve", model, "--load-format", "fake", "--port", str(port)]
        command += [] if "=" in model.partition("?")[0] else ["--served-model-name", "fake"]
        command += ["--no-access-log", "--drain-delay", "0", *options]
        environment = os.environ | {"OCTAVO_ADMIN_KEY": ADMIN_KEY}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        self.output = ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        if port:
            self.port = port
            return
        if not self._ready.wait(_START_S) or (found := _READY.search(self.output)) is None:
            self.kill()
            raise AssertionError(f"the server did not start:\n{self.output}")
        self.port = int(found.group(1))

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.output += line
                if _READY.search(line):
                    self._ready.set()
        self._ready.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def workers(self) -> list[psutil.Process]:
        """The engines' processes."""
        return self._children("octavo.engine.worker")

    @property
    def siblings(self) -> list[psutil.Process]:
        """The other processes that answer HTTP."""
        return self._children("octavo.cli.api_process")

    def _children(self, module: str) -> list[psutil.Process]:
        found = []
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if module in child.cmdline():
                    found.append(child)
        return found

    @property
    def worker(self) -> psutil.Process:
        """The one engine's process."""
        (found,) = self.workers
        return found

    @property
    def rss(self) -> int:
        """Bytes of memory that the server's own process holds."""
        held: int = psutil.Process(self.process.pid).memory_info().rss
        return held

    def admin(self, method: str, path: str, payload: dict[str, Any] | None = None) -> Any:
        """What the admin listener answers.

        Raises:
            AssertionError: it refuses.
        """
        wait_until(lambda: _READY.search(self.output), 10, "the admin listener is announced")
        found = _READY.search(self.output)
        assert found is not None
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        url = f"{found.group(2)}/admin/{path}"
        done = httpx.request(method, url, headers=headers, json=payload, timeout=30)
        assert done.status_code < 300, done.text
        return done.json()

    def listens(self) -> bool:
        """Whether it takes connections."""
        with socket.socket() as connection:
            return connection.connect_ex(("127.0.0.1", self.port)) == 0

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=10)

    def status(self, path: str = "/readyz") -> int:
        return self.get(path).status_code

    def wait_ready(self, seconds: float = 30.0) -> None:
        """Return once whoever answers is ready: each connection may meet another process.

        Raises:
            AssertionError: not in time.
        """
        count = 8 * (1 + len(self.siblings))
        wait_until(lambda: all(self.status() == 200 for _ in range(count)), seconds, "ready")

    def metrics(self) -> dict[str, float]:
        """The sum of every metric over its labels, by name."""
        sums: dict[str, float] = {}
        for name, _, value in _SAMPLE.findall(self.get("/metrics").text):
            sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def check_all_free(self, seconds: float = 10.0) -> None:
        """Nothing runs or waits any more, and every block is free.

        Raises:
            AssertionError: a block or a request is left.
        """
        seen: dict[str, float] = {}

        def is_free() -> bool:
            seen.clear()
            seen.update(self.metrics())
            return (
                seen["vllm:num_requests_running"] == seen["vllm:num_requests_waiting"] == 0
                and seen["octavo_kv_cache_blocks_used"] == 0
                and seen["octavo_kv_cache_blocks_free"] == seen["octavo_kv_cache_blocks"] > 0
            )

        try:
            wait_until(is_free, seconds, "all free")
        except AssertionError:
            left = {name: value for name, value in seen.items() if "blocks" in name or "num_requests" in name}
            raise AssertionError(f"something is left: {left}") from None

    def check_serves(self) -> None:
        """It answers a request.

        Raises:
            AssertionError: it does not.
        """
        done = httpx.post(self.url + "/v1/completions", json={"prompt": "Hi", "max_tokens": 3}, timeout=20)
        assert done.status_code == 200, done.text
        assert done.json()["usage"]["completion_tokens"] == 3

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float) -> int:
        """Its exit status."""
        code = self.process.wait(seconds)
        self._reader.join(10)
        return code

    def stop(self) -> None:
        """End it as an operator would.

        Raises:
            AssertionError: it does not end, or not well.
        """
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
            try:
                code = self.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()
                raise AssertionError(f"the server does not end:\n{self.output[-3000:]}") from None
            assert code == 0, self.output[-3000:]
        self._reader.join(10)

    def kill(self) -> None:
        """End it and its engine at once."""
        try:
            children = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            children = []
        self.process.kill()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self.process.wait(10)
        self._reader.join(10)


class Outcome:
    """How one request ended, as its client saw it.

    Attributes:
        status: of the answer; 0 when the connection ended without one.
        body: of an answer that is no stream, parsed.
        events: of a stream, parsed.
        done: the stream ended with `[DONE]`.
        headers: by lower-case name.
    """

    def __init__(self) -> None:
        self.status = 0
        self.body: Any = None
        self.events: list[Any] = []
        self.done = False
        self.headers: dict[str, str] = {}

    @property
    def error(self) -> dict[str, Any] | None:
        """The error object that the client got."""
        last = self.body if self.body is not None else self.events[-1] if self.events else {}
        found: dict[str, Any] | None = last.get("error")
        return found

    @property
    def finish_reason(self) -> str | None:
        """Of a stream's answer."""
        reasons = [choice["finish_reason"] for event in self.events for choice in event.get("choices", ())]
        return next((reason for reason in reasons if reason), None)

    @property
    def is_answered(self) -> bool:
        """A whole answer, or an error that says so."""
        if self.status != 200:
            return self.status >= 400 and self.error is not None
        if self.body is not None:
            return "choices" in self.body
        return self.done and (self.error is not None or self.finish_reason is not None)

    def __repr__(self) -> str:
        return f"<{self.status} {self.error or self.finish_reason} of {len(self.events)} events, done: {self.done}>"


def request_bytes(path: str, payload: Any) -> bytes:
    """A POST request that is its connection's last."""
    body = json.dumps(payload).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


async def ask(
    port: int,
    payload: dict[str, Any],
    path: str = "/v1/completions",
    on_first: Callable[[], None] | None = None,
    seconds: float = 45.0,
) -> Outcome:
    """Send a request and follow its answer to the end.

    Args:
        on_first: called when the first of a stream's text is there.
        seconds: until the client gives up, which leaves `done` False.
    """
    outcome = Outcome()
    # What the outcome lacks then tells.
    with contextlib.suppress(OSError, asyncio.TimeoutError, asyncio.IncompleteReadError):
        await asyncio.wait_for(_follow(port, request_bytes(path, payload), outcome, on_first), seconds)
    return outcome


async def _follow(port: int, request: bytes, outcome: Outcome, on_first: Callable[[], None] | None) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        await writer.drain()
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        outcome.headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:])}
        if outcome.headers.get("transfer-encoding") != "chunked":
            outcome.body = json.loads(await reader.readexactly(int(outcome.headers["content-length"])))
            outcome.status = int(head[0].split()[1])
            return
        outcome.status = int(head[0].split()[1])
        pending = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            pending += (await reader.readexactly(size + 2))[:-2]
            *whole, pending = pending.split(b"\n\n")
            for event in whole:
                if event == b"data: [DONE]":
                    outcome.done = True
                elif event.startswith(b"data: "):
                    outcome.events.append(json.loads(event[6:]))
            if on_first is not None and outcome.events:
                on_first()
                on_first = None
    finally:
        writer.close()


async def exchange(port: int, data: bytes, seconds: float = 10.0) -> bytes:
    """Send bytes, read until the server closes; what was read, also when it did not close in time."""
    received = bytearray()

    async def follow() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(data)
            await writer.drain()
            while part := await reader.read(1 << 16):
                received.extend(part)
        finally:
            writer.close()

    with contextlib.suppress(OSError, asyncio.TimeoutError):
        await asyncio.wait_for(follow(), seconds)
    return bytes(received)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
