"""Generation for one request: several prompts, each with several completions, as one sequence of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.engine.outputs import OutputDelta, TokenLogprobs
from octavo.sampling_params import SamplingParams
from octavo.server.models.model_handle import ModelHandle
from octavo.server.observability.request_record import RequestRecord
from octavo.server.queueing.admission import Admission
from octavo.server.queueing.deadline import Deadline
from octavo.server.request.output_events import OutputEvent, OutputParser, text_events

if TYPE_CHECKING:
    from octavo.server.request.endpoint import RequestContext

__all__ = ["Choice", "Push", "collect", "generate", "generate_nothing"]

Push = Callable[[int, bytes], bool]
"""Sends the text (UTF-8, or none) of one more token of a choice; False if that is impossible now."""


class Choice(msgspec.Struct):
    """One choice, put together from its events."""

    texts: list[str] = []
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        """All its text."""
        return "".join(self.texts)

    def add(self, event: OutputEvent) -> None:
        """Append an event."""
        if event.text:
            self.texts.append(event.text)
        self.token_ids.extend(event.token_ids)
        if event.logprobs:
            self.logprobs.extend(event.logprobs)
        if event.finish_reason is not None:
            self.finish_reason, self.stop_reason = event.finish_reason, event.stop_reason


async def _one(
    admission: Admission, model: ModelHandle, prompt: int, token_ids: Sequence[int], **how: Any
) -> AsyncIterator[tuple[int, OutputDelta]]:
    await admission.turn(prompt)
    stream: Any = model.engine.stream(token_ids, admission.params, **how)
    async with aclosing(stream):
        async for delta in stream:
            admission.count(prompt, len(delta.token_ids))
            yield prompt, delta
    admission.done(prompt)


def _counted(push: Push, admission: Admission, record: RequestRecord) -> Push:
    """`push`, counted, for choices of the only prompt that have begun."""

    def sink(choice: int, text: bytes) -> bool:
        if not record.has_begun(choice) or not push(choice, text):
            return False
        admission.count(0, 1)
        record.add_token(choice)
        return True

    return sink


async def _several(
    admission: Admission, model: ModelHandle, prompts: Sequence[Sequence[int]], *, whole: bool
) -> AsyncIterator[tuple[int, OutputDelta]]:
    # A short queue: while the client is slow the engine merges what arrives, and nothing piles up here.
    queue: asyncio.Queue[tuple[int, OutputDelta] | BaseException | None] = asyncio.Queue(len(prompts))

    async def pump(prompt: int) -> None:
        try:
            async for item in _one(admission, model, prompt, prompts[prompt], whole=whole):
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


async def _within(
    admission: Admission, deadline: Deadline, source: AsyncIterator[tuple[int, OutputDelta]], choices: int, n: int
) -> AsyncIterator[tuple[int, OutputDelta]]:
    """The output of `source` before the deadline, then the end of every choice that has not ended."""
    open_choices = set(range(choices))
    began = False
    while deadline.begin_wait():
        try:
            item = await anext(source)
        except StopAsyncIteration:
            return
        except asyncio.CancelledError:
            if not deadline.interrupted():
                raise
            break
        finally:
            deadline.end_wait()
        began = True
        prompt, delta = item
        if delta.finish_reason is not None:
            open_choices.discard(prompt * n + delta.index)
        yield item
    if not began:
        raise admission.timed_out()
    for choice in sorted(open_choices):
        yield choice // n, OutputDelta(index=choice % n, finish_reason="length")


async def generate(
    context: RequestContext,
    model: ModelHandle,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    record: RequestRecord,
    *,
    parse: OutputParser = text_events,
    push: Push | None = None,
    whole: bool = False,
) -> AsyncGenerator[OutputEvent, None]:
    """Wait for the request's turn, then yield the events of every choice as they arrive, counted in `record`.

    A request that reaches its deadline ends with what it has; its finish reasons are "length". Closing the generator
    aborts what still runs.

    Args:
        context: the request.
        model: the model.
        prompts: token ids of each prompt.
        params: of every prompt.
        record: of the whole request.
        parse: makes events of the engine's output.
        push: takes tokens that are plain text as soon as the engine's step arrives, without waking a task; what it
            refuses is yielded. For one prompt and without a parser.
        whole: yield the beginning and, at the end, the rest, unless the request has a deadline.

    Raises:
        InvalidRequest: the request asks for too much.
        QueueFull, QueueTimeout, ConcurrencyExceeded: the request cannot run now.
    """
    record.begin(params)
    complete = False
    try:
        async with context.admission(model, prompts, params) as admission:
            record.waits(admission)
            deadline = admission.deadline
            whole = whole and deadline is None
            if len(prompts) > 1:
                source: Any = _several(admission, model, prompts, whole=whole)
            else:
                sink = None if push is None else _counted(push, admission, record)
                source = _one(admission, model, 0, prompts[0], sink=sink, whole=whole)
            async with aclosing(source):
                timed = (
                    source
                    if deadline is None
                    else _within(admission, deadline, source, len(prompts) * params.n, params.n)
                )
                async for prompt, delta in timed:
                    choice = prompt * params.n + delta.index
                    record.add(prompt, choice, delta)
                    for event in parse(choice, delta):
                        yield event
        complete = True
    finally:
        if complete:
            record.finish()
        else:
            record.abandon()


async def generate_nothing(count: int, record: RequestRecord) -> AsyncGenerator[OutputEvent, None]:
    """The events of a request for no tokens at all, which needs no engine."""
    for choice in range(count):
        yield OutputEvent(choice, finish_reason="length")
    record.finish()


async def collect(events: AsyncGenerator[OutputEvent, None], count: int) -> list[Choice]:
    """Put `count` choices together."""
    choices = [Choice() for _ in range(count)]
    async with aclosing(events):
        async for event in events:
            choices[event.choice].add(event)
    return choices
