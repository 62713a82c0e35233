"""What a request gives back."""

from __future__ import annotations

import msgspec

__all__ = ["CompletionOutput", "OutputDelta", "RequestOutput", "TokenLogprobs"]


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log probabilities at one output position.

    Attributes:
        token_id: the token chosen.
        logprob: its log probability, before penalties and temperature.
        top: (token id, log probability) of the likeliest, best first; as many as asked for, or as can be drawn.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


class OutputDelta(msgspec.Struct, kw_only=True):
    """What one step, or a few, added to one answer of a request.

    Attributes:
        index: which of the request's n answers.
        text: new text; what may still turn out to be a stop text or half a character is held back.
        token_ids: new tokens.
        logprobs: one entry a new token, when asked for.
        finish_reason: None while it runs; "stop", "length", "abort" or "error".
        stop_reason: the stop text or stop token id that ended it; None for an end token of the model.
        num_cached_tokens: prompt tokens found in the prefix cache.
        started_at: `time.monotonic()` when the engine first scheduled the request; 0 where that is not known.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    started_at: float = 0.0


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One whole answer; fields as in `OutputDelta`."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class RequestOutput(msgspec.Struct, kw_only=True):
    """A request's answers.

    Attributes:
        request_id: given by the caller or the engine.
        prompt: the text, when the prompt was given as one.
        prompt_token_ids: the prompt's tokens.
        outputs: n answers, by index.
        num_cached_tokens: prompt tokens found in the prefix cache.
        error: what ended the request before its answers were complete; None for nothing.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    error: Exception | None = None
