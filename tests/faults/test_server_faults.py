"""A whole server whose engine dies or hangs, whose queue is full, whose clients leave, that is told to end.

Whatever happens, every client gets an answer or is told that it gets none, and no block of the KV cache is lost.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable

import psutil
import pytest
from server_process import Outcome, ServerProcess, ask, exchange, free_port, request_bytes, wait_until

# One after the other: each wants the machine to itself.
pytestmark = pytest.mark.xdist_group("server_processes")

Serve = Callable[..., ServerProcess]
LONG = {"prompt": "Once upon a time", "max_tokens": 4000, "stream": True}


def check_answered(outcomes: list[Outcome]) -> None:
    assert [outcome for outcome in outcomes if not outcome.is_answered] == []


async def under_way(server: ServerProcess, count: int, whole: int = 0) -> list[asyncio.Task[Outcome]]:
    """`count` long streams that have begun, and `whole` requests for an answer in one piece."""
    begun = 0

    def on_first() -> None:
        nonlocal begun
        begun += 1

    tasks = [asyncio.ensure_future(ask(server.port, LONG, on_first=on_first)) for _ in range(count)]
    tasks += [asyncio.ensure_future(ask(server.port, LONG | {"stream": False})) for _ in range(whole)]
    end = time.monotonic() + 20
    while begun < count:
        assert time.monotonic() < end, f"{begun} of {count} streams have begun"
        await asyncio.sleep(0.01)
    return tasks


def test_the_engine_is_killed_mid_stream(serve: Serve) -> None:
    server = serve("fake?step_ms=2")

    async def run() -> list[Outcome]:
        tasks = await under_way(server, 32, whole=8)
        server.worker.kill()
        return await asyncio.gather(*tasks)

    outcomes = asyncio.run(run())
    check_answered(outcomes)
    assert all(outcome.error is not None for outcome in outcomes)
    assert {outcome.status for outcome in outcomes[:32]} == {200}
    assert {outcome.status for outcome in outcomes[32:]} == {503}
    # A new engine takes the dead one's place.
    wait_until(lambda: server.status() == 200, 30, "ready again")
    server.check_serves()
    server.check_all_free()
    server.stop()


STREAMS = {
    "/v1/completions": (LONG, b"data: [DONE]"),
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": "Hi"}], "stream": True}, b"data: [DONE]"),
    "/v1/messages": (
        {"messages": [{"role": "user", "content": "Hi"}], "model": "fake", "max_tokens": 4000, "stream": True},
        b"event: error",
    ),
    "/v1/responses": ({"input": "Hi", "stream": True}, b"event: error"),
    "/api/chat": ({"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}, b'{"error":"'),
    "/api/generate": ({"model": "fake", "prompt": "Hi"}, b'{"error":"'),
    "/generate_stream": ({"inputs": "Hi", "parameters": {"max_new_tokens": 4000}}, b'"error_type":"generation"'),
}


def test_every_protocol_tells_of_the_end(serve: Serve) -> None:
    server = serve("fake?step_ms=2")

    async def run() -> list[bytes]:
        tasks = [
            asyncio.ensure_future(exchange(server.port, request_bytes(path, payload), 30))
            for path, (payload, _) in STREAMS.items()
        ]
        await asyncio.to_thread(
            wait_until, lambda: server.metrics()["vllm:num_requests_running"] == len(STREAMS), 10, "all run"
        )
        await asyncio.sleep(0.2)
        server.worker.kill()
        return await asyncio.gather(*tasks)

    for (path, (_, end)), answer in zip(STREAMS.items(), asyncio.run(run()), strict=True):
        assert answer.startswith(b"HTTP/1.1 200"), (path, answer[:500])
        assert end in answer[-1500:], (path, answer[-1500:])
        assert answer.endswith(b"0\r\n\r\n"), path
    server.stop()


def test_processes_of_one_port_are_killed(serve: Serve) -> None:
    """The engine's end is told by every process; that of one of them costs its own clients alone, and no block."""
    server = serve("fake?step_ms=2", ["--api-processes", "3"])
    server.wait_ready()

    async def run(victim: psutil.Process) -> list[Outcome]:
        tasks = await under_way(server, 30)
        victim.kill()
        return await asyncio.gather(*tasks)

    check_answered(asyncio.run(run(server.worker)))
    server.wait_ready()
    server.stop()

    server = serve("fake?step_ms=2&end_after=400", ["--api-processes", "3"])
    server.wait_ready()
    outcomes = asyncio.run(run(server.siblings[0]))
    whole = [outcome for outcome in outcomes if outcome.is_answered]
    assert all(outcome.error is None for outcome in whole)
    assert len(whole) >= 10
    wait_until(lambda: len(server.siblings) == 2, 20, "another takes its place")
    server.wait_ready()
    server.check_all_free()
    server.check_serves()
    server.stop()


def test_requests_while_the_engine_is_away_are_answered(serve: Serve) -> None:
    server = serve("fake?load_ms=500")
    server.worker.kill()
    wait_until(lambda: server.status() == 503, 5, "readyz says so")
    assert server.status("/livez") == 200

    async def run() -> list[Outcome]:
        outcomes = []
        while not outcomes or outcomes[-1].status != 200:
            outcomes.append(await ask(server.port, {"prompt": "Hi", "max_tokens": 2}))
            await asyncio.sleep(0.05)
        return outcomes

    outcomes = asyncio.run(asyncio.wait_for(run(), 30))
    check_answered(outcomes)
    assert {outcome.status for outcome in outcomes} <= {200, 503}
    assert all("retry-after" in outcome.headers for outcome in outcomes if outcome.status == 503)
    server.check_all_free()
    server.stop()


def test_the_engine_stands_still_for_good(serve: Serve) -> None:
    """It is taken for hung, its requests end, and another takes its place."""
    server = serve("fake?step_ms=2")

    async def run() -> list[Outcome]:
        tasks = await under_way(server, 16, whole=4)
        server.worker.suspend()
        return await asyncio.gather(*tasks)

    outcomes = asyncio.run(run())
    check_answered(outcomes)
    assert all(outcome.error is not None for outcome in outcomes)
    wait_until(lambda: server.status() == 200, 30, "ready again")
    server.check_serves()
    server.check_all_free()
    wait_until(lambda: len(server.workers) == 1, 10, "the old engine is gone")
    server.stop()


def test_the_device_fails_again_and_again(serve: Serve) -> None:
    """An engine that cannot be helped is given up; requests are refused at once, and the probes say why to restart."""
    server = serve("fake?step_ms=1&fail_at=40", ["--restart-limit", "1"])

    async def run() -> list[Outcome]:
        outcomes: list[Outcome] = []
        while server.status("/livez") == 200:
            asked = (ask(server.port, LONG) for _ in range(8))
            outcomes += await asyncio.gather(*asked)
        return outcomes

    outcomes = asyncio.run(asyncio.wait_for(run(), 30))
    check_answered(outcomes)
    assert all(outcome.error is not None for outcome in outcomes)
    assert server.status() == 503
    began = time.monotonic()
    refused = asyncio.run(ask(server.port, LONG))
    assert (refused.status, refused.is_answered) == (503, True)
    assert time.monotonic() - began < 2
    server.stop()


def test_the_engine_stands_still_for_a_while(serve: Serve) -> None:
    """Nobody is thrown out for a pause that ends."""
    server = serve("fake?step_ms=2&end_after=300")

    async def run() -> list[Outcome]:
        tasks = await under_way(server, 16)
        worker = server.worker
        worker.suspend()
        await asyncio.sleep(0.6)
        assert not any(task.done() for task in tasks)
        worker.resume()
        return await asyncio.gather(*tasks)

    outcomes = asyncio.run(run())
    check_answered(outcomes)
    assert all(outcome.error is None for outcome in outcomes)
    server.check_all_free()
    server.stop()


def test_the_queue_is_full(serve: Serve) -> None:
    server = serve("fake?step_ms=2&end_after=50", ["--max-engine-requests", "8", "--max-queue-requests", "16"])

    async def run() -> list[Outcome]:
        payloads = [LONG | {"max_tokens": 60, "stream": number % 2 == 0} for number in range(200)]
        return await asyncio.gather(*(ask(server.port, payload) for payload in payloads))

    outcomes = asyncio.run(run())
    check_answered(outcomes)
    statuses = Counter(outcome.status for outcome in outcomes)
    assert set(statuses) == {200, 503}
    assert statuses[200] >= 24
    refused = [outcome for outcome in outcomes if outcome.status == 503]
    assert {outcome.error["code"] for outcome in refused if outcome.error} == {"queue_full"}
    assert all(int(outcome.headers["retry-after"]) >= 1 for outcome in refused)
    server.check_all_free()
    server.check_serves()
    server.stop()


def test_a_thousand_clients_leave(serve: Serve) -> None:
    server = serve("fake?step_ms=2", ["--max-num-seqs", "64"])
    request = request_bytes("/v1/completions", LONG)
    before = 0
    for wave in range(5):
        if wave == 1:
            # The first is to warm up.
            server.check_all_free(20)
            before = server.rss
        connections = []
        for _ in range(250):
            connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
            connection.sendall(request)
            connections.append(connection)
        # Some leave while they wait, some in the middle of their stream, some without a word.
        for number, connection in enumerate(connections):
            if number % 4 == wave % 4 and number < 60:
                assert connection.recv(100)
            if number % 3 == 0:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.close()
    server.check_all_free(20)
    server.check_serves()
    assert server.metrics()["octavo_client_disconnects_total"] >= 1000
    assert server.rss - before < 8 << 20
    server.stop()


def test_the_server_is_told_to_end_while_it_loads(serve: Serve) -> None:
    """It answers from the start, and ends at once with what it loads."""
    server = serve("fake?load_ms=60000", port=free_port())
    wait_until(server.listens, 30, "it listens")
    assert (server.status("/livez"), server.status("/readyz")) == (200, 503)
    refused = asyncio.run(ask(server.port, LONG))
    assert (refused.status, refused.is_answered) == (503, True)
    assert int(refused.headers["retry-after"]) >= 1
    wait_until(lambda: server.workers, 20, "the engine loads")
    worker = server.worker
    server.signal(signal.SIGTERM)
    assert server.wait(10) == 0, server.output
    wait_until(lambda: not worker.is_running() or worker.status() == "zombie", 10, "the engine is gone")


@pytest.mark.parametrize("signals", [1, 2])
def test_the_server_is_told_to_end_under_load(serve: Serve, signals: int) -> None:
    # Half of the streams are short enough to end within the time that one signal leaves them.
    grace = 3 if signals == 1 else 12
    server = serve("fake?step_ms=5", ["--shutdown-timeout", f"{grace}"])

    async def run() -> tuple[list[Outcome], list[Outcome], float]:
        tasks = await under_way(server, 16, whole=4)
        short = [asyncio.ensure_future(ask(server.port, LONG | {"max_tokens": 40})) for _ in range(16)]
        await asyncio.sleep(0.05)
        server.signal(signal.SIGTERM)
        began = time.monotonic()
        if signals == 2:
            await asyncio.sleep(0.3)
            server.signal(signal.SIGTERM)
        return await asyncio.gather(*short), await asyncio.gather(*tasks), time.monotonic() - began

    short, outcomes, seconds = asyncio.run(run())
    check_answered(outcomes)
    assert all(outcome.error is not None for outcome in outcomes)
    assert server.wait(15) == 0
    if signals == 1:
        check_answered(short)
        assert all(outcome.error is None for outcome in short), short
        assert seconds >= grace - 0.5
    else:
        assert seconds < grace - 3


def test_models_are_swapped_under_load(serve: Serve) -> None:
    """An alias and an A/B of two versions lose no request while their models are replaced again and again."""
    model = "fake?step_ms=1&end_after=80"
    new = {"path": model, "engine": {"load_format": "fake"}}
    server = serve(f"chat@v1={model}", ["--admin-port", "0"])
    server.admin("POST", "models/load", new | {"model": "rival"})
    server.admin("PUT", "aliases/ab", {"chat@v1": 1, "rival": 1})
    outcomes: list[Outcome] = []
    over = False

    async def client(number: int) -> None:
        count = 0
        while not over:
            count += 1
            name = ("chat", "ab")[number % 2]
            payload = {"model": name, "prompt": "Hi", "max_tokens": 100, "stream": number % 3 > 0, "user": f"{number}"}
            outcomes.append(await ask(server.port, payload))

    async def run() -> None:
        nonlocal over
        clients = [asyncio.ensure_future(client(number)) for number in range(24)]
        swaps = [new | {"model": "chat", "to": f"chat@{version}"} for version in ("v2", "v3", "v4")]
        swaps.append(new | {"model": "ab", "replace": "rival", "to": "champion"})
        for swap in swaps:
            await asyncio.sleep(0.5)
            await asyncio.to_thread(server.admin, "POST", "models/swap", swap | {"wait": True})
        await asyncio.sleep(0.5)
        over = True
        await asyncio.gather(*clients)

    asyncio.run(run())
    check_answered(outcomes)
    assert {outcome.status for outcome in outcomes} == {200}
    assert all(outcome.error is None for outcome in outcomes)
    versions = Counter(outcome.headers["x-model-version"] for outcome in outcomes)
    assert set(versions) >= {"chat@v1", "chat@v2", "chat@v3", "chat@v4", "rival", "champion"}
    server.check_all_free()
    # No engine of a version that has gone is left behind.
    loaded = [entry["id"] for entry in server.admin("GET", "models")["models"] if entry["state"] == "ready"]
    assert set(loaded) == {"chat@v1", "chat@v4", "champion"}
    wait_until(lambda: len(server.workers) == 3, 10, "three engines are left")
    server.stop()
