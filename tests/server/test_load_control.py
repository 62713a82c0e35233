"""Load control over real sockets: limits, fairness, priorities, deadlines, cancellation."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from octavo.server.access.api_keys import KeyRing
from server_fakes import FakeEngine, answer
from server_harness import Running


class Client(threading.Thread):
    """One request in a thread of its own.

    Attributes:
        status, headers, body: of the answer, once joined.
        seconds: it took.
    """

    def __init__(self, server: Running, prompt: Any, headers: dict[str, str] | None = None, **fields: Any) -> None:
        super().__init__(daemon=True)
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        self._payload = {"prompt": prompt, "max_tokens": 5, **fields}
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self.status = 0
        self.start()

    def run(self) -> None:
        began = time.monotonic()
        try:
            self._connection.request("POST", "/v1/completions", json.dumps(self._payload).encode(), self._headers)
            found = self._connection.getresponse()
            self.headers = {name.lower(): value for name, value in found.getheaders()}
            self.body = found.read()
            self.status = found.status
        except (OSError, http.client.HTTPException):
            self.status = -1
        finally:
            self._connection.close()
        self.seconds = time.monotonic() - began

    def done(self) -> Client:
        self.join(20)
        assert not self.is_alive()
        return self

    def leave(self) -> None:
        assert self._connection.sock is not None
        self._connection.sock.shutdown(socket.SHUT_RDWR)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.body)["error"]
        return error


def queue(server: Running) -> dict[str, Any]:
    return server.state.admission_queue(server.state.models[0]).stats()


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def wait_for(server: Running, count: int, *where: str) -> None:
    wait_until(lambda: sum(queue(server)[name] for name in where) == count)


def fill(server: Running, waiting: int, **fields: Any) -> list[Client]:
    """One request that runs and others that wait, in order."""
    clients = []
    for number in range(waiting + 1):
        clients.append(Client(server, [[100 + number]], **fields))
        wait_for(server, number + 1, "in_engine", "waiting")
    return clients


def order(server: Running) -> list[int]:
    """First tokens of the prompts in the order in which the engine got them."""
    return [prompt[0] for prompt in server.engine.prompts]


# ---------------------------------------------------------------- limits


def test_the_queue_is_full_of_requests(start: Callable[..., Running]) -> None:
    server = start(FakeEngine(delay=0.05), max_engine_requests=1, max_queue_requests=2)
    clients = fill(server, 2)
    for stream in (False, True):
        refused = Client(server, "Hi", stream=stream).done()
        assert refused.status == 503
        assert refused.error["type"] == "service_unavailable_error"
        assert refused.error["code"] == "queue_full"
        assert "max_queue_requests 2" in refused.error["message"]
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.headers.get("x-should-retry") != "false"
        assert refused.seconds < 0.2
    assert [client.done().status for client in clients] == [200] * 3
    assert Client(server, "Hi").done().status == 200
    assert queue(server)["rejected"] == 2


def test_the_queue_is_full_of_tokens(start: Callable[..., Running]) -> None:
    server = start(FakeEngine(delay=0.05), max_engine_requests=1, max_queue_tokens=100)
    clients = fill(server, 1)
    assert queue(server)["waiting_tokens"] == 6
    refused = Client(server, [[65] * 90]).done()
    assert (refused.status, refused.error["code"]) == (503, "queue_full")
    assert "max_queue_tokens 100" in refused.error["message"]
    clients.append(Client(server, [[65] * 80]))
    assert [client.done().status for client in clients] == [200] * 3


def test_the_openai_package_waits_and_tries_again(start: Callable[..., Running]) -> None:
    server = start(FakeEngine(delay=0.03), max_engine_requests=1, max_queue_requests=1)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=2) as client:
        client.models.list()
        clients = fill(server, 1, max_tokens=20)
        found = client.completions.create(model="fake", prompt="Hi", max_tokens=5)
    assert found.choices[0].text == answer(5)
    assert queue(server)["rejected"] >= 1
    assert [client.done().status for client in clients] == [200] * 2


def test_the_engine_never_gets_more_than_its_capacity(start: Callable[..., Running]) -> None:
    server = start(FakeEngine(delay=0.005), max_engine_requests=3)
    most = 0
    clients = [Client(server, [[65]] * 4, stream=bool(number % 2)) for number in range(5)]
    while any(client.is_alive() for client in clients):
        most = max(most, server.engine.running)
        time.sleep(0.001)
    assert [client.done().status for client in clients] == [200] * 5
    assert most == 3
    assert len(server.engine.prompts) == 20
    assert len(json.loads(clients[0].body)["choices"]) == 4


def keys(tmp_path: Path, *lines: str) -> KeyRing:
    file = tmp_path / "keys"
    file.write_text("\n".join(lines))
    file.chmod(0o600)
    return KeyRing(file)


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}-secret-key"}


def test_concurrency_of_a_key(start: Callable[..., Running], tmp_path: Path) -> None:
    ring = keys(tmp_path, "alice alice-secret-key max_concurrency=2", "bob bob-secret-key")
    server = start(FakeEngine(delay=0.05), keys=ring)
    clients = [Client(server, "Hi", key("alice")) for _ in range(2)]
    wait_until(lambda: server.engine.running == 2)
    refused = Client(server, "Hi", key("alice")).done()
    assert refused.status == 429
    assert refused.error["type"] == "rate_limit_error"
    assert refused.error["code"] == "concurrency_exceeded"
    assert int(refused.headers["retry-after"]) >= 1
    clients += [Client(server, "Hi", key("bob")) for _ in range(4)]
    assert [client.done().status for client in clients] == [200] * 6
    # Whoever leaves, or fails, gives its place back.
    for _ in range(3):
        gone = Client(server, "Hi", key("alice"), max_tokens=100)
        wait_until(lambda: server.engine.running == 1)
        gone.leave()
        wait_until(lambda: server.engine.running == 0)
        assert Client(server, [[0x7FFFFFFF] * 300], key("alice")).done().status == 400
    wait_until(lambda: server.state.concurrency._running == {})
    assert Client(server, "Hi", key("alice")).done().status == 200


def test_one_limit_for_all_keys(start: Callable[..., Running], tmp_path: Path) -> None:
    ring = keys(tmp_path, "alice alice-secret-key", "bob bob-secret-key max_concurrency=3")
    server = start(FakeEngine(delay=0.1), keys=ring, max_concurrency=1)
    clients = [Client(server, "Hi", key("alice"))] + [Client(server, "Hi", key("bob")) for _ in range(3)]
    wait_until(lambda: server.engine.running == 4)
    assert Client(server, "Hi", key("alice")).done().status == 429
    assert Client(server, "Hi", key("bob")).done().status == 429
    assert [client.done().status for client in clients] == [200] * 4


# ---------------------------------------------------------------- turns


def test_a_tenant_that_floods_does_not_delay_another(start: Callable[..., Running], tmp_path: Path) -> None:
    ring = keys(
        tmp_path,
        "one flood1-secret-key tenant=flood",
        "two flood2-secret-key tenant=flood",
        "other other-secret-key",
    )
    server = start(FakeEngine(delay=0.004), keys=ring, max_engine_requests=1)
    # Two keys of one tenant share its turns.
    flood = [Client(server, [[99]], key("flood1"), max_tokens=150)]
    wait_until(lambda: server.engine.running == 1)
    flood += [Client(server, [[100 + number]], key(f"flood{1 + number % 2}")) for number in range(30)]
    wait_for(server, 30, "waiting")
    before = len(server.engine.prompts)
    late = [Client(server, [[900 + number]], key("other")) for number in range(3)]
    for client in late:
        assert client.done().status == 200
    # Turn by turn: three of its own, three of the flood's and what ran already.
    after = max(order(server).index(900 + number) for number in range(3))
    assert after - before <= 8
    assert [client.done().status for client in flood] == [200] * 31


def test_priorities(start: Callable[..., Running]) -> None:
    server = start(FakeEngine(delay=0.01), max_engine_requests=1)
    clients = fill(server, 0, max_tokens=60)
    asked = [
        ({}, {"priority": 7}),
        ({"X-Priority": "low"}, {}),
        ({}, {}),
        ({"X-Vllm-Priority": "0"}, {"priority": 5}),
        ({"X-Priority": "high"}, {}),
        ({}, {"priority": -3}),
    ]
    for number, (headers, fields) in enumerate(asked):
        clients.append(Client(server, [[500 + number]], headers, **fields))
        wait_for(server, number + 1, "waiting")
    assert queue(server)["waiting_by_class"] == {"high": 2, "normal": 2, "low": 2}
    assert [client.done().status for client in clients] == [200] * 7
    got = order(server)[1:]
    assert got[0] == 504
    assert got.index(505) < got.index(501)
    # The engine knows too, in its own numbers.
    priorities = dict(zip(order(server), (params.priority for params in server.engine.params), strict=True))
    assert [priorities[500 + number] for number in range(6)] == [7, 1, 0, 0, -1, -3]


def test_a_key_bounds_its_requests_priority(start: Callable[..., Running], tmp_path: Path) -> None:
    ring = keys(tmp_path, "batch batch-secret-key priority=low", "vip vip-secret-key priority=high")
    server = start(FakeEngine(delay=0.01), keys=ring, max_engine_requests=1)
    clients = [Client(server, [[100]], key("batch"), max_tokens=60)]
    wait_until(lambda: server.engine.running == 1)
    for number, (name, headers, fields) in enumerate(
        [
            ("batch", {"X-Priority": "high"}, {}),
            ("batch", {}, {"priority": -9}),
            ("vip", {}, {}),
            ("vip", {"X-Priority": "normal"}, {}),
        ]
    ):
        clients.append(Client(server, [[500 + number]], key(name) | headers, **fields))
        wait_for(server, number + 1, "waiting")
    assert queue(server)["waiting_by_class"] == {"high": 1, "normal": 1, "low": 2}
    assert [client.done().status for client in clients] == [200] * 5
    assert order(server)[1] == 502
    assert [params.priority for params in server.engine.params if params.priority < 0] == [-1]


def test_a_wrong_priority(server: Running) -> None:
    refused = Client(server, "Hi", {"X-Priority": "urgent"}).done()
    assert (refused.status, refused.error["param"]) == (400, "X-Priority")


# ---------------------------------------------------------------- deadlines


@pytest.mark.parametrize("how", ["body", "header", "setting"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_while_it_waits(start: Callable[..., Running], how: str, stream: bool) -> None:
    settings = {"request_timeout": 0.2} if how == "setting" else {}
    server = start(FakeEngine(delay=0.05), max_engine_requests=1, **settings)
    clients = fill(server, 0, max_tokens=100)
    headers = {"X-Request-Timeout": "0.2"} if how == "header" else {}
    fields = {"timeout": 0.2} if how == "body" else {}
    late = Client(server, "Hi", headers, stream=stream, **fields).done()
    if how == "setting":
        # The first one's time is over first, so there is a place; both end within their time.
        assert clients[0].done().seconds < 1.0
        return
    assert late.status == 503
    assert late.error["code"] == "queue_timeout"
    assert int(late.headers["retry-after"]) >= 1
    assert 0.15 < late.seconds < 1.0
    assert queue(server)["waiting"] == 0
    assert queue(server)["timed_out"] == 1
    assert len(server.engine.prompts) == 1
    clients[0].leave()


@pytest.mark.parametrize("prompts", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_while_it_generates(start: Callable[..., Running], stream: bool, prompts: int) -> None:
    server = start(FakeEngine(delay=0.02))
    fields = {"stream_options": {"include_usage": True}} if stream else {}
    client = Client(server, [[65]] * prompts, {"X-Request-Timeout": "0.3"}, stream=stream, max_tokens=200, **fields)
    client.done()
    assert client.status == 200
    assert 0.25 < client.seconds < 1.5
    assert server.engine.running == 0
    assert server.engine.aborted == prompts
    if stream:
        events = [json.loads(line[6:]) for line in client.body.decode().split("\n\n") if line.startswith("data: {")]
        usage = events.pop()["usage"]
        choices = [event["choices"][0] for event in events]
        texts = ["".join(c["text"] for c in choices if c["index"] == index) for index in range(prompts)]
        reasons = [c["finish_reason"] for c in choices if c["finish_reason"]]
        assert client.body.endswith(b"data: [DONE]\n\n")
    else:
        answered = json.loads(client.body)
        usage = answered["usage"]
        texts = [choice["text"] for choice in answered["choices"]]
        reasons = [choice["finish_reason"] for choice in answered["choices"]]
    assert reasons == ["length"] * prompts
    for text in texts:
        assert 3 <= len(text) < 100
        assert text == answer(len(text))
    assert usage["completion_tokens"] == sum(map(len, texts))
    wait_until(lambda: server.state.num_running == 0)
    assert queue(server)["in_engine"] == 0


def test_a_deadline_before_the_first_token(start: Callable[..., Running]) -> None:
    server = start(FakeEngine(delay=5))
    client = Client(server, "Hi", timeout=0.2).done()
    assert (client.status, client.error["code"]) == (503, "queue_timeout")
    assert server.engine.running == 0


def test_a_deadline_in_the_middle_of_several_prompts(start: Callable[..., Running]) -> None:
    # The first prompts are answered, the last never get their turn.
    server = start(FakeEngine(delay=0.02), max_engine_requests=1)
    client = Client(server, [[65]] * 4, timeout=0.35, max_tokens=10).done()
    assert client.status == 200
    choices = json.loads(client.body)["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["length"] * 4
    assert choices[0]["text"] == answer(10)
    assert choices[3]["text"] == ""


@pytest.mark.parametrize("given", ["0", "-1", "nan", "inf", "1e9", "soon", "", "1" * 500])
def test_a_wrong_deadline(server: Running, given: str) -> None:
    refused = Client(server, "Hi", {"X-Request-Timeout": given}).done()
    assert (refused.status, refused.error["param"]) == (400, "X-Request-Timeout")
    assert len(refused.error["message"]) < 300
    assert server.engine.prompts == []


def test_a_deadline_that_is_kept(server: Running) -> None:
    client = Client(server, "Hi", {"X-Request-Timeout": "20"}, timeout=30).done()
    assert (client.status, json.loads(client.body)["choices"][0]["text"]) == (200, answer(5))


# ---------------------------------------------------------------- leaving


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_the_queue(start: Callable[..., Running], stream: bool) -> None:
    server = start(FakeEngine(delay=0.05), max_engine_requests=1)
    clients = fill(server, 5, stream=stream)
    for client in clients[1:4]:
        client.leave()
    wait_until(lambda: queue(server)["waiting"] == 2, 1.0)
    assert clients[0].is_alive()
    assert [clients[number].done().status for number in (0, 4, 5)] == [200] * 3
    assert order(server) == [100, 104, 105]
    wait_until(lambda: server.state.num_running == 0)
    assert queue(server)["in_engine"] == queue(server)["waiting_tokens"] == 0


def test_a_thousand_clients_that_leave(start: Callable[..., Running]) -> None:
    server = start(FakeEngine(delay=0.05), max_engine_requests=1)
    first = fill(server, 0, max_tokens=100)
    for _ in range(4):
        clients = [Client(server, "Hi") for _ in range(100)]
        wait_until(lambda: queue(server)["waiting"] == 100)
        for client in clients:
            client.leave()
        wait_until(lambda: queue(server)["waiting"] == 0)
        for client in clients:
            client.done()
    assert queue(server)["in_engine"] == 1
    first[0].leave()
    wait_until(lambda: queue(server)["in_engine"] == 0)


def test_shutdown_empties_the_queue(start: Callable[..., Running]) -> None:
    server = start(FakeEngine(delay=0.05), max_engine_requests=1)
    clients = fill(server, 3, max_tokens=100)
    server.state.abort_all()
    for client in clients[1:]:
        assert (client.done().status, client.error["code"]) == (503, "server_stopping")
    assert queue(server)["waiting"] == 0
