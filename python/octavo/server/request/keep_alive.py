"""Heartbeats on silent streams: proxies close connections that are silent for a minute."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from octavo.server.transport.http import EVENTS, Reply

__all__ = ["COMMENT", "LINE_SPACE", "keep_alive"]

COMMENT = b": keep-alive\n\n"
"""The heartbeat of server-sent events, which clients skip."""
LINE_SPACE = b" "
"""The heartbeat of JSON lines. It begins the next line, as JSON may begin with blanks; an empty line is invalid."""


@asynccontextmanager
async def keep_alive(
    reply: Reply, seconds: float, sign: bytes = COMMENT, headers: list[tuple[bytes, bytes]] = EVENTS
) -> AsyncIterator[None]:
    """Send a heartbeat after every `seconds` of silence while the block runs.

    Silence before the first output begins the stream, so an error that comes later is an event of it and has no status
    of its own.

    Args:
        reply: the stream's.
        seconds: of silence; 0 for never.
        sign: what the stream's clients ignore, of which no event is made up.
        headers: of the stream, where the sign begins it.
    """
    if not seconds:
        yield
        return
    beat = asyncio.ensure_future(_beat(reply, seconds, sign, headers))
    try:
        yield
    finally:
        beat.cancel()
        await asyncio.gather(beat, return_exceptions=True)


async def _beat(reply: Reply, seconds: float, sign: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    while True:
        before = reply.num_events
        await asyncio.sleep(seconds)
        if reply.num_events == before:
            await reply.comment(sign, headers)
