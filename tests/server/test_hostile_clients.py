"""Hostile clients: random bytes, depths and sizes, incomplete requests, stalls."""

from __future__ import annotations

import contextlib
import gc
import json
import random
import socket
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from octavo.server.access.api_keys import KeyRing
from octavo.server.transport.http_protocol import HttpProtocol
from server_fakes import FakeEngine
from server_harness import Running

KEY = "a-secret-key"
PATHS = [
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize", "/detokenize", "/api/chat",
    "/api/generate", "/generate", "/v1/messages/count_tokens", "/v1/models", "/metrics", "/health", "/", "/nothing",
]  # fmt: skip
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


def values(draw: random.Random, depth: int = 0) -> Any:
    """Any JSON value."""
    plain = [
        None, True, 0, -1, 1 << 70, 1e308, 0.1, "", "x" * draw.randrange(2000), "\0", "\ud800", "e" + "\u0301" * 50, [],
        {},
        draw.random(), draw.randrange(1000), "fake", "<|im_end|>", "{{ 7 * 7 }}", "../../etc/passwd",
    ]  # fmt: skip
    if depth > 3 or draw.random() < 0.6:
        return draw.choice(plain)
    if draw.random() < 0.5:
        return [values(draw, depth + 1) for _ in range(draw.randrange(5))]
    return {str(draw.choice(plain))[:20]: values(draw, depth + 1) for _ in range(draw.randrange(5))}


FIELDS = [
    "model", "messages", "prompt", "max_tokens", "temperature", "top_p", "n", "stop", "stream", "stream_options",
    "seed",
    "logprobs", "top_logprobs", "tools", "tool_choice", "response_format", "logit_bias", "input", "inputs",
    "parameters",
    "options", "timeout", "priority", "cache_salt", "chat_template_kwargs", "system", "tokens", "echo", "suffix",
]  # fmt: skip


def body(draw: random.Random) -> bytes:
    kind = draw.randrange(8)
    if kind == 0:
        return draw.randbytes(draw.randrange(3000))
    if kind == 1:
        return draw.choice([b"[", b'{"a":', b'"', b"[[],", b"\\u", b"-", b"1e", b"nul"]) * draw.randrange(1, 20_000)
    made = CHAT | {draw.choice(FIELDS): values(draw) for _ in range(draw.randrange(4))}
    if kind == 2:
        made = {field: values(draw) for field in draw.sample(FIELDS, 8)}
    text = bytearray(json.dumps(made).encode())
    if kind == 3:
        for _ in range(3):
            text[draw.randrange(len(text))] = draw.randrange(256)
    if kind == 4:
        del text[draw.randrange(len(text)) :]
    return bytes(text)


def request(draw: random.Random) -> bytes:
    """A request as nobody should send it."""
    sent = body(draw)
    method = draw.choice(["POST"] * 12 + ["GET", "PUT", "OPTIONS", "HEAD", "TRACE", "CONNECT", "PRI", "\0"])
    lines = [f"{method} {draw.choice(PATHS)} HTTP/{draw.choice(['1.1'] * 9 + ['1.0', '2.0', '9'])}".encode()]
    lines.append(draw.choice([b"Host: localhost"] * 9 + [b"Host: evil.com", b"Host:", b"Host: " + draw.randbytes(9)]))
    lines.append(
        draw.choice([b"X-Api-Key: " + KEY.encode()] * 9 + [b"Authorization: Bearer x", b"X-Api-Key: \xff" * 50])
    )
    lines.append(draw.choice([b"Content-Type: application/json"] * 6 + [b"Content-Type: text/plain", b"X: y"]))
    lines += [
        draw.choice(
            [
                b"X-Request-Id: a\tb",
                b"X-Request-Timeout: 1e-9",
                b"X-Priority: low",
                b"Expect: 100-continue",
                b"Transfer-Encoding: chunked",
                b"Content-Length: -1",
                b"Connection: upgrade\r\nUpgrade: websocket",
                b"traceparent: 00-" + b"f" * draw.randrange(90),
                b"X" * draw.randrange(1, 5000) + b": y",
                b"no colon",
                b" folded: x",
            ]
        )
        for _ in range(draw.randrange(3))
    ]
    length = draw.choice([len(sent)] * 9 + [0, len(sent) + 5, 1 << 40])
    lines += [b"Content-Length: %d" % length, b"Connection: close"]
    return b"\r\n".join(lines) + b"\r\n\r\n" + sent


def exchange(server: Running, data: bytes, seconds: float) -> bytes:
    received = b""
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", server.port), timeout=seconds) as connection,
    ):
        connection.sendall(data)
        while part := connection.recv(1 << 16):
            received += part
    return received


def alive(server: Running) -> bool:
    sent = json.dumps(CHAT).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: {KEY}\r\nConnection: close\r\n"
    return exchange(server, head.encode() + b"Content-Length: %d\r\n\r\n" % len(sent) + sent, 10).startswith(
        b"HTTP/1.1 200"
    )


def wait_idle(server: Running) -> None:
    end = time.monotonic() + 5
    while server.engine.running or server.state.num_running or server.state.bodies.held:
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("seed", range(3))
def test_random_requests(start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(HttpProtocol, "arrival_s", 0.3)
    server = start(keys=KeyRing(environment=KEY), max_body_bytes=1 << 20)
    draw = random.Random(seed)
    statuses: dict[int, int] = {}
    for _ in range(600):
        received = exchange(server, request(draw), 2)
        if received:
            status = int(received.split()[1]) if received.startswith(b"HTTP/1.1 ") else 0
            statuses[status] = statuses.get(status, 0) + 1
            assert status != 500, received[:500]
            assert b"Traceback" not in received
    assert alive(server)
    # It is no test if all is turned away at the door.
    assert statuses.get(200, 0) > 10
    assert statuses.get(400, 0) > 30
    wait_idle(server)


def test_memory_stays_flat(start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HttpProtocol, "arrival_s", 0.3)
    server = start(FakeEngine(), keys=KeyRing(environment=KEY))
    process = psutil.Process()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: {KEY}\r\nConnection: close\r\n".encode()
        + b"Content-Length: %d\r\n\r\n"
    )
    deep = b"[" * 4_000_000
    many = b'{"x": [' + b"[]," * 1_000_000 + b"1]}"
    draw = random.Random(5)

    def round_of_it() -> None:
        for sent in (deep, many, b'{"prompt": "' + b"a" * 4_000_000 + b'"}', draw.randbytes(1_000_000)):
            received = exchange(server, head % len(sent) + sent, 5)
            assert received.startswith(b"HTTP/1.1 400"), received[:200]
        halves = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(50)]
        for number, half in enumerate(halves):
            half.sendall((head % 100_000)[: 20 + number * 3] if number % 2 else head % 100_000 + b"x" * 60_000)
        time.sleep(0.1)
        for half in halves:
            half.close()

    for _ in range(3):
        round_of_it()
    gc.collect()
    before = process.memory_info().rss
    for _ in range(8):
        round_of_it()
    gc.collect()
    assert process.memory_info().rss - before < 48 << 20
    assert alive(server)
    wait_idle(server)


def test_clients_that_stall(start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HttpProtocol, "arrival_s", 0.5)
    server = start(keys=KeyRing(environment=KEY))
    begun = [b"", b"P", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX: ", b"\r\n", b"\x16\x03\x01"]
    stalled = [socket.create_connection(("127.0.0.1", server.port), timeout=5) for _ in range(100)]
    for number, connection in enumerate(stalled):
        connection.sendall(begun[number % len(begun)])
    assert alive(server)
    # A byte now and then does not keep one alive.
    end = time.monotonic() + 0.8
    while time.monotonic() < end:
        for connection in stalled:
            with contextlib.suppress(OSError):
                connection.sendall(b"x")
        time.sleep(0.1)
    for connection in stalled:
        with contextlib.suppress(OSError), connection:
            while connection.recv(1 << 16):
                pass
    assert alive(server)
