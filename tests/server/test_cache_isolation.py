"""Keys do not share cached prefixes, measured by the cached tokens in responses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from octavo.config import EngineConfig
from octavo.engine.async_engine import AsyncEngine
from octavo.server.access.api_keys import KeyRing
from octavo.server.lifecycle import Events, serve
from octavo.server.settings import ServerSettings
from octavo.server.state import ServerState
from octavo.server.transport.listen import bind

PROMPT = list(range(100, 164))  # four blocks
CACHED = 48  # at most: the last block is computed again, for its last token is asked for


@asynccontextmanager
async def serving(keys: KeyRing, **settings: Any) -> AsyncIterator[str]:
    listener = bind("127.0.0.1", 0)
    ready = asyncio.Event()
    task = asyncio.ensure_future(
        serve(
            listener,
            AsyncEngine.start(EngineConfig(model="fake", load_format="fake", num_blocks=64)),
            names=("fake",),
            grace=0.1,
            state=ServerState(ServerSettings(**settings), keys=keys),
            signals=False,
            events=Events(ready=lambda _: ready.set()),
        )
    )
    try:
        await asyncio.wait_for(ready.wait(), 20)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def cached(url: str, key: str, salt: str | None = None) -> int:
    """Tokens of the prompt that a request with a key finds cached."""
    extra = {} if salt is None else {"cache_salt": salt}
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
        answered = await client.completions.create(model="fake", prompt=PROMPT, max_tokens=2, extra_body=extra)
    assert answered.usage is not None
    assert answered.usage.prompt_tokens_details is not None
    return answered.usage.prompt_tokens_details.cached_tokens or 0


@pytest.fixture
def keys(tmp_path: Path) -> KeyRing:
    file = tmp_path / "keys"
    file.write_text("alice alice-secret tenant=one\nbob bobby-secret tenant=one\n")
    file.chmod(0o600)
    return KeyRing(file)


def test_each_key_finds_only_its_own_prefixes(keys: KeyRing) -> None:
    async def run() -> None:
        async with serving(keys) as url:
            assert await cached(url, "alice-secret") == 0
            assert await cached(url, "alice-secret") == CACHED
            # Another key, though of the same tenant.
            assert await cached(url, "bobby-secret") == 0
            assert await cached(url, "bobby-secret") == CACHED
            # A salt divides a key's own, and opens no other's.
            assert await cached(url, "alice-secret", "x") == 0
            assert await cached(url, "alice-secret", "x") == CACHED
            assert await cached(url, "bobby-secret", "x") == 0
            assert await cached(url, "alice-secret", "") == CACHED

    asyncio.run(run())


def test_prefixes_are_shared_if_configured(keys: KeyRing) -> None:
    async def run() -> None:
        async with serving(keys, share_prefix_cache=True) as url:
            assert await cached(url, "alice-secret") == 0
            assert await cached(url, "bobby-secret") == CACHED
            assert await cached(url, "alice-secret", "x") == 0
            assert await cached(url, "bobby-secret", "x") == CACHED

    asyncio.run(run())


def test_without_keys_only_the_salt_separates() -> None:
    async def run() -> None:
        async with serving(KeyRing()) as url:
            assert await cached(url, "any") == 0
            assert await cached(url, "other") == CACHED
            assert await cached(url, "any", "x") == 0
            assert await cached(url, "any", "x") == CACHED

    asyncio.run(run())
