"""Events of a request's output, the same for every API and output parser."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from octavo.engine.outputs import OutputDelta, TokenLogprobs

__all__ = ["OutputEvent", "OutputParser", "text_events"]


class OutputEvent(msgspec.Struct):
    """An addition to one choice of a request.

    Attributes:
        choice: index over all prompts: prompt * n + completion.
        text: new text of the reply.
        token_ids: new tokens.
        logprobs: one entry a new token, if asked for.
        finish_reason: of the choice's last event: "stop", "length", "abort" or "error"; None before.
        stop_reason: stop text or stop token id that ended the choice; None for an end token of the model.
    """

    choice: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: Sequence[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


OutputParser = Callable[[int, OutputDelta], Sequence[OutputEvent]]
"""Turns what the engine adds to a choice, by its index, into events. It may keep text back until a later call."""


def text_events(choice: int, delta: OutputDelta) -> Sequence[OutputEvent]:
    """Without a parser, all output is text of the reply."""
    return (OutputEvent(choice, delta.text, delta.token_ids, delta.logprobs, delta.finish_reason, delta.stop_reason),)
