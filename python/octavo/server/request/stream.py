"""Streamed responses: one loop writes the output events of every API."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing

from octavo.server.request.endpoint import RequestContext
from octavo.server.request.keep_alive import COMMENT, keep_alive
from octavo.server.request.output_events import OutputEvent
from octavo.server.transport.http import EVENTS

__all__ = ["StreamWriter", "write_stream"]


class StreamWriter(ABC):
    """Writes the output events of one request in an API's format.

    Attributes:
        headers: of the response.
        heartbeat: sent while there is nothing to say; clients ignore it.
    """

    headers: list[tuple[bytes, bytes]] = EVENTS
    heartbeat: bytes = COMMENT

    def opening(self) -> bytes:
        """What precedes the first event."""
        return b""

    @abstractmethod
    def event(self, event: OutputEvent) -> bytes:
        """The chunks of one event; may be empty."""

    def closing(self) -> bytes:
        """What ends a stream without an error."""
        return b""


async def write_stream(
    context: RequestContext, events: AsyncGenerator[OutputEvent, None], writer: StreamWriter
) -> None:
    """Send events as a stream.

    The response begins with the first event, which proves that the request is sound: an error before it has its own
    status, unless a heartbeat came first.
    """
    reply = context.reply
    opened = False
    seconds = context.state.settings.sse_keep_alive_seconds
    async with keep_alive(reply, seconds, writer.heartbeat, writer.headers), aclosing(events):
        async for event in events:
            if not opened:
                opened = True
                if not reply.streaming:
                    await reply.events(writer.headers)
                if opening := writer.opening():
                    await reply.event(opening)
            if chunks := writer.event(event):
                await reply.event(chunks)
    await reply.end_stream(writer.closing())
