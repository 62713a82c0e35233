"""The response objects of OpenAI's API, in the field order that vLLM's clients see."""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Sequence
from typing import Any

from octavo.engine.outputs import TokenLogprobs
from octavo.server.observability.request_record import RequestRecord

__all__ = [
    "LOWEST_LOGPROB",
    "ChatLogprobs",
    "CompletionLogprobs",
    "assistant_message",
    "finish_reason",
    "mean_logprob",
    "usage_of",
]

# JSON has no infinity; this is what OpenAI's clients expect of an impossible token.
LOWEST_LOGPROB = -9999.0

TokenBytes = Callable[[int], bytes]


def usage_of(record: RequestRecord) -> dict[str, Any]:
    """`usage` of a response so far, in tokens."""
    return {
        "prompt_tokens": record.prompt_tokens,
        "total_tokens": record.prompt_tokens + record.completion_tokens,
        "completion_tokens": record.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": record.cached_tokens},
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
    r"""Log probabilities as completions give them: parallel lists. Offsets index the text of the completion.

    A token that is not UTF-8 by itself is written `bytes:\xNN...`, as OpenAI's completions write it.

    Args:
        token_bytes: a token's bytes.
        as_ids: write tokens as `token_id:N`.
        is_hidden: whether a token is left out of the text.
        start: characters of the text before the first token.
    """

    def __init__(self, token_bytes: TokenBytes, as_ids: bool, is_hidden: Callable[[int], bool], start: int = 0) -> None:
        super().__init__(token_bytes, as_ids)
        self._is_hidden = is_hidden
        self._offset = start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def __call__(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """`{text_offset, token_logprobs, tokens, top_logprobs}`; each top holds the chosen token too."""
        offsets, logprobs, tokens, tops = [], [], [], []
        for entry in entries:
            token_id, logprob = entry.token_id, _clamp(entry.logprob)
            offsets.append(self._offset)
            if not self._is_hidden(token_id):
                self._offset += len(self._decoder.decode(self._token_bytes(token_id)))
            tokens.append(self._name(token_id))
            logprobs.append(logprob)
            top: dict[str, float] = {}
            # The chosen token keeps its name; of others that are written alike, the later ones are given by id.
            for other, value in [(token_id, logprob), *(pair for pair in entry.top if pair[0] != token_id)]:
                name = self._name(other)
                top[f"token_id:{other}" if name in top else name] = _clamp(value)
            tops.append(dict(sorted(top.items(), key=lambda item: -item[1])))
        return {"text_offset": offsets, "token_logprobs": logprobs, "tokens": tokens, "top_logprobs": tops}

    def _name(self, token_id: int) -> str:
        text, raw = self._token(token_id)
        if self._as_ids or raw.decode("utf-8", "ignore").encode() == raw:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
