"""Clients that leave, and clients that are refused while they still send."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from octavo.server.access.api_keys import KeyRing
from octavo.server.settings import ServerSettings
from octavo.server.state import ServerState
from octavo.server.transport.http_protocol import HttpProtocol
from octavo.server.transport.listen import bind
from server_fakes import FakeEngine
from server_harness import Running

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
RESET = b"\1\0\0\0\0\0\0\0"


def connect(server: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def read_all(connection: socket.socket) -> bytes:
    received = b""
    while part := connection.recv(1 << 16):
        received += part
    return received


def post(payload: Any, version: str = "1.1", path: str = "/v1/chat/completions") -> bytes:
    body = json.dumps(payload).encode()
    return f"POST {path} HTTP/{version}\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds
        time.sleep(0.002)
    return time.monotonic() - began


def wait_running(server: Running, count: int = 1) -> None:
    wait_until(lambda: server.engine.running == count)


# ---------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_its_side_counts_as_gone(
    start: Callable[..., Running], version: str, stream: bool
) -> None:
    server = start(FakeEngine(delay=0.01))
    with connect(server) as connection:
        connection.sendall(post(CHAT | {"stream": stream, "max_tokens": 200}, version))
        wait_running(server)
        connection.shutdown(socket.SHUT_WR)
        assert wait_until(lambda: server.engine.running == 0) < 0.2
        assert not read_all(connection).endswith((b"0\r\n\r\n", b"data: [DONE]\n\n", b"}"))
    assert server.engine.aborted == 1


def test_a_client_that_closes_its_side_within_a_request(server: Running) -> None:
    for part in (b"", b"GET /v1/mod", post(CHAT)[:-3]):
        with connect(server) as connection:
            connection.sendall(part)
            connection.shutdown(socket.SHUT_WR)
            assert read_all(connection) == b""
    assert server.engine.prompts == []
    wait_until(lambda: not server.state.num_running)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reset", [False, True])
def test_a_client_that_leaves_is_noticed_within_steps(start: Callable[..., Running], stream: bool, reset: bool) -> None:
    server = start(FakeEngine(delay=0.01))
    for _ in range(5):
        connection = connect(server)
        connection.sendall(post(CHAT | {"stream": stream, "max_tokens": 200}))
        wait_running(server)
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        connection.close()
        assert wait_until(lambda: server.engine.running == 0) < 0.2
    assert server.engine.aborted == 5


@pytest.mark.parametrize("count", [1, 1000])
@pytest.mark.parametrize("reset", [False, True])
def test_pipelined_requests_do_not_hide_that_the_client_has_left(
    start: Callable[..., Running], count: int, reset: bool
) -> None:
    server = start(FakeEngine(delay=0.01, max_model_len=100_000))
    connection = connect(server)
    connection.sendall(post(CHAT | {"max_tokens": 50_000}))
    wait_running(server)
    connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n" * count)
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    connection.close()
    wait_until(lambda: server.engine.running == 0, 1.0)
    assert server.engine.aborted == 1


def test_listeners_enable_tcp_keep_alive() -> None:
    """A machine that goes without a word is noticed by the kernel, within a minute."""
    with bind("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()) as client:
        accepted, _ = listener.accept()
        with accepted:
            assert client.getpeername() == listener.getsockname()
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            silence = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
            silence += accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) * accepted.getsockopt(
                socket.IPPROTO_TCP, socket.TCP_KEEPCNT
            )
            assert silence <= 60
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 60_000


def test_the_limit_of_open_files_is_raised() -> None:
    code = """
import resource
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, min(hard, 4096)))
from octavo.server.transport.listen import allow_many_files
allow_many_files()
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
assert soft == hard, (soft, hard)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


# ---------------------------------------------------------------- refused while it sends


def refused_while_sending(server: Running, head: bytes, size: int) -> bytes:
    """What a client reads that sends all of its body first, as most do."""
    with connect(server) as connection:
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % size)
        for _ in range(size >> 16):
            connection.sendall(b"x" * (1 << 16))
        return connection.recv(1 << 16)


def test_a_refusal_reaches_a_client_that_is_still_sending(start: Callable[..., Running]) -> None:
    server = start(keys=KeyRing(environment="a-secret-key"), max_body_bytes=1 << 16)
    right = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: a-secret-key\r\n"
    for _ in range(5):
        assert refused_while_sending(server, right, 1 << 25).startswith(b"HTTP/1.1 413 ")
        assert refused_while_sending(server, right.replace(b"secret", b"wrong"), 1 << 24).startswith(b"HTTP/1.1 401 ")
    # The clients of the libraries too.
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    client.request("POST", "/v1/completions", b"x" * (1 << 25), {"X-Api-Key": "a-secret-key"})
    found = client.getresponse()
    assert (found.status, json.loads(found.read())["error"]["code"]) == (413, "body_too_large")
    client.close()


def test_a_connection_goes_on_after_a_refused_body(start: Callable[..., Running]) -> None:
    server = start(max_body_bytes=1 << 16)
    with connect(server) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 200000\r\n\r\n" + b"x" * 1000)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 413 ")
        connection.sendall(b"GET /smuggled HTTP/1.1\r\n\r\n" + b"x" * (200_000 - 1000 - 26))
        connection.sendall(post(CHAT))
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def test_a_refused_body_must_arrive_in_time_too(start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HttpProtocol, "arrival_s", 0.5)
    server = start(max_body_bytes=1 << 16)
    with connect(server) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 413 ")
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - began < 5:
                connection.sendall(b"x")
                time.sleep(0.01)
            pytest.fail("the body is read without end")
        assert time.monotonic() - began < 3


def test_a_client_that_still_sends_does_not_delay_the_shutdown() -> None:
    server = Running(FakeEngine(), ServerState(ServerSettings(max_body_bytes=1 << 16, allowed_hosts=("x",))))
    with connect(server) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 413 ")
        began = time.monotonic()
        server.stop()
        assert time.monotonic() - began < 2


# ---------------------------------------------------------------- over TLS


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_over_tls(start: Callable[..., Running], tmp_path: Path) -> None:
    certificate, key = str(tmp_path / "server.pem"), str(tmp_path / "server.key")
    command = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
        "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-out", certificate, "-keyout", key,
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    server = start(FakeEngine(delay=0.01), ssl_certfile=certificate, ssl_keyfile=key, max_body_bytes=1 << 16)
    trusting = ssl.create_default_context(cafile=certificate)

    def secure() -> ssl.SSLSocket:
        return trusting.wrap_socket(connect(server), server_hostname="127.0.0.1")

    with secure() as connection:
        connection.sendall(post(CHAT | {"stream": True}, "1.0"))
        assert read_all(connection).endswith(b"data: [DONE]\n\n")
    with secure() as connection:
        connection.sendall(post(CHAT | {"stream": True}) + b"garbage\r\n\r\n")
        received = read_all(connection)
    assert received.index(b"0\r\n\r\nHTTP/1.1 400 ") > received.index(b"[DONE]")
    # Refused while it sends.
    with secure() as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000\r\n\r\n")
        for _ in range(4):
            connection.sendall(b"x" * 1_000_000)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 413 ")
    # Gone, with a word and without.
    for reset in (False, True):
        connection = secure()
        connection.sendall(post(CHAT | {"max_tokens": 200}))
        wait_running(server)
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        connection.close()
        wait_until(lambda: server.engine.running == 0, 1.0)
    # No TLS at all, and a handshake that stops.
    with connect(server) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert not read_all(plain).startswith(b"HTTP")
    with secure() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert read_all(connection).startswith(b"HTTP/1.1 200")
