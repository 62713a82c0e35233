"""The response objects of OpenAI's API, in the field order that vLLM's clients see."""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from octavo.engine.outputs import TokenLogprobs
from octavo.server.observability.request_record import RequestRecord

__all__ = [
    "LOWEST_LOGPROB",
    "AssistantMessage",
    "ChatChoice",
    "ChatCompletion",
    "ChatLogprobWriter",
    "ChatLogprobs",
    "Completion",
    "CompletionChoice",
    "CompletionLogprobWriter",
    "CompletionLogprobs",
    "PositionLogprobs",
    "Usage",
    "finish_reason",
    "mean_logprob",
    "usage_of",
]

# JSON has no infinity; this is what OpenAI's clients expect of an impossible token.
LOWEST_LOGPROB = -9999.0

TokenBytes = Callable[[int], bytes]


class PromptTokensDetails(msgspec.Struct):
    """`usage.prompt_tokens_details`."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """`usage`, in tokens."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TokenLogprob(msgspec.Struct):
    """A token and its log probability."""

    token: str
    logprob: float
    bytes: list[int]


class PositionLogprobs(TokenLogprob):
    """The token at one position of a chat completion, and the likeliest tokens there."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct):
    """`logprobs` of a chat completion's choice: one entry a token."""

    content: list[PositionLogprobs]


class CompletionLogprobs(msgspec.Struct):
    """`logprobs` of a text completion's choice: parallel lists. Offsets index the choice's text."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class AssistantMessage(msgspec.Struct):
    """`message` of a choice, with every key that clients of several servers look for."""

    role: Literal["assistant"]
    content: str
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    reasoning: None = None
    reasoning_content: None = None


class ChatChoice(msgspec.Struct):
    """One choice of a chat completion."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None


class ChatCompletion(msgspec.Struct):
    """The response of `POST /v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    service_tier: None
    system_fingerprint: str
    usage: Usage
    prompt_logprobs: None
    prompt_token_ids: list[int] | None
    kv_transfer_params: None


class CompletionChoice(msgspec.Struct):
    """One choice of a text completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None
    prompt_logprobs: None
    prompt_token_ids: list[int] | None


class Completion(msgspec.Struct):
    """The response of `POST /v1/completions`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    service_tier: None
    system_fingerprint: str
    usage: Usage
    kv_transfer_params: None


def usage_of(record: RequestRecord) -> Usage:
    """The usage of a response so far."""
    return Usage(
        record.prompt_tokens,
        record.prompt_tokens + record.completion_tokens,
        record.completion_tokens,
        PromptTokensDetails(record.cached_tokens),
    )


def finish_reason(reason: str | None) -> str | None:
    """A finish reason in OpenAI's terms, which have none for an aborted choice."""
    return "length" if reason == "abort" else reason


def mean_logprob(entries: Sequence[TokenLogprobs]) -> float:
    """Mean log probability of tokens; the lowest value without tokens."""
    if not entries:
        return LOWEST_LOGPROB
    return sum(_clamp(entry.logprob) for entry in entries) / len(entries)


def _clamp(logprob: float) -> float:
    if math.isnan(logprob):
        raise RuntimeError("the model gave a log probability that is not a number")
    return max(logprob, LOWEST_LOGPROB)


class _LogprobWriter:
    def __init__(self, token_bytes: TokenBytes, as_ids: bool) -> None:
        self._token_bytes = token_bytes
        self._as_ids = as_ids

    def _token(self, token_id: int) -> tuple[str, bytes]:
        raw = self._token_bytes(token_id)
        return (f"token_id:{token_id}" if self._as_ids else raw.decode("utf-8", "replace")), raw


class ChatLogprobWriter(_LogprobWriter):
    """Writes log probabilities as chat completions return them."""

    def __call__(self, entries: Sequence[TokenLogprobs]) -> ChatLogprobs:
        """The log probabilities of tokens."""
        return ChatLogprobs(
            [
                PositionLogprobs(
                    *self._entry(entry.token_id, entry.logprob),
                    top_logprobs=[TokenLogprob(*self._entry(*top)) for top in entry.top],
                )
                for entry in entries
            ]
        )

    def _entry(self, token_id: int, logprob: float) -> tuple[str, float, list[int]]:
        text, raw = self._token(token_id)
        return text, _clamp(logprob), list(raw)


class CompletionLogprobWriter(_LogprobWriter):
    r"""Writes log probabilities as text completions return them.

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

    def __call__(self, entries: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """The log probabilities of tokens; each top holds the chosen token too."""
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
        return CompletionLogprobs(offsets, logprobs, tokens, tops)

    def _name(self, token_id: int) -> str:
        text, raw = self._token(token_id)
        if self._as_ids or raw.decode("utf-8", "ignore").encode() == raw:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
