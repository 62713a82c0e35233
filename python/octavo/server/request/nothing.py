"""The answers to a request for no tokens at all, which no engine needs to see."""

from __future__ import annotations

from collections.abc import AsyncIterator

from octavo.engine.outputs import OutputDelta
from octavo.server.observability.request_record import RequestRecord
from octavo.server.request.generation import Answer

__all__ = ["no_answers", "no_pieces"]


def no_answers(count: int) -> list[Answer]:
    """Answers without a token, at their length."""
    return [Answer(finish_reason="length") for _ in range(count)]


async def no_pieces(count: int, record: RequestRecord) -> AsyncIterator[tuple[int, OutputDelta]]:
    """As `generation.pieces`, of such answers."""
    for choice in range(count):
        yield choice, OutputDelta(finish_reason="length")
    record.finish()
