"""HTTP framing: where a request ends, versions, pipelining, upgrades, targets, refusals."""

from __future__ import annotations

import contextlib
import json
import logging
import random
import re
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
from octavo.server.access.api_keys import KeyRing
from octavo.server.transport.http_protocol import HttpProtocol
from server_fakes import FakeEngine, answer
from server_harness import Running

HOST = b"Host: localhost\r\n"
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
MODELS = b"GET /v1/models HTTP/1.1\r\n" + HOST


def connect(server: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def read_all(connection: socket.socket) -> bytes:
    """Until the server closes."""
    received = b""
    # What a refused client still sends is answered by a reset, behind the response.
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            received += part
    return received


def exchange(server: Running, data: bytes) -> bytes:
    """All that comes back for `data`, which ends with the server's close."""
    with connect(server) as connection:
        connection.sendall(data)
        return read_all(connection)


def statuses(received: bytes) -> list[int]:
    """Of all answers in a row, none of which holds another within it."""
    found = []
    while received:
        head, _, received = received.partition(b"\r\n\r\n")
        first, *lines = head.split(b"\r\n")
        assert re.fullmatch(rb"HTTP/1\.1 [1-5][0-9][0-9] [A-Za-z -]*", first), first
        found.append(int(first.split()[1]))
        headers = {line.split(b": ")[0]: line.split(b": ", 1)[1] for line in lines}
        if b"content-length" in headers:
            length = int(headers[b"content-length"])
            assert len(received) >= length
            received = received[length:]
        elif headers.get(b"transfer-encoding") == b"chunked":
            while True:
                size, _, received = received.partition(b"\r\n")
                length = int(size, 16)
                assert received[length : length + 2] == b"\r\n"
                received = received[length + 2 :]
                if not length:
                    break
        elif found[-1] >= 200:
            assert headers[b"connection"] == b"close"
            return found
    return found


def post(payload: Any, path: str = "/v1/chat/completions", more: bytes = b"", version: str = "1.1") -> bytes:
    body = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    head = f"POST {path} HTTP/{version}\r\n".encode() + HOST + more + b"Content-Length: %d\r\n\r\n" % len(body)
    return head + body


def counted(server: Running, status: int) -> float:
    """Of `octavo_http_requests_total`, all paths."""
    text = exchange(server, b"GET /metrics HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n").decode()
    lines = re.findall(rf'^octavo_http_requests_total{{[^}}]*"{status}"[^}}]*}} (\S+)$', text, re.MULTILINE)
    return sum(map(float, lines))


# ---------------------------------------------------------------- versions


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_to_http_1_0_ends_with_the_connection(server: Running, path: str) -> None:
    payload = {**CHAT, "prompt": "Hi", "stream": True}
    received = exchange(server, post(payload, path, version="1.0"))
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"transfer-encoding" not in head
    assert b"content-length" not in head
    # Events and nothing between them.
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")
    events = body.decode().split("\n\n")[:-2]
    assert all(json.loads(event.removeprefix("data: "))["choices"] for event in events)
    # The same as in chunks.
    chunked = exchange(server, post(payload, path, b"Connection: close\r\n")).partition(b"\r\n\r\n")[2]
    joined = b"".join(re.findall(rb"[0-9a-f]+\r\n(data: .*?\n\n)\r\n", chunked, re.DOTALL))

    def without_names(text: bytes) -> bytes:
        return re.sub(rb'"id":"[^"]*"|"created":\d+', b"", text)

    assert without_names(joined) == without_names(body)


def test_a_broken_stream_to_http_1_0_ends_with_an_error(start: Callable[..., Running]) -> None:
    engine = FakeEngine(delay=0.02)
    server = start(engine)
    with connect(server) as connection:
        connection.sendall(post(CHAT | {"stream": True, "max_tokens": 100}, version="1.0"))
        received = connection.recv(1 << 16)
        engine.dead = True
        received += read_all(connection)
    assert b'"error"' in received
    assert received.endswith(b"data: [DONE]\n\n")


def test_whole_answers_to_http_1_0(server: Running) -> None:
    received = exchange(server, post(CHAT, version="1.0", more=b"Connection: keep-alive\r\n"))
    assert statuses(received) == [200]
    assert answer(4).encode() in received
    # Without a Host header too, which HTTP/1.0 does not know.
    assert statuses(exchange(server, b"GET /health HTTP/1.0\r\n\r\n")) == [200]


@pytest.mark.parametrize("version", ["0.9", "2.0"])
def test_other_versions(server: Running, version: str) -> None:
    received = exchange(server, post(CHAT, version=version))
    assert statuses(received) == [400]
    assert b"HTTP/1.1" in received.partition(b"\r\n\r\n")[2]
    assert server.engine.prompts == []


# ---------------------------------------------------------------- where a body ends

SMUGGLED = b"GET /smuggled HTTP/1.1\r\n" + HOST + b"\r\n"


@pytest.mark.parametrize(
    "headers",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
        b"Content-Length: 5\r\nContent-Length: 6\r\n",
        b"Content-Length: 5\r\nContent-Length: 5\r\n",
        b"Content-Length: 5, 5\r\n",
        b"Content-Length: +5\r\n",
        b"Content-Length: -5\r\n",
        b"Content-Length: 0x5\r\n",
        b"Content-Length: 99999999999999999999999\r\n",
        b"Content-Length : 5\r\n",
        b"Content-Length: 5\r\n\t6\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Transfer-Encoding: \x0bchunked\r\n",
        b"Transfer-Encoding : chunked\r\n",
        b"Transfer-Encoding: identity\r\n",
        b"Transfer-Encoding: gzip, chunked\r\n",
        b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"X: a\r\n b\r\n",
        b"X: a\nY: b\r\n",
        b"X: a\rY: b\r\n",
        b"X: a\0b\r\n",
        b"X\0: a\r\n",
        b": a\r\n",
        b"no colon\r\n",
    ],
)
def test_ambiguous_heads_are_refused(server: Running, headers: bytes) -> None:
    received = exchange(server, b"POST /v1/completions HTTP/1.1\r\n" + HOST + headers + b"\r\n0\r\n\r\n" + SMUGGLED)
    assert statuses(received) == [400]
    assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
    assert server.engine.prompts == []


def test_chunks_with_http_1_0(server: Running) -> None:
    data = b"POST /v1/completions HTTP/1.0\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    assert statuses(exchange(server, data)) == [400]


@pytest.mark.parametrize(
    "chunks",
    [
        b"zz\r\n{}\r\n0\r\n\r\n",
        b"-2\r\n{}\r\n0\r\n\r\n",
        b"0x2\r\n{}\r\n0\r\n\r\n",
        b"2 \r\n{}\r\n0\r\n\r\n",
        b"2\n{}\r\n0\r\n\r\n",
        b"2\r\n{}0\r\n\r\n",
        b"1\r\n{}\r\n0\r\n\r\n",
        b"2;a\n=b\r\n{}\r\n0\r\n\r\n",
        b"fffffffffffffffff\r\n{}\r\n0\r\n\r\n",
    ],
)
@pytest.mark.parametrize("later", [False, True])
def test_bad_chunks(server: Running, caplog: pytest.LogCaptureFixture, chunks: bytes, later: bool) -> None:
    caplog.set_level(logging.INFO, "octavo.access")
    head = b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n"
    with connect(server) as connection:
        connection.sendall(head)
        if later:
            # Its work waits for the body already.
            connection.sendall(b"1\r\n \r\n")
            connection.settimeout(0.05)
            with pytest.raises(TimeoutError):
                connection.recv(1)
            connection.settimeout(10)
        connection.sendall(chunks)
        received = read_all(connection)
    assert statuses(received) == [400]
    assert b'"malformed_request"' in received
    lines = [record.fields for record in caplog.records if record.name == "octavo.access"]  # type: ignore[attr-defined]
    assert [(line["status"], line["path"]) for line in lines] == [(400, "/v1/completions")]


def test_trailers_are_ignored(start: Callable[..., Running]) -> None:
    body = json.dumps(CHAT).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    trailer = b"X-Request-Id: from-a-trailer\r\nHost: evil\r\nX-Api-Key: x\r\n"
    received = exchange(start(), head + b"%x\r\n%b\r\n0\r\n%b\r\n" % (len(body), body, trailer))
    assert statuses(received) == [200]
    assert b"from-a-trailer" not in received


# ---------------------------------------------------------------- one after the other


def test_garbage_after_a_request_is_refused_after_its_response(start: Callable[..., Running]) -> None:
    server = start(FakeEngine(delay=0.02))
    stream = post(CHAT | {"stream": True, "max_tokens": 20})
    for garbage in (b"\x16\x03\x01garbage\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"X" * 40_000):
        received = exchange(server, stream + garbage)
        assert statuses(received) == [200, 400]
        assert b"[DONE]" in received
        # In a packet of its own, in the middle of the answer.
        with connect(server) as connection:
            connection.sendall(stream)
            begun = connection.recv(1 << 16)
            connection.sendall(garbage)
            received = begun + read_all(connection)
        assert statuses(received) == [200, 400]
        assert b"[DONE]" in received


def test_pipelined_requests_are_answered_in_order(server: Running) -> None:
    last = b"GET /v1/models HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n"
    several = post(CHAT) + MODELS + b"\r\n" + post(CHAT | {"stream": True}) + b"GET /none HTTP/1.1\r\n" + HOST + b"\r\n"
    received = exchange(server, several * 20 + last + b"and garbage that nobody looks at")
    assert statuses(received) == [200, 200, 200, 404] * 20 + [200]
    # More than is looked at ahead, and the last in pieces.
    with connect(server) as connection:
        connection.sendall(post(CHAT | {"max_tokens": 100}) + (MODELS + b"\r\n") * 3000)
        for byte in last:
            connection.sendall(bytes([byte]))
        received = read_all(connection)
    assert statuses(received) == [200] * 3002


@pytest.mark.parametrize("cut", [-200, -40, -1])
def test_a_pipelined_request_that_arrives_in_parts(start: Callable[..., Running], cut: int) -> None:
    server = start(FakeEngine(delay=0.02))
    data = post(CHAT | {"max_tokens": 10}) + post(CHAT, more=b"X: " + b"x" * 100 + b"\r\n")
    with connect(server) as connection:
        connection.sendall(data[:cut])
        time.sleep(0.05)
        connection.sendall(data[cut:] + MODELS)
        time.sleep(0.02)
        connection.sendall(b"Connection: close\r\n\r\n")
        received = read_all(connection)
    assert statuses(received) == [200, 200, 200]


@pytest.mark.parametrize("seed", range(4))
def test_packet_boundaries_do_not_matter(start: Callable[..., Running], seed: int) -> None:
    server = start(FakeEngine(delay=0.0005))
    draw = random.Random(seed)
    body = json.dumps(CHAT).encode()
    upgrade = b"Connection: upgrade\r\nUpgrade: h2c\r\n"
    chunked = b"POST /v1/chat/completions HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n"
    chunked += b"".join(b"1;x=y\r\n%c\r\n" % byte for byte in body) + b"0\r\nTrailer: x\r\n\r\n"
    requests = [
        (post(CHAT), 200), (post(CHAT | {"stream": True}), 200), (post(CHAT, more=upgrade), 200), (chunked, 200),
        (MODELS + upgrade + b"\r\n", 200), (b"\r\n" + MODELS + b"\r\n", 200), (post(b"{"), 400),
        (post(CHAT | {"user": "u" * 5000}), 200),
    ]  # fmt: skip
    endings = [
        (MODELS + b"Connection: close\r\n\r\nnothing", 200), (b"garbage\r\n", 400), (post(CHAT, version="1.0"), 200),
        (MODELS + b"X: " + b"x" * 110_000, 431), (b"GET /" + b"x" * 9000, 414),
    ]  # fmt: skip
    for _ in range(12):
        sent = [draw.choice(requests) for _ in range(draw.randrange(6))] + [draw.choice(endings)]
        data = b"".join(part for part, _ in sent)
        with connect(server) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # The end of a request that is refused early comes too late.
            with contextlib.suppress(ConnectionError):
                while data:
                    size = draw.choice([1, 3, 50, 2000, 1 << 20])
                    connection.sendall(data[:size])
                    data = data[size:]
                    if draw.random() < 0.02:
                        time.sleep(0.002)
            received = read_all(connection)
        assert statuses(received) == [status for _, status in sent]


def test_a_body_that_is_not_read_is_not_taken_for_a_request(server: Running) -> None:
    with connect(server) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\n" + HOST + b"Content-Length: %d\r\n\r\n" % len(SMUGGLED))
        received = connection.recv(1 << 16)
        connection.sendall(SMUGGLED + b"GET /version HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n")
        received += read_all(connection)
    assert statuses(received) == [200, 200]
    assert b'{"version":' in received


# ---------------------------------------------------------------- upgrades, Expect, methods, targets


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket", b"TLS/1.0"])
def test_an_upgrade_is_ignored_and_the_body_is_read(server: Running, protocol: bytes) -> None:
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: " + protocol + b"\r\nHTTP2-Settings: AAMAAABk\r\n"
    request = post(CHAT, more=upgrade)
    last = b"GET /v1/models HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n"
    received = exchange(server, request + MODELS + upgrade + b"\r\n" + last)
    assert statuses(received) == [200, 200, 200]
    assert answer(4).encode() in received
    # Its head and its body in packets of their own, as Java's client sends them; and in chunks.
    head, _, body = request.partition(b"\r\n\r\n")
    chunks = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    with connect(server) as connection:
        for part in (head, b"\r\n\r\n", body[:5], body[5:]):
            connection.sendall(part)
            time.sleep(0.02)
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\n" + HOST + upgrade + chunks + last)
        received = read_all(connection)
    assert statuses(received) == [200, 200, 200]
    assert received.count(answer(4).encode()) == 2


def test_expect_100_continue(start: Callable[..., Running]) -> None:
    server = start(max_body_bytes=1000)
    head, _, body = post(CHAT, more=b"Expect: 100-continue\r\nConnection: close\r\n").partition(b"\r\n\r\n")
    with connect(server) as connection:
        connection.sendall(head + b"\r\n\r\n")
        assert connection.recv(1 << 16) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert statuses(read_all(connection)) == [200]
    # Refused without being asked for its body.
    too_long = head.replace(b"Content-Length: ", b"Content-Length: 99") + b"\r\n\r\n"
    assert statuses(exchange(server, too_long)) == [413]
    # HTTP/1.0 knows no such answer.
    assert statuses(exchange(server, post(CHAT, more=b"Expect: 100-continue\r\n", version="1.0"))) == [200]


def test_methods(server: Running) -> None:
    close = HOST + b"Connection: close\r\n\r\n"
    whole = exchange(server, b"GET /v1/models HTTP/1.1\r\n" + close)
    head = exchange(server, b"HEAD /v1/models HTTP/1.1\r\n" + close)
    length = re.search(rb"content-length: (\d+)", head)
    assert length
    assert head.endswith(b"\r\n\r\n")
    assert int(length.group(1)) == len(whole.partition(b"\r\n\r\n")[2])
    assert statuses(exchange(server, b"OPTIONS /v1/models HTTP/1.1\r\n" + close)) == [405]
    assert statuses(exchange(server, b"OPTIONS * HTTP/1.1\r\n" + close)) == [404]
    assert statuses(exchange(server, b"TRACE /v1/models HTTP/1.1\r\n" + close)) == [405]
    assert statuses(exchange(server, b"CONNECT localhost:443 HTTP/1.1\r\n" + close)) == [400]
    assert statuses(exchange(server, b"get /v1/models HTTP/1.1\r\n" + close)) == [400]
    assert statuses(exchange(server, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")) == [400]


def test_absolute_targets(start: Callable[..., Running]) -> None:
    server = start(allowed_hosts=("llm.example",))

    def status(target: str, host: str = "Host: localhost\r\n") -> int:
        request = f"GET {target} HTTP/1.1\r\n{host}Connection: close\r\n\r\n"
        return statuses(exchange(server, request.encode()))[0]

    assert status("http://localhost/v1/models") == 200
    assert status("HTTP://llm.example:8000/v1/models?x=1") == 200
    assert status("http://user:word@llm.example/v1/models") == 200
    assert status("http://[::1]:80/v1/models") == 200
    assert status("http://localhost/none") == 404
    assert status("http://localhost?x") in (200, 404)
    # The host that counts is the target's, and a header is asked for all the same.
    assert status("http://evil.example/v1/models") == 403
    assert status("http://localhost/v1/models", "Host: evil.example\r\n") == 200
    assert status("http://localhost/v1/models", "") == 400
    assert status("http://localhost/v1/models", "Host: localhost\r\nHost: localhost\r\n") == 400
    assert status("ftp://localhost/v1/models") == 400
    assert status("//localhost/v1/models") == 404
    assert status("v1/models") == 400
    assert status("/v1/models", "Host: localhost, evil\r\n") == 403
    assert status("/v1/models", "Host: localhost:80:80\r\n") == 403
    assert status("/v1/models", "Host: localhost/evil\r\n") == 403


def test_a_server_under_a_path(start: Callable[..., Running]) -> None:
    """Whether the proxy cuts the path off or not."""
    server = start(root_path="/llm", keys=KeyRing(environment="a-secret-key"))

    def ask(target: str, key: bytes = b"X-Api-Key: a-secret-key\r\n") -> tuple[int, bytes]:
        received = exchange(server, f"GET {target} HTTP/1.0\r\n".encode() + key + b"\r\n")
        return statuses(received)[0], received

    for target in ("/v1/models", "/llm/v1/models", "http://localhost/v1/models", "http://localhost/llm/v1/models"):
        assert ask(target)[0] == 200
        assert ask(target, b"")[0] == 401
    assert b'"url":"/llm"' in ask("/openapi.json")[1]
    assert [ask(target)[0] for target in ("/llm/llm/v1/models", "/llmv1/models", "/llm/none")] == [404, 404, 404]
    # What needs no key is the same under both names, and nothing else.
    assert [ask(target, b"")[0] for target in ("/health", "/llm/health")] == [200, 200]
    assert [ask(target, b"")[0] for target in ("/llm/llm/health", "/llm/health/x", "/llm", "/llm/")] == [401] * 4
    # Refused before any route, and counted under its name all the same.
    metrics = ask("/metrics")[1].decode()
    assert re.search(r'^octavo_http_requests_total{path="/v1/models",code="401"} 4', metrics, re.MULTILINE)


# ---------------------------------------------------------------- what is refused is counted and logged

REFUSALS = [
    (b"\x16\x03\x01\x02\x00garbage\r\n\r\n", 400, "", "malformed_request"),
    (b"GET /v1/models HTTP/1.1\r\nno colon\r\n\r\n", 400, "/v1/models", "malformed_request"),
    (b"GET /v1/models?" + b"x" * 9000 + b" HTTP/1.1\r\n\r\n", 414, "/v1/models", "uri_too_long"),
    (MODELS + b"X: " + b"x" * 40_000 + b"\r\n\r\n", 431, "/v1/models", "head_too_large"),
    (MODELS + b"X: y\r\n" * 200 + b"\r\n", 431, "/v1/models", "head_too_large"),
    (b"GET /v1/models HTT", 408, "/v1/models", "request_timeout"),
    (b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Content-Length: 9\r\n\r\n{", 408, "/v1/completions",
     "request_timeout"),
    (b"POST /v1/completions HTTP/2.0\r\n" + HOST + b"\r\n", 400, "/v1/completions", "malformed_request"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "status", "path", "code"), REFUSALS)
def test_refusals_are_answered_counted_and_logged(
    start: Callable[..., Running],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    data: bytes,
    status: int,
    path: str,
    code: str,
) -> None:
    caplog.set_level(logging.INFO, "octavo.access")
    monkeypatch.setattr(HttpProtocol, "arrival_s", 0.2)
    server = start(metrics_prefix="octavo")
    head, _, body = exchange(server, data).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"\r\nconnection: close" in head
    assert b"\r\nx-request-id: " in head
    assert json.loads(body)["error"]["code"] == code
    lines = [record.fields for record in caplog.records if record.name == "octavo.access"]  # type: ignore[attr-defined]
    assert [(line["status"], line["path"], line["error"]) for line in lines] == [(status, path, code)]
    assert lines[0]["client"] == "127.0.0.1"
    assert counted(server, status) == 1


def test_spaces_around_a_header_value_are_removed(server: Running) -> None:
    body = json.dumps(CHAT).encode()
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: \t localhost \t\r\nX-Request-Id:  mine \r\n"
        b"Expect: 100-continue \r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    )
    with connect(server) as connection:
        connection.sendall(head)
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        received = read_all(connection)
    assert statuses(received) == [200]
    assert b"\r\nx-request-id: mine\r\n" in received
