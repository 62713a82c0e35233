"""Swaps that race with other commands."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
from octavo.config import EngineConfig
from octavo.errors import ConfigError, EngineDead, InvalidRequest, ModelNotFound, ModelNotServed
from octavo.server.error_responses import ModelConflict
from registry_fakes import Engines, ask, eventually, registry, run

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
        with pytest.raises(ModelConflict, match="`m` was set to `other` while `m@v2` was loaded, and stays so"):
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


def test_a_replaced_weight_adds_to_an_existing_one() -> None:
    async def work() -> None:
        models = registry(Engines(), "a", "b", "c")
        models.set_alias("chat", {"a": 90, "b": 10, "c": 50})
        await models.swap("chat", "b", replace="a")
        assert models.aliases["chat"] == {"b": 100, "c": 50}

    run(work())


def test_a_swap_to_a_loaded_model_does_not_wait_for_another_load() -> None:
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


def test_a_model_of_another_running_swap_is_not_drained() -> None:
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


def test_a_name_is_not_switched_to_a_restarting_engine() -> None:
    async def work() -> None:
        engines = Engines()
        models = registry(engines, "m@v1", "m@v2")
        for name in ("m@v1", "m@v2"):
            await models.load(name)
        engine: Any = engines.started[1]
        engine.state = lambda: SimpleNamespace(name="restarting")
        engine.dead = True
        with pytest.raises(EngineDead):
            await models.swap("m", "m@v2")
        assert await ask(models, "m") == "m@v1"
        engine.dead = False
        await models.swap("m", "m@v2")
        assert await ask(models, "m") == "m@v2"
        assert len(engines.attempts) == 2

    run(work())


def test_a_loading_model_without_a_name_answers_its_waiters_and_is_unloaded() -> None:
    async def work() -> None:
        engines = Engines()
        models = registry(engines, "m@v1=m@v1?load=0.1", "m@v2")
        await models.load("m@v2")
        waiting = asyncio.ensure_future(ask(models, "m"))
        await eventually(lambda: engines.loading == 1)
        done = await models.swap("m", "m@v2")
        assert (done.unloading, waiting.done()) == (("m@v1",), False)
        assert await ask(models, "m") == "m@v2"
        assert await waiting == "m@v1"
        await eventually(lambda: engines.open == ["m@v2"])
        # One that something leads to again by then stays.
        models.set_alias("keeps", {"m@v2": 1})
        await models.swap("m", "m@v1")
        await models.unload("m@v1")
        load = asyncio.ensure_future(models.load("m@v1"))
        await eventually(lambda: engines.loading == 1)
        await models.swap("m", "m@v2")
        models.set_alias("stable", {"m@v1": 1})
        await load
        await asyncio.sleep(0.02)
        assert sorted(engines.open) == ["m@v1", "m@v2"]

    run(work())


def test_a_swap_reports_kept_and_unloading_models() -> None:
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


def test_a_version_that_has_served_keeps_its_model() -> None:
    async def work() -> None:
        engines = Engines()
        models = registry(engines, "m@v1", "plain")
        await models.load("m")
        await models.swap("m", "m@v2", EngineConfig(model="two"), wait=True)
        with pytest.raises(ConfigError, match=r"to: `m@v1` is already another model; .* for example `m@2`"):
            await models.swap("m", "m@v1", EngineConfig(model="three"))
        with pytest.raises(ConfigError, match=r"`m@v1` has served another model; .* or remove that one"):
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


def test_a_version_id_cannot_become_an_alias() -> None:
    async def work() -> None:
        engines = Engines()
        models = registry(engines, "m@v1", "m@v2")
        models.set_alias("chat", {"m@v1": 1, "m@v2": 1})
        await models.load("m@v2")
        with pytest.raises(InvalidRequest, match=r"`m@v2` is one version .* and cannot be swapped; .* \(`chat`\)"):
            await models.swap("m@v2", "m@v3", EngineConfig(model="three"))
        with pytest.raises(ConfigError, match=r"aliases\.m@v2: this is the id of a model version"):
            models.set_alias("m@v2", {"m@v1": 1})
        assert models.names == ["m@v1", "m@v2", "m", "chat"]
        assert engines.open == ["m@v2"]
        await models.swap("chat", "m@v3", EngineConfig(model="three"), replace="m@v2", wait=True)
        assert models.aliases["chat"] == {"m@v1": 1, "m@v3": 1}
        assert engines.open == ["three"]

    run(work())


def test_version_numbers_are_not_reused() -> None:
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


def test_a_model_that_is_about_to_load_cannot_change() -> None:
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


def test_a_model_cannot_have_the_name_of_an_alias() -> None:
    async def work() -> None:
        models = registry(Engines(), "m@v1")
        for name in ("m", "chat"):
            models.set_alias(name, {"m@v1": 1})
            with pytest.raises(ConfigError, match=f"`{name}` is an alias of `m@v1` .* for example `{name}@2`"):
                await models.load(name, EngineConfig(model="x"))
        assert models.names == ["m@v1", "m", "chat"]

    run(work())
