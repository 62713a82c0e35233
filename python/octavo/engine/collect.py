"""The client's side of outputs: from a step's arrays to requests."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from octavo.engine.outputs import CompletionOutput, OutputDelta, PackedLogprobs, RequestOutput
from octavo.engine.protocol import StepOutputs
from octavo.sampling_params import SamplingParams

__all__ = ["FINISH_REASONS", "RequestState", "Sink", "apply", "stop_reason"]

Sink = Callable[[int, bytes], bool]
"""Takes the text (UTF-8, or none) of one token of an answer, by its index; False when it cannot now. Must not raise."""

_LOG = logging.getLogger(__name__)
_State = TypeVar("_State", bound="RequestState")
FINISH_REASONS = (None, "stop", "length")
_NO_STOP_REASON = -(1 << 31)


class _Answer:
    """Output of one completion that its consumer has not taken, kept packed.

    Attributes:
        text: UTF-8, whole characters.
        token_ids: int32.
    """

    __slots__ = ("finish_reason", "logprobs", "stop_reason", "text", "token_ids")

    def __init__(self, with_logprobs: bool) -> None:
        self.text = bytearray()
        self.token_ids = array("i")
        self.logprobs = PackedLogprobs() if with_logprobs else None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def fields(self) -> dict[str, Any]:
        """Fields of an `OutputDelta` or `CompletionOutput`."""
        return {
            "text": self.text.decode(),
            "token_ids": self.token_ids.tolist(),
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
        }


class RequestState:
    """A running request in its client.

    Outputs are merged into one delta a completion until the consumer takes them, so a slow consumer costs no more than
    the output itself.

    Attributes:
        name: the request's id as callers know it.
        num_unfinished: completions still running.
        num_cached_tokens: prompt tokens found in the prefix cache.
        sink: takes plain text directly; set only while nothing is pending here.
        error: ended the request; raised in its consumer.
        started_at: `time.monotonic()` when the engine first scheduled it; 0 before.
    """

    def __init__(self, name: str, prompt: str | None, prompt_token_ids: list[int], params: SamplingParams) -> None:
        self.name = name
        self.num_unfinished = params.n
        self.num_cached_tokens = 0
        self.sink: Sink | None = None
        self.error: Exception | None = None
        self.started_at = 0.0
        self.stop_texts = list(params.stop)
        self.num_logprobs = -1 if params.logprobs is None else params.logprobs
        self._prompt = prompt
        self._prompt_token_ids = prompt_token_ids
        self._answers = [_Answer(self.num_logprobs >= 0) for _ in range(params.n)]
        self._fresh: list[int] = []

    def answer(self, index: int) -> _Answer:
        """The completion that a new token belongs to."""
        answer = self._answers[index]
        if not answer.token_ids and answer.finish_reason is None:
            self._fresh.append(index)
        return answer

    def add(self, index: int, token_ids: bytes, text: bytes, num_cached_tokens: int) -> _Answer:
        """Add the output of several steps; for consumers of whole outputs."""
        answer = self._answers[index]
        answer.token_ids.frombytes(token_ids)
        answer.text += text
        self.num_cached_tokens = num_cached_tokens
        return answer

    def finish_early(self, reason: str) -> None:
        """End every running completion."""
        for index, answer in enumerate(self._answers):
            if answer.finish_reason is None:
                if not answer.token_ids:
                    self._fresh.append(index)
                answer.finish_reason = reason
        self.num_unfinished = 0

    def take(self) -> list[OutputDelta]:
        """New output since the last call, one delta a completion, in order of arrival."""
        fresh, self._fresh = self._fresh, []
        deltas = []
        for index in fresh:
            answer = self._answers[index]
            deltas.append(
                OutputDelta(
                    index=index,
                    num_cached_tokens=self.num_cached_tokens,
                    started_at=self.started_at,
                    logprobs=answer.logprobs,
                    **answer.fields(),
                )
            )
            answer.text, answer.token_ids = bytearray(), array("i")
            if answer.logprobs is not None:
                answer.logprobs = PackedLogprobs()
        return deltas

    def output(self) -> RequestOutput:
        """The whole output; for consumers that have not called `take`."""
        return RequestOutput(
            request_id=self.name,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[
                CompletionOutput(
                    index=index, logprobs=None if answer.logprobs is None else [*answer.logprobs], **answer.fields()
                )
                for index, answer in enumerate(self._answers)
            ],
            num_cached_tokens=self.num_cached_tokens,
            error=self.error,
        )


def apply(outputs: StepOutputs, states: Mapping[int, _State], *, push: bool = True) -> list[tuple[int, _State]]:
    """Distribute a step's events to their requests; events of unknown (aborted) requests are dropped.

    Args:
        outputs: of a step.
        states: the requests by id.
        push: use the sinks. If many steps wait, merging their tokens costs less.

    Returns:
        (id, state) of each request with pending output, once.
    """
    if outputs.started:
        for request_id in memoryview(outputs.started).cast("q"):
            if (state := states.get(request_id)) is not None:
                state.started_at = outputs.started_at
    text = outputs.text
    touched: dict[int, _State] = {}
    begin = 0
    # Numbers become Python's an array at a time: many times faster than one by one.
    events = zip(
        memoryview(outputs.request_ids).cast("q").tolist(),
        memoryview(outputs.sample_indices).cast("i").tolist(),
        memoryview(outputs.token_ids).cast("i").tolist(),
        memoryview(outputs.text_ends).cast("i").tolist(),
        memoryview(outputs.finish_reasons).cast("i").tolist(),
        memoryview(outputs.cached_tokens).cast("i").tolist(),
        strict=True,
    )
    for event, (request_id, sample, token_id, end, finish, cached_tokens) in enumerate(events):
        state = states.get(request_id)
        if state is not None:
            sink = state.sink
            if sink is None or finish or not push or not _taken(sink, sample, text[begin:end]):
                answer = state.answer(sample)
                answer.token_ids.append(token_id)
                answer.text += text[begin:end]
                if answer.logprobs is not None:
                    answer.logprobs.add(outputs.logprobs, event, token_id, state.num_logprobs)
                if finish:
                    answer.finish_reason = FINISH_REASONS[finish]
                    reason = memoryview(outputs.stop_reasons).cast("i")[event]
                    answer.stop_reason = stop_reason(finish, reason, state.stop_texts)
                    state.num_unfinished -= 1
                else:
                    # Later output must not overtake this.
                    state.sink = None
                state.num_cached_tokens = cached_tokens
                touched[request_id] = state
        begin = end
    return list(touched.items())


def _taken(sink: Sink, sample: int, text: bytes) -> bool:
    """Whether a sink took a token; a sink that raises affects its own request only."""
    try:
        return sink(sample, text)
    except Exception:
        _LOG.exception("the sink of a stream failed")
        return False


def stop_reason(finish: int, reason: int, stop_texts: list[str]) -> int | str | None:
    """The stop text or token of the request that ended a completion; numbers as in `octavo._core.StepOutput`."""
    if finish != 1 or reason == _NO_STOP_REASON:
        return None
    return stop_texts[-1 - reason] if reason < 0 else reason
