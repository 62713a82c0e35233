"""A load generator on raw sockets, much cheaper than the server: it counts events and reads their time stamps.

One thread, one epoll, no HTTP library. Every answer is checked as far as that is cheap: its status, its number of
tokens, and that it ends as a chunked body does.
"""

from __future__ import annotations

import json
import re
import select
import socket
import subprocess
import time
from pathlib import Path
from typing import IO, Any

__all__ = ["cpu_seconds", "load", "served_port"]

_READY = re.compile(r'"msg":"ready",.*"address":"http://127\.0\.0\.1:(\d+)"')
_STAMP = re.compile(rb"~(\d{12})")
_LENGTH = re.compile(rb"content-length: (\d+)\r\n", re.IGNORECASE)
_BUFFER = 1 << 18
_LAST = b"\r\n0\r\n\r\n"


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process so far."""
    nanoseconds = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        nanoseconds += int((task / "schedstat").read_text().split()[0])
    return nanoseconds / 1e9


def served_port(process: subprocess.Popen[Any], log: IO[str], seconds: float = 60.0) -> int:
    """Where an `octavo serve` answers, once its log says that it is ready.

    Args:
        process: the server.
        log: a file that it appends its log to, as JSON.
        seconds: to wait.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        log.seek(0)
        if found := _READY.search(log.read()):
            return int(found.group(1))
        time.sleep(0.05)
    raise SystemExit("the server did not start")


class _Client:
    """One connection, which asks again as soon as it is answered."""

    def __init__(self, port: int, request: bytes, tokens: int, stream: bool) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._request = request
        self._tokens = tokens
        self._stream = stream
        self._last = 0
        self._seen = 0
        self._begun = False
        self._left = 0
        self._tail = b""

    def ask(self) -> None:
        """Send the request."""
        self._begun, self._seen, self._tail = False, 0, b""
        self.socket.sendall(self._request)

    def take(self, data: bytes) -> tuple[int, int, bool]:
        """What came: (events, tokens, whether the answer is whole)."""
        if not self._begun:
            if not data.startswith(b"HTTP/1.1 200 "):
                raise RuntimeError(f"the server answered {data[:300]!r}")
            self._begun = True
            if not self._stream:
                self._left = data.index(b"\r\n\r\n") + 4 + int(_LENGTH.search(data).group(1))  # type: ignore[union-attr]
        tokens = data.count(b"~")
        self._seen += tokens
        if not self._stream:
            self._left -= len(data)
            return 0, tokens, self._finish(self._left == 0)
        events = data.count(b"}\n\n")
        # The end may come in two pieces.
        self._tail = (self._tail + data[-len(_LAST) :])[-len(_LAST) :]
        return events, tokens, self._finish(self._tail == _LAST)

    def _finish(self, whole: bool) -> bool:
        # Text without stamps cannot be counted.
        if whole and self._seen and self._seen != self._tokens:
            raise RuntimeError(f"an answer had {self._seen} tokens and not {self._tokens}")
        return whole


def load(
    port: int, pid: int, *, path: str, body: dict[str, Any], clients: int, tokens: int, warm_s: float, seconds: float
) -> dict[str, Any]:
    """Keep `clients` requests open for a while.

    Args:
        port: of the server, on 127.0.0.1.
        pid: of the process whose CPU time is counted.
        path: asked for.
        body: of every request.
        clients: connections.
        tokens: that every answer has.
        warm_s: seconds before anything is counted.
        seconds: that are counted.
    """
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload
    stream = bool(body.get("stream"))
    opened = [_Client(port, request, tokens, stream) for _ in range(clients)]
    epoll = select.epoll()
    by_descriptor = {}
    for client in opened:
        client.ask()
        client.socket.setblocking(False)
        epoll.register(client.socket, select.EPOLLIN)
        by_descriptor[client.socket.fileno()] = client
    delays: list[int] = []
    events = tokens_seen = answers = receives = 0
    counting = False
    begin = time.monotonic() + warm_s
    begin_cpu = begin_own = 0.0
    asked: dict[int, float] = {}
    whole_s: list[float] = []
    while True:
        now = time.monotonic()
        if not counting and now >= begin:
            counting, begin, begin_cpu, begin_own = True, now, cpu_seconds(pid), time.process_time()
            events = tokens_seen = answers = receives = 0
            delays.clear()
            whole_s.clear()
        if counting and now >= begin + seconds:
            break
        for descriptor, _ in epoll.poll(0.1):
            client = by_descriptor[descriptor]
            data = client.socket.recv(_BUFFER)
            if not data:
                raise RuntimeError("the server closed a connection")
            receives += 1
            new_events, new_tokens, whole = client.take(data)
            events += new_events
            tokens_seen += new_tokens
            if stream:
                arrived = time.monotonic_ns() // 1000
                for stamp in _STAMP.findall(data):
                    delays.append(arrived - int(stamp))
            if whole:
                answers += 1
                moment = time.monotonic()
                whole_s.append(moment - asked.get(descriptor, moment))
                asked[descriptor] = moment
                client.ask()
    elapsed = time.monotonic() - begin
    cpu = cpu_seconds(pid) - begin_cpu
    own = time.process_time() - begin_own
    for client in opened:
        client.socket.close()
    result: dict[str, Any] = {
        "seconds": elapsed,
        "answers_per_s": answers / elapsed,
        "api_cpu_share": cpu / elapsed,
        "load_cpu_share": own / elapsed,
    }
    if stream:
        result |= {
            "chunks_per_s": events / elapsed,
            "tokens_per_s": tokens_seen / elapsed if tokens_seen else None,
            "receives_per_s": receives / elapsed,
            "chunks_per_api_cpu_s": events / cpu,
            "api_cpu_us_a_chunk": cpu / events * 1e6,
        } | _spread(delays, 1e-3, "delay_ms")
    else:
        result |= {"answers_per_api_cpu_s": answers / cpu, "api_cpu_us_an_answer": cpu / answers * 1e6}
        result |= _spread(whole_s, 1e3, "whole_ms")
    return result


def _spread(values: list[Any], scale: float, name: str) -> dict[str, float]:
    if not values:
        return {}
    values = sorted(values)
    places = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {
        f"{name}_{key}": values[min(int(len(values) * share), len(values) - 1)] * scale for key, share in places.items()
    }
