"""Several models behind one socket: names, variants, swaps under load, loads on request."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from octavo.server.access.api_keys import KeyRing
from octavo.server.models.registry_entry import ModelState
from routing_harness import Routed, versions
from server_fakes import answer


@pytest.fixture
def routed() -> Iterator[Callable[..., Routed]]:
    """Starts servers; stopped at the test's end."""
    running: list[Routed] = []

    def make(*models: str, **how: Any) -> Routed:
        running.append(Routed(*models, **how))
        return running[-1]

    yield make
    for server in running:
        server.stop()


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_responses_carry_the_requested_name_and_the_model_id(routed: Callable[..., Routed]) -> None:
    server = routed("m@v1", "m@v2", "other")
    server.registry.set_alias("chat", {"m@v1": 1, "m@v2": 0})
    for name, model in (("m", "m@v1"), ("m@v2", "m@v2"), ("chat", "m@v1"), ("other", "other")):
        answered = server.ask(name)
        assert (answered.status_code, answered.json()["model"]) == (200, name)
        assert answered.json()["system_fingerprint"] == answered.headers["x-model-version"] == model
    assert server.ask(None).json()["model"] == "m"
    chat = {"model": "chat", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    assert server.http.post(f"{server.url}/v1/chat/completions", json=chat).json()["system_fingerprint"] == "m@v1"
    streamed = server.ask("chat", stream=True)
    assert streamed.headers["x-model-version"] == "m@v1"
    assert json.loads(streamed.text.split("\n\n")[0].removeprefix("data: "))["model"] == "chat"
    listed = server.get("v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["m@v1", "m@v2", "other", "m", "chat"]
    assert server.get("v1/models/chat").json()["max_model_len"] == 256
    unknown = server.ask("chta")
    assert unknown.status_code == 404
    assert "did you mean `chat`?" in unknown.json()["error"]["message"]


def test_a_user_or_session_stays_with_its_variant(routed: Callable[..., Routed]) -> None:
    server = routed("m@v1", "m@v2")
    server.registry.set_alias("chat", {"m@v1": 50, "m@v2": 50})
    for who in range(4):
        for how in (
            {"user": f"user-{who}"},
            {"session_id": f"session-{who}"},
            {"headers": {"X-Session-ID": f"session-{who}"}},
        ):
            assert len(versions([server.ask("chat", **how) for _ in range(8)])) == 1  # type: ignore[arg-type]
    # The body's session and the header's are one thing.
    for who in range(6):
        one = server.ask("chat", session_id=f"s{who}")
        other = server.ask("chat", headers={"X-Session-ID": f"s{who}"})
        assert len(versions([one, other])) == 1
    assert versions([server.ask("chat", user=f"user-{who}") for who in range(24)]) == {"m@v1", "m@v2"}
    # Without any, each request draws.
    assert versions([server.ask("chat") for _ in range(24)]) == {"m@v1", "m@v2"}
    assert versions([server.ask("chat", {"X-Variant": "m@v2"}, user="user-1") for _ in range(8)]) == {"m@v2"}
    refused = server.ask("chat", {"X-Variant": "m@v3"})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("X-Variant: `chat` has no variant `m@v3`; it has `m@v1`")


def test_a_keys_requests_stay_with_their_variant(routed: Callable[..., Routed]) -> None:
    keys = KeyRing(arguments=[f"the-key-number-{number}" for number in range(12)])
    server = routed("m@v1", "m@v2", keys=keys)
    server.registry.set_alias("chat", {"m@v1": 50, "m@v2": 50})
    seen = set()
    for number in range(12):
        headers = {"Authorization": f"Bearer the-key-number-{number}"}
        got = versions([server.ask("chat", headers) for _ in range(4)])
        assert len(got) == 1
        seen |= got
    assert seen == {"m@v1", "m@v2"}


async def _load_on(
    server: Routed, names: list[str], clients: int, over: threading.Event, outcomes: Counter[str]
) -> None:
    """Ask from many clients at once until told to stop; what is not a whole answer is counted as such."""
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)

    async def client(number: int, session: httpx.AsyncClient) -> None:
        turn = number
        while not over.is_set():
            name, stream = names[turn % len(names)], turn % 2 == 0
            turn += 1
            body = {"model": name, "prompt": "Hi", "max_tokens": 6, "stream": stream, "user": f"u{number}"}
            got = await session.post(f"{server.url}/v1/completions", json=body)
            text = got.text
            if stream:
                events = text.strip().split("\n\n")
                chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
                whole = events[-1] == "data: [DONE]" and not any("error" in chunk for chunk in chunks)
                said = "".join(choice["text"] for chunk in chunks for choice in chunk.get("choices", []))
            else:
                whole = got.status_code == 200
                said = got.json()["choices"][0]["text"] if whole else ""
            if got.status_code == 200 and whole and said == answer(6):
                outcomes[f"{name} {got.headers['x-model-version']}"] += 1
            else:
                outcomes[f"failed {got.status_code} {text[:200]}"] += 1

    async with httpx.AsyncClient(limits=limits, timeout=30) as session:
        await asyncio.gather(*(client(number, session) for number in range(clients)))


def test_two_models_and_an_alias_swapped_under_load_lose_no_request(routed: Callable[..., Routed]) -> None:
    server = routed("a@v1=a?delay=0.002", "b@v1=b?delay=0.002", "b@v2=b?delay=0.002")
    server.registry.set_alias("chat", {"a@v1": 70, "b@v2": 30})
    over = threading.Event()
    counts: Counter[str] = Counter()

    def load() -> None:
        asyncio.run(_load_on(server, ["a", "b", "chat"], 200, over, counts))

    def swap(body: dict[str, Any]) -> Any:
        done = server.admin("POST", "models/swap", {"wait": True, **body})
        assert done.status_code == 200, done.text
        return done.json()

    def seen(outcome: str) -> None:
        before = counts[outcome]
        wait_until(lambda: counts[outcome] > before + 10, 20)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        seen("chat b@v2")
        for number in (2, 3):
            swap({"model": "a", "to": f"a@v{number}", "path": "a?delay=0.002&load=0.1"})
            seen(f"a a@v{number}")
        # Back again, also while the other still drains; and one variant of the alias.
        swap({"model": "a", "to": "a@v2", "wait": False})
        swap({"model": "a", "to": "a@v1"})
        seen("a a@v1")
        assert swap({"model": "chat", "to": "b@v1", "replace": "b@v2"})["weights"] == {"a@v1": 70, "b@v1": 30}
        seen("chat b@v1")
        failed = server.admin("POST", "models/swap", {"model": "b", "to": "b@v9", "path": "b?fail=1"})
        assert failed.status_code == 422
        seen("b b@v1")
    finally:
        over.set()
        thread.join(30)
    assert not [outcome for outcome in counts if outcome.startswith("failed")], counts
    assert sum(counts.values()) > 300
    wait_until(lambda: server.state.num_running == 0)
    assert all(engine.running == 0 and engine.aborted == 0 for engine in server.engines.started)
    assert all(entry.leases == 0 for entry in server.registry.entries)
    states = {entry.id: entry.state.value for entry in server.registry.entries}
    ready = {id for id, state in states.items() if state == "ready"}
    assert ready == {"a@v1", "b@v1"}, states
    assert len(server.engines.open) == 2


def test_idle_models_are_unloaded_and_requests_load_them(routed: Callable[..., Routed]) -> None:
    server = routed("a", "~b=b?load=0.05", idle_unload=0.2)
    assert server.engines.open == ["a"]
    assert server.ask("b").status_code == 200
    wait_until(lambda: server.engines.open == [])
    assert server.get("readyz").status_code == 200
    assert [model["id"] for model in server.get("v1/models").json()["data"]] == ["a", "b"]
    assert server.ask("a").json()["choices"][0]["text"] == answer(2)
    assert server.engines.open == ["a"]


def test_a_request_for_a_loading_model_waits_or_gets_retry_after(routed: Callable[..., Routed]) -> None:
    server = routed("a", "~b=b?load=0.4", model_load_wait=0.05)
    refused = server.ask("b")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_loading")
    assert int(refused.headers["retry-after"]) >= 1
    # Others go on meanwhile, and it is loaded all the same.
    assert server.ask("a").status_code == 200
    wait_until(lambda: server.registry.find("b").state is ModelState.READY)
    assert server.ask("b").status_code == 200
    server = routed("a", "~b=b?load=0.2", "~c=c?fail=1")
    assert server.ask("b").status_code == 200
    failed = server.ask("c")
    assert (failed.status_code, failed.json()["error"]["code"]) == (503, "model_unavailable")
    assert "secret" not in failed.text
    assert failed.headers["retry-after"]


def test_a_client_that_leaves_while_its_model_loads(routed: Callable[..., Routed]) -> None:
    server = routed("a", "~b=b?load=0.3")
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json={"model": "b", "prompt": "Hi"}, timeout=0.1)
    entry = server.registry.find("b")
    wait_until(lambda: entry.num_waiting == 0 and server.state.num_running == 0)
    wait_until(lambda: entry.state is ModelState.READY)
    assert entry.leases == 0


def test_metrics_count_by_the_name_asked_for_and_the_variant(routed: Callable[..., Routed]) -> None:
    server = routed("m@v1", "m@v2")
    server.registry.set_alias("chat", {"m@v1": 1, "m@v2": 0})
    server.ask("chat")
    server.ask("m@v2")
    lines = server.get("metrics").text.splitlines()
    counted = [line for line in lines if "variant" in line and "_count{" in line]
    for name, variant in (("chat", "m@v1"), ("m@v2", "m@v2")):
        assert any(f'model_name="{name}"' in line and f'variant="{variant}"' in line for line in counted), counted
    # What an engine does is counted once, whatever it was called.
    assert any(line.startswith("vllm:") and 'model_name="m"' in line for line in lines)
    assert not any(line.startswith("vllm:") and 'model_name="chat"' in line for line in lines)


def test_probes_report_the_state(routed: Callable[..., Routed]) -> None:
    server = routed("a=a?load=0.5", "b=b?load=0.5", ready=False)

    def probe(path: str) -> tuple[int, Any]:
        got = server.get(path)
        return got.status_code, got.json() if got.content else None

    wait_until(lambda: server.engines.loading == 1)
    time.sleep(0.01)
    assert probe("readyz") == (
        503,
        {"status": "loading", "progress": 0.125, "models": {"a": "loading", "b": "unloaded"}},
    )
    assert probe("livez") == (200, {"status": "ok"})
    for path in ("health", "ping"):
        assert probe(path)[0] == 503
        assert probe(path)[1]["error"]["code"] == "model_loading"
    assert server.ask("a").status_code == 503
    wait_until(lambda: server.registry.started)
    assert probe("readyz") == (200, {"status": "ready"})
    assert probe("health") == (200, None)
    assert httpx.post(f"{server.url}/ping").status_code == 200
    server.engines.started[1].dead = True
    assert probe("readyz") == (503, {"status": "unavailable", "models": {"b": "the engine process ended"}})
    assert probe("livez") == (503, {"status": "dead", "models": ["b"]})
    assert probe("health")[1]["error"]["code"] == "engine_dead"
    # The other model does not suffer.
    assert server.ask("a").status_code == 200
    assert server.ask("b").status_code == 503
    server.do(server.registry.load("b"))
    assert probe("livez")[0] == probe("readyz")[0] == 200


def test_a_supervised_engine_that_restarts_is_alive_and_not_ready(routed: Callable[..., Routed]) -> None:
    server = routed("a")
    (engine,) = server.engines.started

    class Standing:
        name = "restarting"

    engine.state = Standing  # type: ignore[attr-defined]
    engine.dead = True
    assert server.get("livez").status_code == 200
    assert server.get("readyz").status_code == 503
    Standing.name = "dead"
    assert server.get("livez").status_code == 503


def test_shutdown_refuses_new_requests_and_finishes_running_ones(routed: Callable[..., Routed]) -> None:
    server = routed("a=a?delay=0.02")
    answers: list[httpx.Response] = []
    running = threading.Thread(target=lambda: answers.append(server.ask("a", max_tokens=20)))
    running.start()
    wait_until(lambda: server.state.num_running == 1)
    server.loop.call_soon_threadsafe(server.state.refuse)
    wait_until(lambda: server.state.stopping)
    refused = server.ask("a")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_stopping")
    assert refused.headers["retry-after"] == "1"
    assert refused.headers["connection"] == "close"
    assert server.get("readyz").json() == {"status": "draining", "running": 1}
    assert server.get("livez").status_code == 200
    running.join(10)
    assert answers[0].json()["choices"][0]["text"] == answer(20)
