"""Commands about models that meet: the later one holds, nothing waits for what it need not, nothing is left over."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from octavo.config import EngineConfig
from octavo.errors import ConfigError, InvalidRequest, ModelNotFound, ModelNotServed
from octavo.server.entry import ModelState
from octavo.server.errors import ModelConflict, ModelFailed, ModelUnavailable, ServerStopping
from octavo.server.registry import ModelRegistry
from registry_fakes import Engines, eventually, registry, run


async def ask(models: ModelRegistry, name: str | None, **how: Any) -> str:
    """Which model answers."""
    served, release = await models.acquire(name, **how)
    release()
    return str(served.version)


# -------------------------------------------------------- aliases and swaps


def test_an_alias_set_during_a_swap_stays() -> None:
    async def work() -> None:
        engines = Engines()
        models = registry(engines, "m@v1", "other", "m@v2=m@v2?load=0.1")
        await models.load("m")
        swap = asyncio.ensure_future(models.swap("m", "m@v2"))
        await eventually(lambda: engines.loading == 1)
        began = time.monotonic()
        models.set_alias("m", {"other": 1})
        assert time.monotonic() - began < 0.05
        with pytest.raises(ModelConflict, match="`m` was given to `other` while `m@v2` was loaded, and stays so"):
            await swap
        assert models.aliases == {"m": {"other": 1}}
        assert await ask(models, "m") == "other"
        # Nothing was drained, and the new one is there for who asks for it.
        assert sorted(engines.open) == ["m@v1", "m@v2", "other"]
        assert (await models.swap("m", "m@v2")).entry.id == await ask(models, "m") == "m@v2"

    run(work())


def test_an_alias_removed_during_a_swap_stays_removed() -> None:
    async def work() -> None:
        engines = Engines()
        models = registry(engines, "m@v1", "m@v2=m@v2?load=0.1")
        await models.load("m")
        swap = asyncio.ensure_future(models.swap("m", "m@v2"))
        await eventually(lambda: engines.loading == 1)
        models.remove_alias("m")
        with pytest.raises(ModelConflict, match="`m` was changed while `m@v2` was loaded"):
            await swap
        assert models.aliases == {}
        with pytest.raises(ModelNotServed):
            await ask(models, "m")
        # A request without a name goes to what there is.
        assert await ask(models, None) == "m@v1"

    run(work())


def test_weights_set_while_one_variant_is_swapped_stay() -> None:
    async def work() -> None:
        engines = Engines()
        models = registry(engines, "m@v1", "m@v2", "m@v3=m@v3?load=0.1")
        models.set_alias("chat", {"m@v1": 90, "m@v2": 10})
        for name in ("m@v1", "m@v2"):
            await models.load(name)
        swap = asyncio.ensure_future(models.swap("chat", "m@v3", replace="m@v2"))
        await eventually(lambda: engines.loading == 1)
        models.set_alias("chat", {"m@v1": 60, "m@v2": 40})
        await swap
        assert models.aliases["chat"] == {"m@v1": 60, "m@v3": 40}
        # One whose model was taken away meanwhile has nothing to replace.
        await models.unload("m@v2")
        swap = asyncio.ensure_future(models.swap("chat", "m@v2", replace="m@v3"))
        await asyncio.sleep(0)
        models.set_alias("chat", {"m@v1": 1})
        with pytest.raises(ModelConflict, match="has no model `m@v3`"):
            await swap
        assert models.aliases["chat"] == {"m@v1": 1}

    run(work())


def test_a_weight_goes_over_to_a_model_that_has_one() -> None:
    async def work() -> None:
        models = registry(Engines(), "a", "b", "c")
        models.set_alias("chat", {"a": 90, "b": 10, "c": 50})
        await models.swap("chat", "b", replace="a")
        assert models.aliases["chat"] == {"b": 100, "c": 50}

    run(work())


def test_a_swap_to_what_is_loaded_does_not_wait_for_another_names_load() -> None:
    async def work() -> None:
        engines = Engines()
        models = registry(engines, "x@v1", "y@v1", "y@v2", "x@v2=x@v2?load=0.5")
        for name in ("x@v1", "y@v1", "y@v2"):
            await models.load(name)
        slow = asyncio.ensure_future(models.swap("x", "x@v2"))
        await eventually(lambda: engines.loading == 1)
        began = time.monotonic()
        await models.swap("y", "y@v2")
        # Back again, while what it stood for drains or after.
        await models.swap("y", "y@v1")
        assert time.monotonic() - began < 0.3
        assert not slow.done()
        await slow
        assert models.aliases == {"x": {"x@v2": 1}, "y": {"y@v1": 1}}
        assert models._swap_locks == {}

    run(work())


def test_a_model_that_another_swap_is_about_to_put_up_is_not_drained() -> None:
    async def work() -> None:
        engines = Engines()
        models = registry(engines, "m@v1=m@v1?load=0.1", "m@v2", "x")
        for name in ("m@v2", "x"):
            await models.load(name)
        models.set_aliases({})
        models.set_alias("one", {"m@v1": 1})
        entry, commands = models.find("m@v1"), []
        put_up = entry.put_up

        def put_up_and_swap(*arguments: Any) -> None:
            put_up(*arguments)
            # It runs before the swap that waited for the load does.
            commands.append(asyncio.ensure_future(models.swap("one", "m@v2")))

        entry.put_up = put_up_and_swap  # type: ignore[method-assign]
        await models.swap("x", "m@v1")
        await asyncio.gather(*commands)
        assert models.aliases == {"one": {"m@v2": 1}, "x": {"m@v1": 1}}
        assert await ask(models, "x") == "m@v1"
        assert len([attempt for attempt in engines.attempts if attempt.startswith("m@v1")]) == 1

    run(work())


def test_a_swap_says_what_stays_loaded_and_what_goes() -> None:
    async def work() -> None:
        engines = Engines()
        models = registry(engines, "m@v1", "m@v2")
        models.set_alias("stable", {"m@v1": 1})
        await models.load("m")
        done = await models.swap("m", "m@v2")
        assert (done.entry.id, done.kept, done.unloading) == ("m@v2", {"m@v1": ["stable"]}, ())
        done = await models.swap("stable", "m@v2", wait=True)
        assert (done.kept, done.unloading) == ({}, ("m@v1",))
        assert engines.open == ["m@v2"]

    run(work())


# -------------------------------------------------------- ids


def test_a_version_that_has_answered_stays_what_it_is() -> None:
    async def work() -> None:
        engines = Engines()
        models = registry(engines, "m@v1", "plain")
        await models.load("m")
        await models.swap("m", "m@v2", EngineConfig(model="two"), wait=True)
        with pytest.raises(ConfigError, match=r"to: `m@v1` is another model already; .* such as `m@2`"):
            await models.swap("m", "m@v1", EngineConfig(model="three"))
        with pytest.raises(ConfigError, match=r"`m@v1` has answered from another model; .* or remove that one first"):
            await models.load("m@v1", EngineConfig(model="three"))
        assert await ask(models, "m") == "m@v2"
        # Other settings of the same model are nothing new, and a name without version may be given to another.
        await models.load("m@v1", EngineConfig(model="m@v1", max_num_seqs=3))
        await models.load("plain")
        await models.unload("plain")
        await models.load("plain", EngineConfig(model="three"))
        # What was removed on purpose may come back as something else.
        models.remove_alias("m")
        await models.unload("m@v1", remove=True)
        await models.load("m@v1", EngineConfig(model="three"))

    run(work())


def test_numbers_of_versions_are_given_once() -> None:
    async def work() -> None:
        models = registry(Engines(), "m")
        await models.load("m")
        assert (await models.swap("m", config=EngineConfig(model="two"), wait=True)).entry.id == "m@2"
        await models.swap("m", "m", wait=True)
        await models.unload("m@2", remove=True)
        assert (await models.swap("m", config=EngineConfig(model="three"), wait=True)).entry.id == "m@3"
        # One that never answered has used up nothing.
        with pytest.raises(ModelNotFound):
            await models.swap("m", config=EngineConfig(model="x?fail=1"))
        assert (await models.swap("m", config=EngineConfig(model="four"), wait=True)).entry.id == "m@4"

    run(work())


def test_what_a_command_is_about_to_load_is_not_made_another_model() -> None:
    async def work() -> None:
        engines = Engines()
        models = registry(engines, "x@v1", "x@v2=x@v2?load=0.1", "m@v1", "m@v2")
        for name in ("x", "m"):
            await models.load(name)
        # The second of these waits for the first, for a known model and for a new one.
        swaps = [asyncio.ensure_future(models.swap("x", "x@v2"))]
        swaps.append(asyncio.ensure_future(models.swap("m", "m@v2")))
        await asyncio.sleep(0)
        for id in ("x@v2", "m@v2"):
            with pytest.raises(ConfigError, match=f"`{id}` is about to be loaded with other settings"):
                await models.load(id, EngineConfig(model="another"))
        await asyncio.gather(*swaps)
        first = models.load("new", EngineConfig(model="one"), tentative=True)
        second = models.load("new", EngineConfig(model="two"), tentative=True)
        done = await asyncio.gather(first, second, return_exceptions=True)
        assert isinstance(done[1], ConfigError)
        assert models.find("new").config == EngineConfig(model="one")
        assert sorted(engines.open) == ["m@v2", "one", "x@v2"]

    run(work())


def test_a_model_is_not_given_the_name_of_an_alias() -> None:
    async def work() -> None:
        models = registry(Engines(), "m@v1")
        for name in ("m", "chat"):
            models.set_alias(name, {"m@v1": 1})
            with pytest.raises(ConfigError, match=f"`{name}` is an alias of `m@v1`, .* such as `{name}@2`"):
                await models.load(name, EngineConfig(model="x"))
        assert models.names == ["m@v1", "m", "chat"]

    run(work())


# -------------------------------------------------------- loads that fail


def test_a_model_whose_first_load_fails_was_never_there() -> None:
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


def test_a_failed_model_that_got_a_name_meanwhile_stays_to_be_seen() -> None:
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


def test_the_caller_leaves_and_a_load_that_fails_leaves_nothing() -> None:
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


def test_requests_have_a_failed_model_tried_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        engines = Engines()
        models = registry(engines, "a=a?fail=1")
        entry = models.entries[0]
        now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: now)
        pauses = []
        for _ in range(8):
            with pytest.raises(ModelFailed) as failed:
                await ask(models, "a")
            pauses.append(failed.value.retry_after)
            attempts = len(engines.attempts)
            now += pauses[-1] - 1
            with pytest.raises(ModelFailed, match="a request that comes in 1 s or later has it tried again"):
                await ask(models, "a")
            assert len(engines.attempts) == attempts
            now += 1
        assert pauses == [30, 60, 120, 240, 480, 960, 960, 960]
        entry.config = EngineConfig(model="a")
        await models.load("a")
        assert await ask(models, "a") == "a"

    run(work())


# -------------------------------------------------------- unloading


def test_unload_shortens_a_drain_under_way() -> None:
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


def test_a_swap_whose_model_is_unloaded_in_the_moment_it_is_ready_loads_it_again() -> None:
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


def test_nothing_is_loaded_once_the_end_has_begun() -> None:
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


def test_what_is_removed_is_told_when_nothing_of_it_runs() -> None:
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
