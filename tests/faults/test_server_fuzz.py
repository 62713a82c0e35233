"""A whole server under malformed, oversized, incomplete and slow requests."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from server_process import ServerProcess, exchange, request_bytes, wait_until

# One after the other: each wants the machine to itself.
pytestmark = pytest.mark.xdist_group("server_processes")

MIB = 1 << 20
PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/api/chat",
    "/api/generate",
    "/api/show",
    "/generate",
    "/generate_stream",
    "/",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
)
OTHER_PATHS = ("/v1/models/x", "/metrics", "/nothing", "/../etc/passwd", "/%00", "//", "/v1/models/%ff", "/info?a=%zz")
FIELDS = (
    *("model", "messages", "prompt", "inputs", "parameters", "options", "stream", "stream_options", "n", "temperature"),
    *("input", "instructions", "max_output_tokens", "tokens", "thinking", "stop_sequences", "previous_response_id"),
    *("top_p", "top_k", "min_p", "seed", "stop", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs"),
    *("logit_bias", "echo", "suffix", "best_of", "priority", "cache_salt", "response_format", "tools", "tool_choice"),
    *("format", "think", "keep_alive", "context", "raw", "system", "template", "images", "user", "stop_token_ids"),
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "grammar", "json_schema", "regex", "ebnf"),
    *("allowed_token_ids", "bad_words", "min_tokens", "schema", "value", "json", "choice", "output_config"),
    *("chat_template_kwargs", "add_generation_prompt", "continue_final_message", "truncate_prompt_tokens", "timeout"),
)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """One server for all of them: what one leaves behind the next would find."""
    started = ServerProcess("fake?end_after=20", ["--max-body-bytes", "100000", "--max-model-len", "512"])
    try:
        yield started
        started.check_serves()
        started.check_all_free()
        started.stop()
    finally:
        started.kill()


def value(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON value, likely a nasty one."""
    kind = rng.randrange(12 if depth < 3 else 9)
    if kind < 3:
        return rng.choice([0, 1, -1, 2, 5, 1 << 31, -(1 << 63), 1 << 64, 10**30, 0.5, -0.0, 1e-320, 1e308, 3.7])
    if kind < 6:
        return rng.choice(
            ["", "a", "fake", "\0", "\U0001f389", "\ud800", "user", "text", "json", "{{ 1/0 }}", "x" * 999]
        )
    if kind < 9:
        return rng.choice([None, True, False, [], {}])
    if kind < 10:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice([*FIELDS, "role", "content", "type"]): value(rng, depth + 1) for _ in range(rng.randrange(4))}


def plausible(rng: random.Random) -> dict[str, Any]:
    """A good body of every protocol at once."""
    return {
        "model": "fake",
        "messages": [{"role": "user", "content": "Hi"}],
        "prompt": "Hi",
        "inputs": "Hi",
        "input": "Hi",
        "tokens": [72, 105],
        "max_tokens": rng.randrange(1, 5),
        "stream": rng.random() < 0.3,
    }


def bad_body(rng: random.Random) -> bytes:
    body = plausible(rng)
    for _ in range(rng.randrange(1, 4)):
        place = rng.choice(FIELDS)
        if rng.random() < 0.2:
            place, body[place] = "options", {rng.choice(FIELDS): value(rng)}
        elif rng.random() < 0.2:
            body["parameters"] = {rng.choice(FIELDS): value(rng)}
        else:
            body[place] = value(rng)
    encoded = bytearray(json.dumps(body).encode())
    damage = rng.random()
    if damage < 0.2:
        for _ in range(rng.randrange(1, 4)):
            encoded[rng.randrange(len(encoded))] = rng.randrange(256)
    elif damage < 0.3:
        del encoded[rng.randrange(len(encoded)) :]
    elif damage < 0.35:
        return b'{"model":' * rng.randrange(1, 5000) + b"1" + b"}" * rng.randrange(5000)
    elif damage < 0.4:
        return b"[" * rng.randrange(1, 50_000)
    return bytes(encoded)


def bad_request(rng: random.Random) -> bytes:
    """One request, its connection's last: most are HTTP, some are not."""
    kind = rng.random()
    if kind < 0.7:
        body = bad_body(rng)
        head = f"POST {rng.choice(PATHS)} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        head += rng.choice(["Content-Type: application/json\r\n"] * 8 + ["", "Content-Type: text/plain\r\n"])
        return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body
    if kind < 0.8:
        method = rng.choice(["GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "FOO", "get"])
        path = rng.choice([*PATHS, *OTHER_PATHS, f"/{rng.random()}", f"/v1/models/{rng.random()}"])
        return f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode()
    if kind < 0.9:
        lines = [
            "Content-Length: -1",
            "Content-Length: 99999999999999999999",
            "Content-Length: 5\r\nContent-Length: 6",
            "Transfer-Encoding: chunked\r\nContent-Length: 5",
            "Transfer-Encoding: gzip, chunked",
            "Expect: 100-continue",
            "X-Request-Id: a\x01b",
            "traceparent: 00-" + "0" * 300,
            "Authorization: Bearer \xff\xfe",
            "X-Session-ID: " + "s" * 5000,
            "Host: evil.example",
            "Cookie: " + "c" * 30_000,
            " folded: yes",
            ": empty",
        ]
        head = (
            f"POST {rng.choice(PATHS)} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n{rng.choice(lines)}\r\n\r\n"
        )
        return head.encode("latin-1") + rng.choice([b"", b"{}", b"5\r\n{}{}{\r\n0\r\n\r\n", b"zz\r\n"])
    return rng.choice(
        [
            rng.randbytes(rng.randrange(1, 2000)),
            b"\r\n" * 100,
            b"GET / HTTP/9.9\r\n\r\n",
            b"\x16\x03\x01\x02\x00",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"A" * 100_000,
            b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
        ]
    )


def test_bad_requests(server: ServerProcess) -> None:
    """Thousands of them, several at once; none is answered with a fault, and memory does not grow with their number."""
    rng = random.Random(20261130)
    statuses: Counter[int] = Counter()
    faults: list[tuple[bytes, bytes]] = []

    async def send(data: bytes) -> None:
        # Those that say less than they promise wait for the rest of it: the client goes first.
        answer = await exchange(server.port, data, 0.5)
        status = int(answer[9:12]) if answer.startswith(b"HTTP/1.1 ") else 0
        statuses[status] += 1
        if status >= 500:
            faults.append((data[:2000], answer[:2000]))

    async def run(count: int) -> None:
        waiting = [bad_request(rng) for _ in range(count)]

        async def worker() -> None:
            while waiting:
                await send(waiting.pop())

        await asyncio.gather(*(worker() for _ in range(16)))

    asyncio.run(run(1000))
    before, scraped = server.rss, len(server.get("/metrics").text)
    asyncio.run(run(4000))
    grown = server.rss - before
    assert not faults, faults[:3]
    assert {200, 400, 404, 405, 422} <= set(statuses), statuses
    assert grown < 6 * MIB, f"{grown / MIB:.1f} MiB more after 4000 bad requests"
    # Nothing that clients make up becomes a label.
    assert len(server.get("/metrics").text) - scraped < 10_000
    server.check_serves()
    server.check_all_free()


def num_connections(server: ServerProcess) -> int:
    return sum(
        found.status == psutil.CONN_ESTABLISHED and found.laddr.port == server.port
        for found in psutil.Process(server.process.pid).net_connections("tcp")
    )


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"POST /v1/comp",
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ",
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 90000\r\n\r\n" + b" " * 60_000,
        b"POST /api/chat HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n9000\r\n",
    ],
)
def test_half_open_clients(server: ServerProcess, begun: bytes) -> None:
    """Hundreds that never send the rest hold up nobody; their memory comes back when they go."""
    before = server.rss
    connections = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(300)]
    try:
        for connection in connections:
            connection.sendall(begun)
        wait_until(lambda: num_connections(server) >= 300, 10, "all are connected")
        server.check_serves()
        assert server.rss - before < 40 * MIB
    finally:
        for connection in connections:
            connection.close()
    wait_until(lambda: num_connections(server) == 0, 10, "all are gone")
    assert server.rss - before < 30 * MIB


def test_a_body_larger_than_the_limit(server: ServerProcess) -> None:
    """It is refused when its length is told, and cut off when it is not; neither is kept."""
    before = server.rss
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"

    async def run() -> list[bytes]:
        told = [exchange(server.port, head + b"Content-Length: 9999999\r\n\r\n" + b" " * 200_000) for _ in range(20)]
        untold = [exchange(server.port, head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 64) for _ in range(20)]
        return await asyncio.gather(*told, *untold)

    for answer in asyncio.run(run()):
        # A client that is still sending may find the connection closed before it reads.
        assert answer[9:12] in (b"413", b"")
    assert server.rss - before < 30 * MIB
    server.check_serves()


def test_slow_clients(server: ServerProcess) -> None:
    """A request a byte at a time is answered, and a reader that takes its time gets the whole stream."""
    request = request_bytes("/v1/completions", {"prompt": "Hi", "max_tokens": 8, "stream": True, "ignore_eos": True})
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        for byte in request:
            connection.sendall(bytes([byte]))
        received = b""
        while part := connection.recv(16):
            received += part
            time.sleep(0.001)
    assert received.startswith(b"HTTP/1.1 200")
    # Tokens that came while it was busy share a chunk.
    assert b'"finish_reason":"length"' in received
    assert b"data: [DONE]" in received


def test_clients_that_never_read(server: ServerProcess) -> None:
    """What they do not take is not piled up for them."""
    payload = {"prompt": ["Hi"] * 8, "max_tokens": 400, "stream": True, "logprobs": 5, "ignore_eos": True}
    request = request_bytes("/v1/completions", payload)
    before = server.rss
    connections = []
    for _ in range(50):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(request)
        connections.append(connection)
    most = 0
    end = time.monotonic() + 4
    while time.monotonic() < end:
        most = max(most, server.rss - before)
        time.sleep(0.1)
    server.check_serves()
    for connection in connections:
        connection.close()
    server.check_all_free()
    # Their answers are 50 MB and more.
    assert most < 30 * MIB, f"{most / MIB:.1f} MiB"


def test_pipelined_requests(server: ServerProcess) -> None:
    """Many requests in one write are answered in order."""
    one = request_bytes("/v1/completions", {"prompt": "Hi", "max_tokens": 1}).replace(b"Connection: close\r\n", b"")
    last = request_bytes("/v1/completions", {"prompt": "Hi", "max_tokens": 2})
    answer = asyncio.run(exchange(server.port, one * 20 + last, 20))
    assert answer.count(b"HTTP/1.1 200") == 21
