"""Invariants of the registry under random concurrent commands."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from octavo.config import EngineConfig
from octavo.errors import ModelNotServed, OctavoError
from octavo.server.error_responses import EngineLoading, ModelUnavailable, ServerStopping
from octavo.server.models.registry import ModelRegistry
from octavo.server.models.registry_entry import ModelState
from registry_fakes import Engines, eventually, registry, run
from server_fakes import FakeEngine

MOST = 2
KEPT = ("m@1", "m@2", "other")


class _Counted(Engines):
    """Engines that know how many of them were open at once."""

    most_open = 0

    async def __call__(self, config: EngineConfig, progress: Any) -> FakeEngine:
        engine = await super().__call__(config, progress)
        self.most_open = max(self.most_open, len(self.open))
        return engine


async def _client(models: ModelRegistry, dice: random.Random, outcomes: dict[str, int], rounds: int = 60) -> None:
    for _ in range(rounds):
        name = dice.choice(["m", "chat", "m@1", "m@2", "other", "passing", "new@0", None])
        asking = asyncio.ensure_future(models.acquire(name, lambda: str(dice.random())))
        if dice.random() < 0.1:
            # The client leaves.
            await asyncio.sleep(dice.random() * 0.004)
            asking.cancel()
        try:
            served, release = await asking
        except asyncio.CancelledError:
            outcomes["left"] += 1
            continue
        except (EngineLoading, ModelUnavailable, ModelNotServed, ServerStopping):
            outcomes["later"] += 1
            continue
        engine = served.engine
        assert isinstance(engine, FakeEngine)
        for _ in range(dice.randrange(4)):
            assert not engine.closed, "an engine was closed under a request"
            await asyncio.sleep(dice.random() * 0.003)
        assert not engine.closed, "an engine was closed under a request"
        release()
        outcomes["answered"] += 1


async def _named(models: ModelRegistry, id: str) -> None:
    models.set_alias("passing", {id: 1})
    await asyncio.sleep(0.001)
    models.set_alias("passing", {"other": 1})


async def _operator(models: ModelRegistry, dice: random.Random, outcomes: dict[str, int]) -> None:
    for _ in range(40):
        id = dice.choice(["m@1", "m@2", "other"])
        fails = dice.random() < 0.2
        new = f"new@{dice.randrange(5)}"
        old = dice.choice([id for id in (entry.id for entry in models.entries) if id not in KEPT] or ["none"])
        config = EngineConfig(model=f"x?load=0.002{'&fail=1' if fails else ''}")
        what: Any = dice.choice(
            [
                lambda id=id: models.load(id),
                lambda id=id: models.unload(id),
                lambda: models.swap("m", dice.choice(["m@1", "m@2"])),
                lambda: models.swap("chat", dice.choice(["m@1", "m@2", "other"]), replace=dice.choice(["m@1", "m@2"])),
                lambda: models.swap("other", dice.choice(["other", "m@1"]), wait=True),
                lambda new=new, config=config: models.swap("m", new, config),
                lambda config=config: models.swap("m", None, config),
                lambda new=new, config=config: models.load(new, config, tentative=True, on_request=False),
                lambda old=old: models.unload(old, remove=True),
                lambda old=old: _named(models, old),
            ]
        )
        try:
            await what()
            outcomes["done"] += 1
        except OctavoError:
            outcomes["refused"] += 1
        for alias, weights in models.aliases.items():
            assert all(id in (entry.id for entry in models.entries) for id in weights), alias
        models.set_alias("chat", {"m@1": dice.randrange(1, 9), "m@2": dice.randrange(1, 9)})
        models.set_keep_alive(id, dice.choice([0, 0.002, -1]))
        await asyncio.sleep(dice.random() * 0.004)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("limited", [False, True])
def test_random_commands_close_no_engine_in_use_and_leak_nothing(seed: int, limited: bool) -> None:
    async def work() -> None:
        engines = _Counted()
        settings = {"max_loaded_models": MOST} if limited else {}
        models = registry(
            engines, "m@1=m1?load=0.001", "m@2=m2?load=0.002", "other=o?load=0.001", model_load_wait=5, **settings
        )
        models.set_alias("chat", {"m@1": 1, "m@2": 1})
        gone, ever = [], set(KEPT)
        models.on_removal = lambda entry: gone.append(entry.id)
        register = models.register

        def registered(id: str, *arguments: Any, **options: Any) -> Any:
            entry = register(id, *arguments, **options)
            ever.add(id)
            return entry

        models.register = registered  # type: ignore[method-assign]
        dice = random.Random(seed)
        outcomes = dict.fromkeys(("answered", "left", "later", "done", "refused"), 0)
        await asyncio.gather(
            *(_client(models, random.Random(dice.random()), outcomes) for _ in range(12)),
            *(_operator(models, random.Random(dice.random()), outcomes) for _ in range(3)),
        )
        assert outcomes["answered"] > 300, outcomes
        assert outcomes["done"] > 30, outcomes
        if limited:
            # One more while a swap has both.
            assert engines.most_open <= MOST + 1
        # A load goes on when the client that it was begun for has left.
        await eventually(lambda: all(entry.loading is None for entry in models.entries))
        for entry in models.entries:
            assert (entry.leases, entry.num_waiting) == (0, 0)
            assert (entry.engine is None) == (entry.state in (ModelState.UNLOADED, ModelState.FAILED))
        assert (models._swap_locks, models._swap_under_way) == ({}, None)
        drains = [entry.draining for entry in models.entries if entry.draining is not None]
        await asyncio.gather(*drains)
        assert len(engines.open) == len(models.loaded)
        assert models._removed == []
        known = {entry.id for entry in models.entries}
        assert set(gone) >= ever - known
        await models.close()
        assert engines.open == []
        assert all(engine.running == 0 for engine in engines.started)

    run(work())


@pytest.mark.parametrize("seed", range(6))
def test_shutdown_amid_random_commands_leaks_nothing(seed: int) -> None:
    async def work() -> None:
        engines = Engines()
        models = registry(engines, "m@1=m1?load=0.001", "m@2=m2?load=0.002", "other=o?load=0.001", model_load_wait=5)
        models.set_alias("chat", {"m@1": 1, "m@2": 1})
        dice = random.Random(seed)
        outcomes = dict.fromkeys(("answered", "left", "later", "done", "refused"), 0)
        everybody = [
            *(asyncio.ensure_future(_operator(models, random.Random(dice.random()), outcomes)) for _ in range(4)),
            *(asyncio.ensure_future(_holding(models, random.Random(dice.random()))) for _ in range(6)),
        ]
        await asyncio.sleep(0.05 + dice.random() * 0.1)
        models.stop()
        # One that was begun in this very moment takes its first step yet.
        for _ in range(3):
            await asyncio.sleep(0)
        attempts = len(engines.attempts)
        await asyncio.sleep(dice.random() * 0.01)
        await models.close()
        assert (engines.open, engines.loading, len(engines.attempts)) == ([], 0, attempts)
        # Nobody waits for what will not come; holders find their engines closed, as the end says.
        await asyncio.wait_for(asyncio.gather(*everybody), 10)
        assert (engines.open, len(engines.attempts)) == ([], attempts)
        assert all(entry.loading is None and entry.leases == 0 for entry in models.entries)

    run(work())


async def _holding(models: ModelRegistry, dice: random.Random) -> None:
    """A client whose requests take their time."""
    for _ in range(40):
        try:
            _, release = await models.acquire(dice.choice(["m", "chat", "other", "passing"]))
        except (EngineLoading, ModelUnavailable, ModelNotServed, ServerStopping):
            await asyncio.sleep(0.001)
            continue
        await asyncio.sleep(dice.random() * 0.02)
        release()
