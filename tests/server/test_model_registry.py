"""The model registry without sockets: loads, names, eviction."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from octavo.config import EngineConfig
from octavo.errors import (
    ConfigError,
    EngineDead,
    InvalidRequest,
    ModelNotFound,
    ModelNotServed,
    NotEnoughMemory,
    OctavoError,
)
from octavo.server.error_responses import EngineLoading, ModelUnavailable, ServerStopping
from octavo.server.models.registry_entry import ModelState
from registry_fakes import Engines, ask, eventually, registry, run
from server_fakes import FakeEngine


def test_names() -> None:
    async def work() -> None:
        models = registry(Engines(), "m@v1", "m@v2", "other")
        models.set_alias("gpt", {"other": 1})
        assert models.names == ["m@v1", "m@v2", "other", "m", "gpt"]
        assert models.aliases == {"m": {"m@v1": 1}, "gpt": {"other": 1}}
        assert [await ask(models, name) for name in ("m", "m@v2", "gpt", None)] == ["m@v1", "m@v2", "other", "m@v1"]
        served, release = await models.acquire("gpt")
        assert (served.name, served.version, served.model_label) == ("gpt", "other", "other")
        release()
        served, release = await models.acquire("m")
        assert (served.name, served.version, served.model_label) == ("m", "m@v1", "m")
        release()
        with pytest.raises(ModelNotServed, match=r"`othr` does not exist \(did you mean `other`\?\); this server has"):
            await models.acquire("othr")
        with pytest.raises(ModelNotServed, match="does not exist; this server has"):
            await models.acquire("zzzzzz")

    run(work())


def test_a_path_with_an_at_sign_has_no_version() -> None:
    models = registry(Engines(), "/data/m@v2/model")
    assert models.names == ["/data/m@v2/model"]
    assert models.entries[0].version is None


def test_many_requests_for_one_model_load_it_once() -> None:
    async def work() -> None:
        engines = Engines()
        models = registry(engines, "a=a?load=0.05", "b")
        answers = await asyncio.gather(
            *(ask(models, "a") for _ in range(50)), models.load("a"), models.load("a"), ask(models, "b")
        )
        assert answers[:50] == ["a"] * 50
        assert sorted(engines.attempts) == ["a?load=0.05", "b"]
        # One after the other: each measures the memory that is free.
        assert engines.most_loading == 1

    run(work())


def test_progress_while_loading() -> None:
    async def work() -> None:
        models = registry(Engines(), "a=a?load=0.1", "b=b?load=0.1")
        entry = models.entries[0]
        models.started = False
        models._at_start = ["a", "b"]
        loading = asyncio.ensure_future(models.start())
        await eventually(lambda: entry.progress.stage == "weights")
        assert models.describe(entry)["state"] == "loading"
        assert models.describe(entry)["progress"] == {"stage": "weights", "done": 1, "total": 4, "share": 0.25}
        assert models.progress() == 0.125
        await eventually(lambda: models.entries[1].progress.stage == "weights")
        assert models.progress() == 0.625
        await loading
        assert models.progress() == 1.0
        assert [entry["state"] for entry in models.snapshot()] == ["ready", "ready"]

    run(work())


@pytest.mark.parametrize(("ids", "lines"), [(["a", "b"], ["the model b could not be loaded"]), (["b"], [])])
def test_a_failed_start_names_the_model(caplog: pytest.LogCaptureFixture, ids: list[str], lines: list[str]) -> None:
    async def work() -> None:
        models = registry(Engines(), "a", "b=b?fail=1")
        models.started = False
        models._at_start = ids
        with pytest.raises(OctavoError):
            await models.start()
        assert not models.started

    run(work())
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == lines


def test_a_cancelled_waiter_neither_ends_the_load_nor_keeps_a_lease() -> None:
    async def work() -> None:
        models = registry(Engines(), "a=a?load=0.05")
        entry = models.entries[0]
        leaves = asyncio.ensure_future(models.acquire("a"))
        stays = asyncio.ensure_future(models.acquire("a"))
        await asyncio.sleep(0.01)
        assert entry.num_waiting == 2
        leaves.cancel()
        _, release = await stays
        assert entry.leases == 1
        release()
        assert (entry.leases, entry.num_waiting, entry.state) == (0, 0, ModelState.READY)
        # Also one that leaves in the very moment in which the model is ready.
        await models.unload("a")
        leaves = asyncio.ensure_future(models.acquire("a"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        put_up = entry.put_up

        def put_up_and_leave(*arguments: Any) -> None:
            put_up(*arguments)
            leaves.cancel()

        entry.put_up = put_up_and_leave  # type: ignore[method-assign]
        with pytest.raises(asyncio.CancelledError):
            await leaves
        assert (entry.leases, entry.state) == (0, ModelState.READY)

    run(work())


def test_waiting_is_bounded_in_time_and_number() -> None:
    async def work() -> None:
        models = registry(Engines(), "a=a?load=0.3", model_load_wait=0.05, max_load_waiters=2)
        began = time.monotonic()
        outcomes = await asyncio.gather(*(ask(models, "a") for _ in range(4)), return_exceptions=True)
        assert all(isinstance(outcome, EngineLoading) for outcome in outcomes)
        assert 0.04 < time.monotonic() - began < 0.25
        assert models.entries[0].num_waiting == 0
        await models.load("a")
        assert await ask(models, "a") == "a"
        # Refused at once where the setting says so, and loaded all the same.
        models = registry(Engines(), "a=a?load=0.02", model_load_wait=0)
        with pytest.raises(EngineLoading):
            await models.acquire("a")
        await eventually(models.entries[0].healthy)

    run(work())


def test_without_autoload_a_request_loads_nothing() -> None:
    async def work() -> None:
        engines = Engines()
        models = registry(engines, "a", autoload=False)
        with pytest.raises(ModelUnavailable, match="`a` is unloaded"):
            await models.acquire("a")
        assert engines.attempts == []
        await models.load("a")
        assert await ask(models, "a") == "a"

    run(work())


def test_a_failed_load_hides_its_reason_and_is_not_retried_by_each_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        engines = Engines()
        models = registry(engines, "a=a?fail=1")
        with pytest.raises(ModelUnavailable, match="could not be loaded; see the server's log") as refused:
            await models.acquire("a")
        assert "secret" not in str(refused.value)
        assert "the model a could not be loaded: model: there is no 'a' in /secret" in caplog.text
        with pytest.raises(ModelUnavailable):
            await models.acquire("a")
        assert len(engines.attempts) == 1
        (shown,) = models.snapshot()
        assert (shown["state"], shown["reason"]) == ("failed", "model: there is no 'a' in /secret")
        # Whoever runs the server may try at any time, and is told all.
        with pytest.raises(ModelNotFound, match="/secret"):
            await models.load("a")
        await models.load("a", EngineConfig(model="a"))
        assert await ask(models, "a") == "a"

    run(work())


def test_a_model_that_cannot_generate_is_not_served() -> None:
    async def work() -> None:
        engines = Engines()
        models = registry(engines, "a=a?broken=1")
        with pytest.raises(EngineDead):
            await models.load("a")
        assert models.entries[0].state is ModelState.FAILED
        assert engines.open == []

    run(work())


def test_a_model_is_warm_before_it_serves() -> None:
    async def work() -> None:
        engines = Engines()
        models = registry(engines, "a")
        await models.load("a")
        (engine,) = engines.started
        assert len(engine.prompts) == 1
        assert engine.generated > 0
        assert engine.running == engine.aborted == 0

    run(work())


def test_requests_follow_the_weights_and_users_keep_their_model() -> None:
    async def work() -> None:
        models = registry(Engines(), "m@v1", "m@v2", "m@v3")
        models.set_alias("chat", {"m@v1": 70, "m@v2": 30})
        for entry in models.entries:
            await models.load(entry.id)
        number = 4000

        async def share(key: Any) -> float:
            got = [await ask(models, "chat", key=key(place)) for place in range(number)]
            assert set(got) == {"m@v1", "m@v2"}
            return got.count("m@v2") / number

        # Four standard deviations: 4 * sqrt(0.3 * 0.7 / 4000).
        assert abs(await share(lambda place: lambda: f"user-{place}") - 0.3) < 0.029
        assert abs(await share(lambda place: None) - 0.3) < 0.029
        before = {user: await ask(models, "chat", key=lambda user=user: user) for user in map(str, range(500))}
        again = {user: await ask(models, "chat", key=lambda user=user: user) for user in before}
        assert again == before
        # New weights move only as many users as they must, and only towards what gained.
        models.set_alias("chat", {"m@v1": 60, "m@v2": 30, "m@v3": 10})
        after = {user: await ask(models, "chat", key=lambda user=user: user) for user in before}
        moved = [user for user in before if after[user] != before[user]]
        assert {after[user] for user in moved} <= {"m@v2", "m@v3"}
        assert 0.05 < len(moved) / len(before) < 0.25

    run(work())


def test_a_variant_can_be_asked_for() -> None:
    async def work() -> None:
        models = registry(Engines(), "m@v1", "m@v2", "other")
        models.set_alias("chat", {"m@v1": 1, "m@v2": 0})
        assert {await ask(models, "chat") for _ in range(200)} == {"m@v1"}
        assert await ask(models, "chat", variant="m@v2") == "m@v2"
        assert await ask(models, "m@v2", variant="m@v2") == "m@v2"
        with pytest.raises(InvalidRequest, match="X-Variant: `chat` has no variant `other`; it has `m@v1`, `m@v2`"):
            await models.acquire("chat", variant="other")
        with pytest.raises(InvalidRequest, match="X-Variant"):
            await models.acquire("other", variant="m@v1")

    run(work())


def test_another_variant_replaces_one_that_cannot_answer() -> None:
    async def work() -> None:
        engines = Engines()
        models = registry(engines, "m@v1", "m@v2=m@v2?fail=1")
        models.set_alias("chat", {"m@v1": 1, "m@v2": 99})
        await models.load("m@v1")
        assert {await ask(models, "chat") for _ in range(50)} == {"m@v1"}
        engines.started[0].dead = True
        with pytest.raises((ModelUnavailable, EngineDead)):
            await models.acquire("chat")

    run(work())


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({}, "aliases.chat: 0 models"),
        ({"a": 0}, "all weights are 0"),
        ({"a": -1}, "has the weight -1"),
        ({"a": float("inf")}, "has the weight inf"),
        ({"a": True}, "has the weight True"),
        ({"aa": 1}, r"the model `aa` does not exist \(did you mean `a`\?\)"),
    ],
)
def test_bad_aliases_change_nothing(weights: dict[str, float], message: str) -> None:
    models = registry(Engines(), "a")
    with pytest.raises(ConfigError, match=message):
        models.set_alias("chat", weights)
    assert models.aliases == {}


def test_swap_and_back() -> None:
    async def work() -> None:
        engines = Engines()
        models = registry(engines, "m@v1")
        await models.load("m")
        _, release = await models.acquire("m")
        old = models.entries[0]
        await models.swap("m", "m@v2", EngineConfig(model="m@v2"))
        assert await ask(models, "m") == "m@v2"
        # The old one answers what it has begun; then its engine is closed.
        assert (old.state, engines.started[0].closed) == (ModelState.DRAINING, False)
        # Swapping back before that is over takes no load.
        await models.swap("m", "m@v1")
        assert await ask(models, "m") == "m@v1"
        assert len(engines.attempts) == 2
        await eventually(lambda: engines.started[1].closed)
        release()
        await asyncio.sleep(0.02)
        assert (old.state, engines.started[0].closed) == (ModelState.READY, False)
        # And after it, one.
        await models.swap("m", "m@v2", wait=True)
        assert engines.started[0].closed
        assert models.entries[0].state is ModelState.UNLOADED
        await models.swap("m", "m@v1", wait=True)
        assert len(engines.attempts) == 4
        assert engines.open == ["m@v1"]

    run(work())


def test_a_draining_model_is_loaded_again_for_a_request_by_id() -> None:
    async def work() -> None:
        engines = Engines()
        models = registry(engines, "m@v1", max_loaded_models=1)
        await models.load("m")
        _, release = await models.acquire("m")
        await models.swap("m", "m@v2", EngineConfig(model="m@v2"))
        asked = asyncio.ensure_future(ask(models, "m@v1"))
        await asyncio.sleep(0.02)
        # Both want it back: neither may find it half closed.
        back = asyncio.ensure_future(models.swap("m", "m@v1"))
        await asyncio.sleep(0.02)
        assert not asked.done()
        assert not back.done()
        release()
        assert await asked == "m@v1"
        await back
        assert await ask(models, "m") == "m@v1"
        await eventually(lambda: engines.open == ["m@v1"])
        assert [engine.closed for engine in engines.started] == [True, True, False]

    run(work())


def test_swap_of_a_model_without_version() -> None:
    async def work() -> None:
        engines = Engines()
        models = registry(engines, "demo")
        await models.load("demo")
        entry = (await models.swap("demo", config=EngineConfig(model="new"), wait=True)).entry
        assert entry.id == "demo@2"
        assert await ask(models, "demo") == "demo@2"
        assert engines.open == ["new"]
        await models.swap("demo", "demo", wait=True)
        assert models.aliases == {}
        assert await ask(models, "demo") == "demo"

    run(work())


def test_a_swap_that_fails_leaves_the_old_one_serving() -> None:
    async def work() -> None:
        engines = Engines()
        models = registry(engines, "m@v1")
        await models.load("m")
        for text in ("m@v2?fail=1", "m@v2?broken=1"):
            with pytest.raises((ModelNotFound, EngineDead)):
                await models.swap("m", "m@v2", EngineConfig(model=text))
            assert await ask(models, "m") == "m@v1"
            assert models.aliases == {"m": {"m@v1": 1}}
            assert engines.open == ["m@v1"]
        with pytest.raises(ModelNotServed):
            await models.swap("m", "m@v9")
        with pytest.raises(ModelNotServed):
            await models.swap("nothing", "m@v1")
        await models.swap("m", "m@v2", EngineConfig(model="m@v2"), wait=True)
        assert engines.open == ["m@v2"]

    run(work())


def test_swap_of_one_variant_keeps_the_others_and_their_weights() -> None:
    async def work() -> None:
        engines = Engines()
        models = registry(engines, "m@v1", "m@v2", "m@v3")
        models.set_aliases({})
        models.set_alias("chat", {"m@v1": 90, "m@v2": 10})
        await models.load("m@v1")
        await models.load("m@v2")
        with pytest.raises(InvalidRequest, match="replace: `chat` has no model `m@v3`"):
            await models.swap("chat", "m@v3", replace="m@v3")
        await models.swap("chat", "m@v3", replace="m@v2", wait=True)
        assert models.aliases == {"chat": {"m@v1": 90, "m@v3": 10}}
        assert engines.open == ["m@v1", "m@v3"]
        # What another name needs stays loaded.
        models.set_alias("stable", {"m@v1": 1})
        await models.swap("chat", "m@v2", wait=True)
        assert models.aliases["chat"] == {"m@v2": 1}
        assert sorted(engines.open) == ["m@v1", "m@v2"]

    run(work())


def test_idle_models_are_unloaded_and_come_back() -> None:
    async def work() -> None:
        engines = Engines()
        models = registry(engines, "a", "b", "c", idle_unload=0.15)
        models.set_keep_alive("b", -1)
        for name in "abc":
            await models.load(name)
        _, release = await models.acquire("c")
        assert 0 < models.describe(models.entries[0])["unload_in"] <= 0.15
        await eventually(lambda: "a" not in engines.open)
        await asyncio.sleep(0.3)
        # One is kept by its own setting, one by a request that runs.
        assert engines.open == ["b", "c"]
        release()
        await eventually(lambda: engines.open == ["b"])
        assert await ask(models, "a") == "a"
        assert engines.open == ["b", "a"]
        models.set_keep_alive("b", 0)
        await eventually(lambda: "b" not in engines.open)
        await models.close()
        assert engines.open == []

    run(work())


def test_the_least_recently_used_makes_room() -> None:
    async def work() -> None:
        engines = Engines()
        models = registry(engines, "a", "b", "c", max_loaded_models=2)
        for name in ("a", "b", "a", "c"):
            assert await ask(models, name) == name
            await asyncio.sleep(0.002)
        assert engines.open == ["a", "c"]
        # Rather an idle one than one that answers, though that was used longer ago.
        _, release = await models.acquire("a")
        assert await ask(models, "c") == "c"
        assert await ask(models, "b") == "b"
        assert engines.open == ["a", "b"]
        # All in use: the next waits for one to be over.
        _, release_b = await models.acquire("b")
        waiting = asyncio.ensure_future(ask(models, "c"))
        await asyncio.sleep(0.03)
        assert not waiting.done()
        release()
        release_b()
        assert await waiting == "c"

    run(work())


def test_models_that_evict_each_other_starve_no_request() -> None:
    async def work() -> None:
        engines = Engines()
        models = registry(engines, "a", "b", "c", max_loaded_models=1, model_load_wait=20)
        names = ["abc"[place % 3] for place in range(90)]
        assert await asyncio.gather(*(ask(models, name) for name in names)) == names
        assert len(engines.open) == 1

    run(work())


def test_memory_is_a_budget() -> None:
    async def work() -> None:
        engines = Engines()
        models = registry(engines, "a=a?bytes=60", "b=b?bytes=60", "c=c?bytes=30", "d=d?bytes=101", model_memory=100)
        for name in ("a", "c", "b"):
            assert await ask(models, name) == name
            await asyncio.sleep(0.002)
        assert engines.open == ["c", "b"]
        with pytest.raises(NotEnoughMemory, match=r"model_memory: `d` takes 101 bytes .* of 100"):
            await models.load("d")
        # A swap needs both at once, and does not unload what still serves.
        models = registry(engines := Engines(), "m@v1=a?bytes=60", "m@v2=b?bytes=60", "x=x?bytes=30", model_memory=100)
        await models.load("m@v1")
        await models.load("x")
        with pytest.raises(NotEnoughMemory):
            await models.swap("m", "m@v2")
        assert await ask(models, "m") == "m@v1"
        assert "a" in engines.open

    run(work())


def test_a_pinned_model_never_makes_room() -> None:
    async def work() -> None:
        models = registry(Engines(), "a", "b", max_loaded_models=1)
        models.entries[0].pinned = True
        await models.load("a")
        with pytest.raises(NotEnoughMemory, match="max_loaded_models: 1 are loaded, and none can be unloaded for `b`"):
            await models.load("b")
        # A swap may have one more for a while.
        await models.swap("a", "b", wait=True)

    run(work())


def test_unload_waits_for_requests_with_a_limit() -> None:
    async def work() -> None:
        engines = Engines()
        models = registry(engines, "a")
        _, release = await models.acquire("a")
        unloading = asyncio.ensure_future(models.unload("a"))
        await asyncio.sleep(0.02)
        assert not unloading.done()
        # A request that comes meanwhile waits for the model to be loaded again.
        late = asyncio.ensure_future(ask(models, "a"))
        await asyncio.sleep(0.02)
        assert not late.done()
        release()
        await unloading
        assert await late == "a"
        assert len(engines.attempts) == 2
        _, release = await models.acquire("a")
        await models.unload("a", timeout=0.05)
        assert engines.open == []
        release()

    run(work())


def test_unload_ends_a_load() -> None:
    async def work() -> None:
        engines = Engines()
        models = registry(engines, "a=a?load=20")
        waiting = asyncio.ensure_future(models.acquire("a"))
        await eventually(lambda: engines.loading == 1)
        await models.unload("a")
        with pytest.raises(ModelUnavailable):
            await waiting
        assert (engines.loading, models.entries[0].state) == (0, ModelState.UNLOADED)
        # Also one that has not taken its first step; whoever asked for it is told, and several may ask for its end.
        waiting = asyncio.ensure_future(models.acquire("a"))
        loading = asyncio.ensure_future(models.load("a"))
        await asyncio.sleep(0)
        await asyncio.gather(models.unload("a"), models.unload("a"))
        outcomes = await asyncio.gather(waiting, loading, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [ModelUnavailable] * 2
        assert (models.entries[0].state, models.entries[0].loading) == (ModelState.UNLOADED, None)
        assert engines.open == []

    run(work())


def test_unload_ends_a_load_that_waits_for_a_drain() -> None:
    async def work() -> None:
        engines = Engines()
        models = registry(engines, "a")
        _, release = await models.acquire("a")
        first = asyncio.ensure_future(models.unload("a"))
        await asyncio.sleep(0.01)
        waiting = asyncio.ensure_future(models.acquire("a"))
        await asyncio.sleep(0.01)
        second = asyncio.ensure_future(models.unload("a"))
        with pytest.raises(ModelUnavailable):
            await waiting
        assert engines.open == ["a"]
        release()
        await asyncio.gather(first, second)
        assert (engines.open, models.entries[0].state) == ([], ModelState.UNLOADED)

    run(work())


def test_removing() -> None:
    async def work() -> None:
        models = registry(Engines(), "a", "b")
        models.set_alias("x", {"a": 1})
        await models.load("a")
        with pytest.raises(InvalidRequest, match="`x` lead to `a`"):
            await models.unload("a", remove=True)
        models.remove_alias("x")
        await models.unload("a", remove=True)
        assert models.names == ["b"]
        assert await ask(models, None) == "b"

    run(work())


def test_a_removed_model_is_unknown_at_once_and_leaves_no_engine() -> None:
    async def work() -> None:
        engines = Engines()
        models = registry(engines, "a", "b")
        _, release = await models.acquire("a")
        first = asyncio.ensure_future(models.unload("a"))
        await asyncio.sleep(0)
        # Comes while the model drains, and would have it loaded again.
        waits = asyncio.ensure_future(models.acquire("a"))
        await asyncio.sleep(0)
        removal = asyncio.ensure_future(models.unload("a", remove=True))
        await asyncio.sleep(0)
        with pytest.raises(ModelNotServed, match="`a` does not exist"):
            await models.acquire("a")
        with pytest.raises(ConfigError, match="the model `a` does not exist"):
            models.set_alias("x", {"a": 1})
        assert [entry.id for entry in models.loaded] == ["a"]
        release()
        await asyncio.gather(first, removal)
        with pytest.raises(ModelUnavailable):
            await waits
        assert (engines.open, models.loaded, models.names) == ([], [], ["b"])

    run(work())


def test_a_swap_to_a_model_removed_meanwhile_changes_nothing() -> None:
    async def work() -> None:
        engines = Engines()
        models = registry(engines, "a", "b=b?load=0.05")
        await models.load("a")
        swap = asyncio.ensure_future(models.swap("a", "b"))
        await eventually(lambda: engines.loading == 1)
        await models.unload("b", remove=True)
        with pytest.raises((InvalidRequest, ModelUnavailable)):
            await swap
        assert (await ask(models, "a"), models.aliases, engines.open) == ("a", {}, ["a"])

    run(work())


def test_registering_again() -> None:
    async def work() -> None:
        models = registry(Engines(), "a", "b")
        models.register("a", EngineConfig(model="other"))
        await models.load("a")
        models.register("a", EngineConfig(model="other"))
        with pytest.raises(ConfigError, match=r"`a` is ready with other settings; unload it, .* for example `a@2`"):
            models.register("a", EngineConfig(model="a"))
        with pytest.raises(ConfigError, match="is not a model name"):
            models.register("a\nb", EngineConfig(model="a"))
        for number in range(254):
            models.register(f"m{number}", EngineConfig(model="m"))
        with pytest.raises(ConfigError, match="the limit of 256 models is reached"):
            models.register("one more", EngineConfig(model="m"))

    run(work())


def test_a_dead_engine_is_replaced_by_a_load() -> None:
    async def work() -> None:
        engines = Engines()
        models = registry(engines, "a")
        await models.load("a")
        engines.started[0].dead = True
        with pytest.raises(EngineDead):
            await models.acquire("a")
        await models.load("a")
        assert await ask(models, "a") == "a"
        assert [engine.closed for engine in engines.started] == [True, False]

    run(work())


def test_a_load_has_a_time_limit() -> None:
    async def work() -> None:
        models = registry(Engines(), "a=a?load=20", model_load_timeout=0.05)
        with pytest.raises(ModelUnavailable, match="took more than"):
            await models.load("a")
        assert models.entries[0].state is ModelState.FAILED

    run(work())


def test_closing_ends_everything() -> None:
    async def work() -> None:
        engines = Engines()
        models = registry(engines, "a", "b=b?load=20")
        models.adopt(FakeEngine(), ("given",))
        await models.load("a")
        _, _ = await models.acquire("a")
        waiting = asyncio.ensure_future(models.acquire("b"))
        await eventually(lambda: engines.loading == 1)
        await models.close()
        with pytest.raises(ServerStopping):
            await waiting
        assert engines.open == []
        with pytest.raises(ServerStopping):
            await models.acquire("a")

    run(work())
