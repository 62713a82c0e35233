"""The answers of one request: several prompts and several answers each, as one stream of pieces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from octavo.engine.outputs import OutputDelta, TokenLogprobs
from octavo.sampling_params import SamplingParams
from octavo.server.metrics import RequestRecord
from octavo.server.served import ServedModel

__all__ = ["Answer", "collect", "pieces"]


class Answer(msgspec.Struct):
    """One whole answer, pieced together."""

    texts: list[str] = []
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        """All its text."""
        return "".join(self.texts)

    def add(self, delta: OutputDelta) -> None:
        """Append a piece."""
        if delta.text:
            self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        if delta.logprobs:
            self.logprobs.extend(delta.logprobs)
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


async def _one(
    served: ServedModel, prompt: int, token_ids: Sequence[int], params: SamplingParams
) -> AsyncIterator[tuple[int, OutputDelta]]:
    stream: Any = served.engine.stream(token_ids, params)
    async with aclosing(stream):
        async for delta in stream:
            yield prompt, delta


async def _several(
    served: ServedModel, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> AsyncIterator[tuple[int, OutputDelta]]:
    # A short queue: while the client is slow the engine merges what arrives, and nothing piles up here.
    queue: asyncio.Queue[tuple[int, OutputDelta] | BaseException | None] = asyncio.Queue(len(prompts))

    async def pump(prompt: int) -> None:
        try:
            async for item in _one(served, prompt, prompts[prompt], params):
                await queue.put(item)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    pumps = [asyncio.ensure_future(pump(prompt)) for prompt in range(len(prompts))]
    try:
        running = len(pumps)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def pieces(
    served: ServedModel, prompts: Sequence[Sequence[int]], params: SamplingParams, record: RequestRecord
) -> AsyncIterator[tuple[int, OutputDelta]]:
    """Every piece of every answer as it arrives, counted in `record`.

    Args:
        served: the model that answers.
        prompts: token ids each.
        params: of every prompt.
        record: of the whole request.

    Yields:
        (index of the choice: prompt * n + answer, piece). Closing the iterator aborts what still runs.
    """
    record.begin(params)
    source = _one(served, 0, prompts[0], params) if len(prompts) == 1 else _several(served, prompts, params)
    complete = False
    try:
        async with aclosing(source):  # type: ignore[type-var]
            async for prompt, delta in source:
                choice = prompt * params.n + delta.index
                record.add(prompt, choice, delta)
                yield choice, delta
        complete = True
    finally:
        if complete:
            record.finish()
        else:
            record.abandon()


async def collect(
    served: ServedModel, prompts: Sequence[Sequence[int]], params: SamplingParams, record: RequestRecord
) -> list[Answer]:
    """All answers, whole, by choice."""
    answers = [Answer() for _ in range(len(prompts) * params.n)]
    stream: Any = pieces(served, prompts, params, record)
    async with aclosing(stream):
        async for choice, delta in stream:
            answers[choice].add(delta)
    return answers
