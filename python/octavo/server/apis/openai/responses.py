"""The response objects of OpenAI's API, in the field order that vLLM's clients see."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from octavo.engine.outputs import TokenLogprobs

__all__ = [
    "LOWEST_LOGPROB",
    "ChatLogprobs",
    "CompletionLogprobs",
    "assistant_message",
    "finish_reason",
    "mean_logprob",
    "usage",
]

# JSON has no infinity; this is what OpenAI's clients expect of an impossible token.
LOWEST_LOGPROB = -9999.0

TokenBytes = Callable[[int], bytes]


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """`usage` of an answer, in tokens."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def assistant_message(content: str) -> dict[str, Any]:
    """The message of a chat answer, with every key that clients of several servers look for."""
    return {
        "role": "assistant",
        "content": content,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": None,
        "reasoning_content": None,
    }


def finish_reason(reason: str | None) -> str | None:
    """A finish reason in OpenAI's words, which have none for an answer that was cut short."""
    return "length" if reason == "abort" else reason


def mean_logprob(entries: Sequence[TokenLogprobs]) -> float:
    """How likely an answer's tokens are on average; the lowest for no tokens."""
    if not entries:
        return LOWEST_LOGPROB
    return sum(_clamp(entry.logprob) for entry in entries) / len(entries)


def _clamp(logprob: float) -> float:
    if math.isnan(logprob):
        raise RuntimeError("the model gave a log probability that is not a number")
    return max(logprob, LOWEST_LOGPROB)


class _Logprobs:
    def __init__(self, token_bytes: TokenBytes, as_ids: bool) -> None:
        self._token_bytes = token_bytes
        self._as_ids = as_ids

    def _token(self, token_id: int) -> tuple[str, bytes]:
        raw = self._token_bytes(token_id)
        return (f"token_id:{token_id}" if self._as_ids else raw.decode("utf-8", "replace")), raw


class ChatLogprobs(_Logprobs):
    """Log probabilities as chat completions give them: one entry a token."""

    def __call__(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """`{"content": [{token, logprob, bytes, top_logprobs}, ...]}`."""
        return {
            "content": [
                {
                    **self._entry(entry.token_id, entry.logprob),
                    "top_logprobs": [self._entry(*top) for top in entry.top],
                }
                for entry in entries
            ]
        }

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, raw = self._token(token_id)
        return {"token": text, "logprob": _clamp(logprob), "bytes": list(raw)}


class CompletionLogprobs(_Logprobs):
    """Log probabilities as completions give them: parallel lists; offsets count the characters of the tokens so far.

    Args:
        start: characters before the first token (the prompt's, when it is echoed).
    """

    def __init__(self, token_bytes: TokenBytes, as_ids: bool, start: int = 0) -> None:
        super().__init__(token_bytes, as_ids)
        self._offset = start

    def __call__(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """`{text_offset, token_logprobs, tokens, top_logprobs}`; each top holds the chosen token too."""
        offsets, logprobs, tokens, tops = [], [], [], []
        for entry in entries:
            text, _ = self._token(entry.token_id)
            offsets.append(self._offset)
            self._offset += len(text)
            tokens.append(text)
            logprobs.append(_clamp(entry.logprob))
            top = {self._token(token_id)[0]: _clamp(logprob) for token_id, logprob in entry.top}
            top.setdefault(text, _clamp(entry.logprob))
            tops.append(top)
        return {"text_offset": offsets, "token_logprobs": logprobs, "tokens": tokens, "top_logprobs": tops}
