"""Races of loads, unloads and the shutdown."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
from octavo.config import EngineConfig
from octavo.errors import InvalidRequest, ModelNotFound, ModelNotServed
from octavo.server.error_responses import ModelFailed, ModelUnavailable, ServerStopping
from octavo.server.models.registry_entry import ModelState
from registry_fakes import Engines, ask, eventually, registry, run

# -------------------------------------------------------- loads that fail


def test_a_failed_first_load_undoes_the_registration() -> None:
    async def work() -> None:
        engines = Engines()
        models = registry(engines, "a")
        for id in ("new", "new@v1"):
            with pytest.raises(ModelNotFound):
                await models.load(id, EngineConfig(model="x?fail=1"), tentative=True)
        assert (models.names, models.aliases) == (["a"], {})
        with pytest.raises(ModelNotServed):
            await ask(models, "new")
        assert len(engines.attempts) == 2
        # What was known is again as it was; what it is now was never loaded.
        with pytest.raises(ModelNotFound):
            await models.load("a", EngineConfig(model="x?fail=1"), tentative=True, pinned=True)
        assert (models.find("a").state, models.find("a").pinned) == (ModelState.UNLOADED, False)
        assert await ask(models, "a") == "a"

    run(work())


def test_a_failed_model_with_an_alias_stays_registered() -> None:
    async def work() -> None:
        engines = Engines()
        models = registry(engines, "a")
        load = asyncio.ensure_future(
            models.load("new", EngineConfig(model="x?load=0.05&fail=1"), tentative=True, on_request=False)
        )
        await eventually(lambda: engines.loading == 1)
        models.set_alias("chat", {"new": 1})
        with pytest.raises(ModelNotFound):
            await load
        assert models.find("chat").state is ModelState.FAILED
        for _ in range(3):
            with pytest.raises(ModelFailed) as refused:
                await ask(models, "chat")
        assert refused.value.retry_after is None
        assert len(engines.attempts) == 1

    run(work())


def test_a_failed_load_without_its_caller_leaves_nothing() -> None:
    async def work() -> None:
        engines = Engines()
        models = registry(engines, "a")
        load = asyncio.ensure_future(models.load("new", EngineConfig(model="x?load=0.05&fail=1"), tentative=True))
        await eventually(lambda: engines.loading == 1)
        load.cancel()
        await eventually(lambda: "new" not in models.names)
        # And one that succeeds stays.
        load = asyncio.ensure_future(models.load("new", EngineConfig(model="x?load=0.05"), tentative=True))
        await eventually(lambda: engines.loading == 1)
        load.cancel()
        await eventually(lambda: models.find("new").state is ModelState.READY)

    run(work())


def test_requests_retry_a_failed_model_with_growing_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        engines = Engines()
        models = registry(engines, "a=a?fail=1")
        entry = models.entries[0]
        now = 1000.0
        # The entry's clock alone: the event loop keeps its own, or the test's deadline would pass with it.
        clock = SimpleNamespace(monotonic=lambda: now, time=time.time)
        monkeypatch.setattr("octavo.server.models.registry_entry.time", clock)
        pauses = []
        for _ in range(8):
            with pytest.raises(ModelFailed) as failed:
                await ask(models, "a")
            pauses.append(failed.value.retry_after)
            attempts = len(engines.attempts)
            now += pauses[-1] - 1
            with pytest.raises(ModelFailed, match="a request in 1 s or later loads it again"):
                await ask(models, "a")
            assert len(engines.attempts) == attempts
            now += 1
        assert pauses == [30, 60, 120, 240, 480, 960, 960, 960]
        entry.config = EngineConfig(model="a")
        await models.load("a")
        assert await ask(models, "a") == "a"

    run(work())


# -------------------------------------------------------- unloading


def test_unload_shortens_a_running_drain() -> None:
    async def work() -> None:
        engines = Engines()
        models = registry(engines, "m@v1", "m@v2")
        _, release = await models.acquire("m")
        await models.swap("m", "m@v2")
        assert models.find("m@v1").state is ModelState.DRAINING
        began = time.monotonic()
        await models.unload("m@v1", timeout=0.05)
        assert time.monotonic() - began < 2
        assert engines.open == ["m@v2"]
        release()
        # It may also give more; without a time the drain goes on as it was.
        _, release = await models.acquire("m")
        first = asyncio.ensure_future(models.unload("m@v2", timeout=0.1))
        await asyncio.sleep(0.01)
        others = [asyncio.ensure_future(models.unload("m@v2", timeout=timeout)) for timeout in (20, None)]
        await asyncio.sleep(0.2)
        assert not first.done()
        release()
        await asyncio.gather(first, *others)
        assert engines.open == []

    run(work())


def test_closing_waits_for_no_drain() -> None:
    async def work() -> None:
        engines = Engines()
        models = registry(engines, "m@v1", "m@v2")
        await models.acquire("m")
        await models.swap("m", "m@v2")
        began = time.monotonic()
        await models.close()
        assert time.monotonic() - began < 2
        assert engines.open == []

    run(work())


def test_a_model_removed_while_its_dead_engine_is_closed_is_not_loaded_again() -> None:
    async def work() -> None:
        engines = Engines()
        models = registry(engines, "a", "b")
        await models.load("a")
        engines.started[0].dead = True
        close = engines.started[0].close

        async def slowly() -> None:
            await asyncio.sleep(0.05)
            await close()

        engines.started[0].close = slowly  # type: ignore[method-assign]
        load = asyncio.ensure_future(models.load("a"))
        await asyncio.sleep(0.01)
        await models.unload("a", remove=True)
        with pytest.raises((ModelNotServed, ModelUnavailable)):
            await load
        assert (len(engines.attempts), models.loaded, engines.open) == (1, [], [])

    run(work())


def test_a_swap_reloads_a_model_that_was_unloaded_when_ready() -> None:
    async def work() -> None:
        engines = Engines()
        models = registry(engines, "m@v1", "m@v2=m@v2?load=0.02", autoload=False)
        await models.load("m@v1")
        entry = models.find("m@v2")
        put_up = entry.put_up

        def put_up_and_drain(*arguments: Any) -> None:
            put_up(*arguments)
            entry.put_up = put_up  # type: ignore[method-assign]
            models._begin_drain(entry, 0.0)

        entry.put_up = put_up_and_drain  # type: ignore[method-assign]
        await models.swap("m", "m@v2")
        assert await ask(models, "m") == "m@v2"

    run(work())


# -------------------------------------------------------- the end


def test_no_model_is_loaded_during_shutdown() -> None:
    async def work() -> None:
        engines = Engines()
        models = registry(engines, "a", "b=b?load=20", "c")
        await models.load("a")
        commands = [
            asyncio.ensure_future(models.load("b")),
            asyncio.ensure_future(models.swap("a", "new", EngineConfig(model="new?load=20"))),
        ]
        await eventually(lambda: engines.loading == 1)
        waiting = asyncio.ensure_future(models.acquire("b"))
        await asyncio.sleep(0)
        models.stop()
        for refused in await asyncio.gather(*commands, waiting, return_exceptions=True):
            assert isinstance(refused, ServerStopping), refused
        for late in (
            models.load("c"),
            models.swap("a", "c"),
            models.acquire("c"),
            models.load("x", EngineConfig(model="x"), tentative=True),
        ):
            with pytest.raises(ServerStopping):
                await late
        assert (engines.loading, models.names) == (0, ["a", "b", "c"])
        # What is loaded serves on.
        assert await ask(models, "a") == "a"
        await models.close()
        assert engines.open == []

    run(work())


def test_removal_is_reported_when_nothing_runs_any_more() -> None:
    async def work() -> None:
        gone: list[str] = []
        models = registry(Engines(), "a", "b=b?load=20")
        models.on_removal = lambda entry: gone.append(entry.id)
        _, release = await models.acquire("a")
        removal = asyncio.ensure_future(models.unload("a", remove=True))
        await asyncio.sleep(0.02)
        assert gone == []
        release()
        await removal
        assert gone == ["a"]
        load = asyncio.ensure_future(models.load("b"))
        await asyncio.sleep(0.02)
        await models.unload("b", remove=True)
        with pytest.raises((InvalidRequest, ModelUnavailable)):
            await load
        assert gone == ["a", "b"]
        assert models._removed == []

    run(work())
