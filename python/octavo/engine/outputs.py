"""Outputs of requests."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import overload

import msgspec

from octavo.engine.protocol import Logprobs

__all__ = ["CompletionOutput", "OutputDelta", "PackedLogprobs", "RequestOutput", "TokenLogprobs"]


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log probabilities at one output position.

    Attributes:
        token_id: the token chosen.
        logprob: its log probability, before penalties and temperature.
        top: (token id, log probability) of the likeliest tokens, best first; fewer than requested if only
            fewer can be sampled.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


class PackedLogprobs(Sequence[TokenLogprobs]):
    """Log probabilities of an answer's tokens, in order.

    They stay packed until they are read: a client that reads slowly may leave many.
    """

    __slots__ = ("_chosen", "_token_ids", "_top", "_top_ids")

    def __init__(self) -> None:
        self._token_ids = array("i")
        self._chosen = array("f")
        self._top_ids = array("i")
        self._top = array("f")

    def add(self, columns: Logprobs | None, event: int, token_id: int, count: int) -> None:
        """Append those of one event of a step.

        Args:
            columns: of the step; as many as its greediest request asked for.
            event: its place in the step.
            token_id: the token chosen.
            count: columns asked for; the same for each event of an answer.
        """
        if columns is None:
            raise RuntimeError("a request asked for log probabilities and its step has none")
        first = 4 * event * columns.width
        last = first + 4 * min(count, columns.width)
        self._token_ids.append(token_id)
        self._chosen.frombytes(columns.chosen[4 * event : 4 * event + 4])
        self._top_ids.frombytes(columns.top_ids[first:last])
        self._top.frombytes(columns.top[first:last])

    def __len__(self) -> int:
        return len(self._token_ids)

    @overload
    def __getitem__(self, place: int) -> TokenLogprobs: ...
    @overload
    def __getitem__(self, place: slice) -> list[TokenLogprobs]: ...
    def __getitem__(self, place: int | slice) -> TokenLogprobs | list[TokenLogprobs]:
        if isinstance(place, slice):
            return [self[index] for index in range(*place.indices(len(self)))]
        place = range(len(self))[place]
        width = len(self._top) // len(self)
        columns = slice(place * width, (place + 1) * width)
        pairs = zip(self._top_ids[columns], self._top[columns], strict=True)
        # Fewer tokens than asked for could be drawn: the other columns hold minus infinity and no token.
        top = [pair for pair in pairs if pair[1] != -math.inf]
        return TokenLogprobs(self._token_ids[place], self._chosen[place], top)


class OutputDelta(msgspec.Struct, kw_only=True):
    """Output that one or more steps add to a completion.

    Attributes:
        index: of the completion, 0 to n - 1.
        text: new text; a possible stop text or incomplete character is held back.
        token_ids: new tokens.
        logprobs: one entry a new token, if requested.
        finish_reason: None while it runs; "stop", "length", "abort" or "error".
        stop_reason: the stop text or stop token id that ended it; None for an end token of the model.
        num_cached_tokens: prompt tokens found in the prefix cache.
        started_at: `time.monotonic()` when the engine first scheduled the request; 0 where that is not known.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = []
    logprobs: Sequence[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    started_at: float = 0.0


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One whole completion; fields as in `OutputDelta`."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class RequestOutput(msgspec.Struct, kw_only=True):
    """The completions of a request.

    Attributes:
        request_id: given by the caller or the engine.
        prompt: the text, when the prompt was given as one.
        prompt_token_ids: the prompt's tokens.
        outputs: n completions, by index.
        num_cached_tokens: prompt tokens found in the prefix cache.
        error: ended the request early; None without one.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    error: Exception | None = None
