"""Everything that can be done to models, at once and in any order: what always holds."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from octavo.config import EngineConfig
from octavo.errors import OctavoError
from octavo.server.entry import ModelState
from octavo.server.errors import EngineLoading, ModelUnavailable
from octavo.server.registry import ModelRegistry
from registry_fakes import Engines, registry, run
from server_fakes import FakeEngine

MOST = 2


class _Counted(Engines):
    """Engines that know how many of them were open at once."""

    most_open = 0

    async def __call__(self, config: EngineConfig, progress: Any) -> FakeEngine:
        engine = await super().__call__(config, progress)
        self.most_open = max(self.most_open, len(self.open))
        return engine


async def _client(models: ModelRegistry, dice: random.Random, outcomes: dict[str, int]) -> None:
    for _ in range(60):
        name = dice.choice(["m", "chat", "m@1", "m@2", "other", None])
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
        except (EngineLoading, ModelUnavailable):
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


async def _operator(models: ModelRegistry, dice: random.Random, outcomes: dict[str, int]) -> None:
    for _ in range(40):
        id = dice.choice(["m@1", "m@2", "other"])
        fails = dice.random() < 0.2
        new = f"new@{dice.randrange(10**9)}"
        config = EngineConfig(model=f"x?load=0.002{'&fail=1' if fails else ''}")
        what: Any = dice.choice(
            [
                lambda id=id: models.load(id),
                lambda id=id: models.unload(id),
                lambda: models.swap("m", dice.choice(["m@1", "m@2"])),
                lambda: models.swap("chat", dice.choice(["m@1", "m@2", "other"]), replace=dice.choice(["m@1", "m@2"])),
                lambda: models.swap("other", dice.choice(["other", "m@1"]), wait=True),
                lambda new=new, config=config: models.swap("m", new, config),
            ]
        )
        try:
            await what()
            outcomes["done"] += 1
        except (OctavoError, asyncio.CancelledError):
            outcomes["refused"] += 1
        models.set_alias("chat", {"m@1": dice.randrange(1, 9), "m@2": dice.randrange(1, 9)})
        models.set_keep_alive(id, dice.choice([0, 0.002, -1]))
        await asyncio.sleep(dice.random() * 0.004)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("limited", [False, True])
def test_no_engine_is_closed_under_a_request_and_nothing_is_left_over(seed: int, limited: bool) -> None:
    async def work() -> None:
        engines = _Counted()
        settings = {"max_loaded_models": MOST} if limited else {}
        models = registry(
            engines, "m@1=m1?load=0.001", "m@2=m2?load=0.002", "other=o?load=0.001", model_load_wait=5, **settings
        )
        models.set_alias("chat", {"m@1": 1, "m@2": 1})
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
        for entry in models.entries:
            assert (entry.leases, entry.num_waiting) == (0, 0)
            assert (entry.engine is None) == (entry.state in (ModelState.UNLOADED, ModelState.FAILED))
        drains = [entry.draining for entry in models.entries if entry.draining is not None]
        await asyncio.gather(*drains)
        assert len(engines.open) == len(models.loaded)
        await models.close()
        assert engines.open == []
        assert all(engine.running == 0 for engine in engines.started)

    run(work())
