"""Tokens pushed directly from the engine's message to the connection: the same bytes as through ASGI."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st
from octavo.config import EngineConfig
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.client import EngineClient
from octavo.engine.outputs import OutputDelta
from octavo.sampling_params import SamplingParams
from octavo.server.lifecycle import Events, serve
from octavo.server.observability.request_record import RequestRecord
from octavo.server.state import ServerState
from octavo.server.transport.http_protocol import ChunkSender
from octavo.server.transport.listen import bind
from server_fakes import FakeEngine
from server_harness import Running

MESSAGES = [{"role": "user", "content": "Tell me of the island."}]


class ScriptedEngine(FakeEngine):
    """Answers a script of (answer, text of a token), and offers what it may to the sink.

    Attributes:
        script: what comes, in order; every answer ends with its last token.
        offers: whether the sink is offered anything.
        taken: tokens it took.
    """

    def __init__(self) -> None:
        super().__init__()
        self.script: list[tuple[int, str]] = []
        self.offers = True
        self.taken = 0

    async def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        sink: Callable[[int, bytes], bool] | None = None,
        **_: Any,
    ) -> AsyncIterator[OutputDelta]:
        last = {index: place for place, (index, _) in enumerate(self.script)}
        for place, (index, text) in enumerate(self.script):
            ends = last[index] == place
            if place and not ends and self.offers and sink is not None and sink(index, text.encode()):
                self.taken += 1
                continue
            yield OutputDelta(index=index, text=text, token_ids=[7], finish_reason="length" if ends else None)


def exchange(port: int, path: str, body: dict[str, Any]) -> bytes:
    """The answer as it comes over the wire, chunked framing and all."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nx-request-id: same\r\ncontent-length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), 20) as connection:
        connection.sendall(head.encode() + data)
        received = b""
        while not received.endswith(b"\r\n0\r\n\r\n"):
            part = connection.recv(1 << 16)
            assert part, f"the connection closed after {received!r}"
            received += part
    head, _, rest = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    if path == "/api/chat":
        # Its times differ in length, so that the chunks' sizes do too.
        return re.sub(rb'"(created_at|\w+_duration)":[^,}]+', b"", dechunked(rest))
    return re.sub(rb'"created":\d+', b'"created":0', rest)


@st.composite
def scripts(draw: st.DrawFn) -> tuple[int, list[tuple[int, str]]]:
    n = draw(st.integers(1, 3))
    text = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.sampled_from(['"', "\\", "\x00\n", "é🎉"])
    tokens = draw(st.lists(st.tuples(st.integers(0, n - 1), text), min_size=1, max_size=30))
    return n, [*[(index, "") for index in range(n)], *tokens]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/api/chat"])
def test_pushed_bytes_equal_those_through_asgi(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    engine = ScriptedEngine()
    port = start(engine).port

    @settings(max_examples=60, deadline=None)
    @given(scripts(), st.booleans(), st.booleans())
    def check(script: tuple[int, list[tuple[int, str]]], with_usage: bool, echo: bool) -> None:
        n, engine.script = script
        if path in ("/v1/messages", "/api/chat"):
            n, engine.script = 1, [(0, text) for _, text in engine.script]
        body: dict[str, Any] = {"model": "fake", "n": n, "stream": True, "max_tokens": 64, "temperature": 1}
        if path == "/v1/completions":
            body |= {"prompt": 'A "prompt"', "echo": echo}
        else:
            body["messages"] = MESSAGES
        if with_usage and "completions" in path:
            body["stream_options"] = {"include_usage": True}
        engine.offers = True
        pushed = exchange(port, path, body)
        engine.offers = False
        yielded = exchange(port, path, body)
        with monkeypatch.context() as patch:
            patch.setattr(ChunkSender, "__call__", lambda self, data: False)
            through_asgi = exchange(port, path, body)
        assert pushed == yielded == through_asgi
        if "completions" in path:
            assert pushed.count(b"data: [DONE]\n\n") == 1
        if "stream_options" in body:
            assert b'"completion_tokens":%d' % len(engine.script) in pushed

    check()
    assert engine.taken > 100


@pytest.fixture
def pushes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts tokens that were pushed."""
    count = [0]
    add_token = RequestRecord.add_token

    def counted(self: RequestRecord, choice: int) -> None:
        count[0] += 1
        add_token(self, choice)

    monkeypatch.setattr(RequestRecord, "add_token", counted)
    return count


@pytest.fixture
def keeps_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine merges no tokens: what a client that is slow itself does can be seen all the same."""
    never = property(lambda client: False, lambda client, behind: None)
    monkeypatch.setattr(EngineClient, "behind", never, raising=False)


@asynccontextmanager
async def served(model: str, send_buffer: int = 0) -> AsyncIterator[tuple[int, AsyncEngine, ServerState]]:
    """A server over a real engine process that has a fake model: its port."""
    listener = bind("127.0.0.1", 0)
    if send_buffer:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    ready = asyncio.Event()
    state = ServerState()
    engine = await AsyncEngine.start(EngineConfig(model=model, load_format="fake", max_model_len=32768))

    async def started() -> AsyncEngine:
        return engine

    task = asyncio.ensure_future(
        serve(
            listener,
            started(),
            names=("fake",),
            grace=0.1,
            state=state,
            signals=False,
            events=Events(ready=lambda _: ready.set()),
        )
    )
    try:
        await ready.wait()
        yield listener.getsockname()[1], engine, state
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def ask(port: int, path: str, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request and read the answer's head."""
    data = json.dumps({"model": "fake", **body}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    request = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(request.encode() + data)
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), head
    return reader, writer


async def events(port: int, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """All events of a streamed answer."""
    reader, writer = await ask(port, path, {**body, "stream": True, "stream_options": {"include_usage": True}})
    received = await reader.readuntil(b"\r\n0\r\n\r\n")
    writer.close()
    return parse(received)


def dechunked(received: bytes) -> bytes:
    """A chunked body's bytes."""
    text = b""
    while not received.startswith(b"0\r\n"):
        size, _, received = received.partition(b"\r\n")
        text += received[: int(size, 16)]
        received = received[int(size, 16) + 2 :]
    return text


def parse(received: bytes) -> list[dict[str, Any]]:
    """The events in a chunked body, of which `[DONE]` is the last."""
    lines = [line[6:] for line in dechunked(received).decode().split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def whole(port: int, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """A whole answer."""
    reader, writer = await ask(port, path, body)
    answer: dict[str, Any] = json.loads(await reader.read())
    writer.close()
    return answer


def texts(parts: list[dict[str, Any]], n: int) -> list[str]:
    """The text of each answer, pieced together."""
    joined = [""] * n
    for part in parts:
        for choice in part["choices"]:
            joined[choice["index"]] += choice["delta"]["content"] if "delta" in choice else choice["text"]
    return joined


REQUESTS = [
    {"max_tokens": 200, "ignore_eos": True},
    {"max_tokens": 300, "n": 3, "temperature": 1, "seed": 5, "ignore_eos": True},
    {"max_tokens": 400, "stop": ["lighthouse", "flour rose", "🐈"], "ignore_eos": True},
    {"max_tokens": 400, "n": 2, "temperature": 1, "seed": 9, "stop": ["cat", "東京"], "ignore_eos": True},
    {"max_tokens": 64, "include_stop_str_in_output": True, "stop": ["storm", "letters"]},
    {"max_tokens": 1},
    {"max_tokens": 2},
]


def test_a_stream_equals_the_whole_completion_and_its_counts(pushes: list[int]) -> None:
    async def main() -> None:
        async with served("fake?step_ms=0.5") as (port, _, state):
            bodies = [
                (path, {"temperature": 0, **request, **prompt})
                for request in REQUESTS
                for path, prompt in (
                    ("/v1/chat/completions", {"messages": MESSAGES}),
                    ("/v1/completions", {"prompt": "The island"}),
                )
            ]
            streams = await asyncio.gather(*(events(port, path, body) for path, body in bodies))
            answers = [await whole(port, path, body) for path, body in bodies]
            generated = 0
            for (path, body), parts, answer in zip(bodies, streams, answers, strict=True):
                choices = answer["choices"]
                expected = [choice["message"]["content"] if "chat" in path else choice["text"] for choice in choices]
                assert texts(parts, body.get("n", 1)) == expected
                assert parts[-1]["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]
                ends = {
                    choice["index"]: (choice["finish_reason"], choice["stop_reason"])
                    for part in parts
                    for choice in part["choices"]
                    if choice["finish_reason"]
                }
                for choice in choices:
                    assert ends[choice["index"]] == (choice["finish_reason"], choice["stop_reason"])
                generated += 2 * answer["usage"]["completion_tokens"]
            series = state.metrics.model("fake")
            assert series.generation_tokens.value == generated
            # An answer's first piece has no time before it, whatever it holds.
            assert 0.9 * generated < series.inter_token.count < generated

    uvloop.run(asyncio.wait_for(main(), 60))
    assert pushes[0] > 1000


@pytest.mark.usefixtures("keeps_up")
def test_a_slow_reader_gets_everything_from_a_bounded_buffer(
    monkeypatch: pytest.MonkeyPatch, pushes: list[int]
) -> None:
    buffered = [0]
    send = ChunkSender.__call__

    def watched(self: ChunkSender, data: bytes) -> bool:
        sent = send(self, data)
        buffered.append(self._write.__self__.get_write_buffer_size())  # type: ignore[attr-defined]
        return sent

    monkeypatch.setattr(ChunkSender, "__call__", watched)

    async def main() -> None:
        async with served("fake", send_buffer=1 << 14) as (port, _, _):
            body = {"messages": MESSAGES, "max_tokens": 12000, "temperature": 0, "ignore_eos": True}
            slow = socket.socket()
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
            slow.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(slow, ("127.0.0.1", port))
            data = json.dumps({"model": "fake", "stream": True, **body}).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n\r\n"
            await loop.sock_sendall(slow, head.encode() + data)
            answer = await whole(port, "/v1/chat/completions", body)
            quick = await events(port, "/v1/chat/completions", body)
            received = b""
            while not received.endswith(b"\r\n0\r\n\r\n"):
                received += await loop.sock_recv(slow, 1 << 16)
            slow.close()
            parts = parse(received.partition(b"\r\n\r\n")[2])
            expected = [answer["choices"][0]["message"]["content"]]
            assert texts(parts, 1) == texts(quick, 1) == expected
            # What came while it did not read was merged.
            assert len(parts) < 6000
            assert max(buffered) < 1 << 18

    uvloop.run(asyncio.wait_for(main(), 60))
    assert pushes[0] > 1000


def test_clients_that_leave_end_their_requests_within_steps(pushes: list[int]) -> None:
    async def main() -> None:
        async with served("fake?step_ms=2") as (port, engine, state):
            body = {"messages": MESSAGES, "max_tokens": 20000, "ignore_eos": True, "stream": True}
            opened = await asyncio.gather(*(ask(port, "/v1/chat/completions", body) for _ in range(40)))
            for reader, _ in opened:
                await reader.readexactly(4000)
            assert (await engine.stats())["running"] == 40
            for _, writer in opened:
                writer.transport.abort()
            for _ in range(200):
                stats = await engine.stats()
                if not stats["blocks_used"]:
                    break
                await asyncio.sleep(0.01)
            assert (stats["running"], stats["blocks_used"], stats["open_requests"]) == (0, 0, 0)
            assert state.metrics.client_disconnects.labels().value == 40

    uvloop.run(asyncio.wait_for(main(), 60))
    assert pushes[0] > 100


def test_streams_of_a_dead_engine_end_with_an_error_after_their_tokens(pushes: list[int]) -> None:
    async def main() -> None:
        async with served("fake?step_ms=2&fail_at=150") as (port, _, _):
            body = {"messages": MESSAGES, "max_tokens": 20000, "ignore_eos": True}
            for parts in await asyncio.gather(*(events(port, "/v1/chat/completions", body) for _ in range(8))):
                assert parts[-1]["error"]["code"] == "engine_dead"
                assert len(texts(parts[:-1], 1)[0]) > 300
                assert all(choice["finish_reason"] is None for part in parts[:-1] for choice in part["choices"])

    uvloop.run(asyncio.wait_for(main(), 60))
    assert pushes[0] > 500


def test_a_blocked_loop_catches_up_with_merged_tokens(pushes: list[int]) -> None:
    async def main() -> None:
        async with served("fake?step_ms=1") as (port, _, _):
            body = {"messages": MESSAGES, "max_tokens": 1200, "temperature": 0, "ignore_eos": True}

            async def hold_up() -> None:
                for _ in range(3):
                    await asyncio.sleep(0.1)
                    time.sleep(0.2)

            held_up = asyncio.ensure_future(hold_up())
            parts = await events(port, "/v1/chat/completions", body)
            await held_up
            expected = (await whole(port, "/v1/chat/completions", body))["choices"][0]["message"]["content"]
            assert texts(parts, 1) == [expected]
            assert parts[-1]["usage"]["completion_tokens"] == 1200
            assert len(parts) < 1000

    uvloop.run(asyncio.wait_for(main(), 60))
    assert pushes[0] > 100
