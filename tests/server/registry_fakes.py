"""Models whose engines are fakes, for tests of the registry and of what stands on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from octavo.config import EngineConfig
from octavo.errors import ModelNotFound
from octavo.server.models.registry import ModelRegistry
from octavo.server.settings import ServerSettings
from server_fakes import FakeEngine


class Engines:
    """Starts fake engines, and remembers them.

    A model's text says how it behaves: `name?load=0.1&delay=0.01&bytes=100&fail=1&broken=1`; `fail` cannot be loaded,
    `broken` loads and cannot answer.

    Attributes:
        started: every engine, in order.
        attempts: loads that were begun, by model text.
        loading: loads that run now.
    """

    def __init__(self) -> None:
        self.started: list[FakeEngine] = []
        self.attempts: list[str] = []
        self.loading = 0
        self.most_loading = 0

    async def __call__(self, config: EngineConfig, progress: Callable[[str, int, int], None]) -> FakeEngine:
        name, _, text = config.model.partition("?")
        how = dict(part.split("=") for part in text.split("&") if part)
        self.attempts.append(config.model)
        self.loading += 1
        self.most_loading = max(self.most_loading, self.loading)
        try:
            progress("weights", 1, 4)
            await asyncio.sleep(float(how.get("load", 0)))
        finally:
            self.loading -= 1
        if "fail" in how:
            raise ModelNotFound(f"model: there is no {name!r} in /secret")
        engine = FakeEngine(float(how.get("delay", 0)))
        engine.model = msgspec.structs.replace(engine.model, name=name, weights_bytes=int(how.get("bytes", 0)))
        engine.dead = "broken" in how
        self.started.append(engine)
        return engine

    @property
    def open(self) -> list[str]:
        """Names of the engines that are not closed."""
        return [engine.model.name for engine in self.started if not engine.closed]


def registry(engines: Engines, *models: str, **settings: Any) -> ModelRegistry:
    """A registry of models `id` or `id=text`, none of them loaded."""
    made = ModelRegistry(ServerSettings(**settings), engines)
    for model in models:
        id, _, text = model.partition("=")
        made.register(id, EngineConfig(model=text or id))
    made.started = True
    return made


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a test's work in a fresh event loop, 30 seconds at most."""

    async def limited() -> Any:
        return await asyncio.wait_for(work, 30)

    return asyncio.run(limited())


async def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait until a condition holds."""
    end = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < end
        await asyncio.sleep(0.005)


async def ask(models: ModelRegistry, name: str | None, **how: Any) -> str:
    """Which model answers."""
    served, release = await models.acquire(name, **how)
    release()
    return str(served.version)
