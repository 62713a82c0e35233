"""Signs of life on streams that have nothing to say yet: proxies close what is silent for a minute."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from octavo.server.http import Reply

__all__ = ["keep_alive"]


@asynccontextmanager
async def keep_alive(reply: Reply, seconds: float) -> AsyncIterator[None]:
    """Send a comment after every `seconds` of silence while the block runs; 0 for never.

    Silence before the first output begins the stream, so an error that comes later is an event of it and has no status
    of its own.
    """
    if not seconds:
        yield
        return
    beat = asyncio.ensure_future(_beat(reply, seconds))
    try:
        yield
    finally:
        beat.cancel()
        await asyncio.gather(beat, return_exceptions=True)


async def _beat(reply: Reply, seconds: float) -> None:
    while True:
        before = reply.num_events
        await asyncio.sleep(seconds)
        if reply.num_events == before:
            await reply.comment()
