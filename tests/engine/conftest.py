"""Fixtures of the engine's tests: nothing here needs a model or torch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from engine_fakes import COMMAND, fake_config
from octavo.engine.async_engine import AsyncEngine


@asynccontextmanager
async def _fake_engine(model: str = "fake", **settings: Any) -> AsyncIterator[AsyncEngine]:
    engine = await AsyncEngine.start(fake_config(model, **settings), worker_command=COMMAND)
    try:
        yield engine
    finally:
        await engine.close()


@pytest.fixture
def fake_engine() -> Callable[..., Any]:
    """An `AsyncEngine` over a fake worker process, as an async context manager."""
    return _fake_engine


@pytest.fixture
def run() -> Callable[..., Any]:
    """Run a coroutine in a fresh event loop, a minute at most."""

    def runner(coroutine: Awaitable[Any]) -> Any:
        async def limited() -> Any:
            return await asyncio.wait_for(coroutine, 60)

        return asyncio.run(limited())

    return runner
