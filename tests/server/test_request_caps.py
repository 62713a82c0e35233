"""Limits of one request, each with its status and the setting in its message; slow clients."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
from octavo.errors import ConfigError, InvalidRequest
from octavo.sampling_params import SamplingParams
from octavo.server.request.limits import check_json, check_request
from octavo.server.settings import ServerSettings
from octavo.server.transport.http_protocol import MAX_HEAD_BYTES, MAX_HEADERS, MAX_URL_BYTES, HttpProtocol
from server_fakes import FakeEngine
from server_harness import Running

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


def post(server: Running, payload: Any, path: str = "/v1/chat/completions") -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    body = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    found = connection.getresponse()
    answered = json.loads(found.read())
    connection.close()
    return found.status, answered


def nested(depth: int) -> bytes:
    """A chat whose body is `depth` objects and arrays deep, with brackets in strings that count for nothing."""
    inner = b"[" * (depth - 1) + b"]" * (depth - 1)
    return json.dumps(CHAT | {"user": '[[[{{{"\\"[' * 50}).encode()[:-1] + b', "x": ' + inner + b"}"


@pytest.mark.parametrize(
    ("settings", "payload", "path", "field", "setting"),
    [
        ({}, nested(65), "chat", None, "max_json_depth is 64"),
        ({"max_json_depth": 10}, nested(11), "chat", None, "max_json_depth is 10"),
        ({}, b'{"x": [' + b"[]," * 70_000 + b"1]}", "chat", None, "max_json_containers is 65536"),
        ({"max_messages": 3}, CHAT | {"messages": CHAT["messages"] * 4}, "chat", "messages", "max_messages is 3"),
        ({"max_answers": 8}, CHAT | {"n": 9}, "chat", "n", "max_answers is 8"),
        ({"max_answers": 8}, {"prompt": ["a"] * 9}, "text", "prompt", "max_answers is 8"),
        ({"max_answers": 8}, {"prompt": ["a"] * 3, "n": 3}, "text", "n", "max_answers is 8"),
        ({"max_answer_tokens": 99}, CHAT | {"max_tokens": 100}, "chat", "max_tokens", "max_answer_tokens is 99"),
        ({"max_answer_tokens": 99}, CHAT | {"max_tokens": None}, "chat", "max_tokens", "max_answer_tokens is 99"),
        (
            {"max_answer_tokens": 99},
            {"prompt": ["a", "b"], "max_tokens": 10, "n": 5},
            "text",
            "max_tokens",
            "max_answer_tokens is 99",
        ),
        ({}, CHAT | {"stop": [str(number) for number in range(17)]}, "chat", "stop", "max_stops is 16"),
        ({}, CHAT | {"stop": "x" * 257}, "chat", "stop", "max_stop_chars is 256"),
    ],
)
def test_a_cap(
    start: Callable[..., Running], settings: dict[str, Any], payload: Any, path: str, field: str | None, setting: str
) -> None:
    server = start(**settings)
    status, answered = post(server, payload, "/v1/chat/completions" if path == "chat" else "/v1/completions")
    assert status == 400, answered
    assert answered["error"]["param"] == field
    assert setting in answered["error"]["message"]
    assert server.engine.prompts == []
    assert post(server, CHAT)[0] == 200


@pytest.mark.parametrize(
    ("settings", "payload"),
    [
        ({}, nested(64)),
        ({}, b'{"x": [' + b"[]," * 65_000 + b"1], " + json.dumps(CHAT).encode()[1:]),
        ({"max_messages": 4}, CHAT | {"messages": CHAT["messages"] * 4}),
        ({"max_answers": 8}, CHAT | {"n": 8}),
        ({"max_answer_tokens": 100}, CHAT | {"max_tokens": 100}),
        ({}, CHAT | {"stop": [str(number) for number in range(16)]}),
        ({}, CHAT | {"stop": "x" * 256}),
    ],
)
def test_up_to_a_cap(start: Callable[..., Running], settings: dict[str, Any], payload: Any) -> None:
    assert post(start(**settings), payload)[0] == 200


@pytest.mark.parametrize("field", ["logit_bias", "bad_words"])
def test_caps_of_lists(field: str) -> None:
    settings = ServerSettings(max_logit_bias=3, max_bad_words=3)

    class Asked(SamplingParams):
        logit_bias: dict[str, float] | None = None
        bad_words: list[str] | None = None

    def params(count: int) -> SamplingParams:
        words = [str(number) for number in range(count)]
        return Asked(**{field: dict.fromkeys(words, 1.0) if field == "logit_bias" else words})

    check_request([[1]], params(3), 100, settings)
    with pytest.raises(InvalidRequest, match=f"max_{field} is 3") as caught:
        check_request([[1]], params(4), 100, settings)
    assert caught.value.field == field


def test_depth_is_found_before_much_time_is_spent() -> None:
    settings = ServerSettings()
    bodies = [
        b"[" * (8 << 20),
        b"[]," * (2 << 20),
        b'{"a":' * (1 << 20),
        b'"' + b"[" * (8 << 20),
        b'"\\' * (4 << 20),
        b'["' + b"\\\\" * (4 << 20),
    ]
    for body in bodies:
        began = time.monotonic()
        with contextlib.suppress(InvalidRequest):
            check_json(body, settings)
        assert time.monotonic() - began < 1.0, body[:10]


@pytest.mark.parametrize("name", ["max_queue_requests", "max_answers", "request_timeout", "max_json_depth"])
def test_an_invalid_cap(name: str) -> None:
    for value in (0, -1):
        with pytest.raises(ConfigError, match=name):
            ServerSettings(**{name: value})


def test_bodies_of_all_requests_together(start: Callable[..., Running]) -> None:
    server = start(FakeEngine(delay=0.02), max_bodies_bytes=100_000)
    large = {"prompt": "Hi", "max_tokens": 200, "user": "x" * 60_000}
    running = ask_and_not_read(server, large)
    wait_until(lambda: server.engine.running == 1)
    status, answered = post(server, large, "/v1/completions")
    assert (status, answered["error"]["code"]) == (503, "queue_full")
    assert "max_bodies_bytes 100000" in answered["error"]["message"]
    assert post(server, {"prompt": "Hi", "max_tokens": 1}, "/v1/completions")[0] == 200
    # Whoever leaves gives its room back, also before the whole of a body is there.
    running.close()
    wait_until(lambda: server.state.bodies.held == 0)
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 90000\r\n\r\n" + b"x" * 80_000)
        wait_until(lambda: server.state.bodies.held > 0)
    wait_until(lambda: server.state.bodies.held == 0)
    assert post(server, large | {"max_tokens": 1}, "/v1/completions")[0] == 200


# ---------------------------------------------------------------- heads


def send(server: Running, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        received = b""
        with contextlib.suppress(ConnectionError):
            connection.sendall(data)
            while part := connection.recv(1 << 16):
                received += part
    return received


def head(extra: bytes, target: bytes = b"/v1/models") -> bytes:
    return b"GET " + target + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + extra + b"\r\n"


def test_number_of_headers(server: Running) -> None:
    lines = [b"X-%d: 1\r\n" % number for number in range(MAX_HEADERS)]
    assert send(server, head(b"".join(lines[: MAX_HEADERS - 2]))).startswith(b"HTTP/1.1 200")
    assert send(server, head(b"".join(lines[: MAX_HEADERS - 1]))).startswith(b"HTTP/1.1 431")
    # A body behind a refused head, in the same packet or later, starts nothing.
    body = b'{"prompt": "Hi"}'
    refused = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 16\r\n" + b"".join(lines) + b"\r\n"
    assert send(server, refused + body).startswith(b"HTTP/1.1 431")
    assert server.engine.prompts == []
    assert post(server, CHAT)[0] == 200


def test_length_of_the_url(server: Running) -> None:
    room = MAX_URL_BYTES - len("/v1/models?")
    assert send(server, head(b"", b"/v1/models?" + b"x" * room)).startswith(b"HTTP/1.1 200")
    assert send(server, head(b"", b"/v1/models?" + b"x" * (room + 1))).startswith(b"HTTP/1.1 414")


def test_length_of_the_head(server: Running) -> None:
    assert send(server, head(b"X: " + b"x" * (MAX_HEAD_BYTES - 1000) + b"\r\n")).startswith(b"HTTP/1.1 200")
    assert send(server, head(b"X: " + b"x" * MAX_HEAD_BYTES + b"\r\n")).startswith(b"HTTP/1.1 431")


# ---------------------------------------------------------------- slow readers


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def ask_and_not_read(server: Running, payload: dict[str, Any], buffer: int = 4096) -> socket.socket:
    body = json.dumps(payload).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.connect(("127.0.0.1", server.port))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    connection.sendall(head % len(body) + body)
    return connection


def read_rest(connection: socket.socket, pause: float = 0.0) -> bytes:
    received = []
    with connection, contextlib.suppress(ConnectionError):
        connection.settimeout(5)
        while part := connection.recv(1 << 17):
            received.append(part)
            time.sleep(pause)
    return b"".join(received)


def test_a_stream_that_is_not_read_is_dropped(start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HttpProtocol, "write_s", 0.3)
    server = start(FakeEngine(delay=1e-6, max_model_len=2_000_000))
    payload = {"prompt": [[65]], "max_tokens": 1_000_000, "stream": True, "return_token_ids": True}
    connection = ask_and_not_read(server, payload)
    wait_until(lambda: server.engine.running == 1)
    wait_until(lambda: server.engine.running == 0)
    assert server.engine.aborted == 1
    # What was not read was not made either.
    assert server.engine.generated < 200_000
    assert b"[DONE]" not in read_rest(connection)
    assert post(server, CHAT)[0] == 200


def test_an_answer_that_is_not_read_is_dropped(start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HttpProtocol, "write_s", 0.3)
    server = start(FakeEngine(max_model_len=16_000_000))
    connection = ask_and_not_read(server, {"prompt": "a" * 7_900_000, "max_tokens": 1, "echo": True})
    wait_until(lambda: server.engine.generated == 1)
    time.sleep(1.5)
    received = read_rest(connection)
    assert received.startswith(b"HTTP/1.1 200 OK")
    assert len(received) < 7_900_000, "the whole answer was kept for a client that did not read"
    assert post(server, CHAT)[0] == 200


def test_a_client_that_reads_slowly_is_served(start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HttpProtocol, "write_s", 0.3)
    server = start(FakeEngine(max_model_len=16_000_000))
    connection = ask_and_not_read(server, {"prompt": "a" * 7_900_000, "max_tokens": 1, "echo": True}, 1 << 16)
    began = time.monotonic()
    received = read_rest(connection, 0.03)
    assert time.monotonic() - began > 1.0
    assert received.endswith(b"}")
    assert len(received) > 7_900_000
