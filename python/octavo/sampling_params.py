"""What a request asks of the sampling, under the names that vLLM's users know."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from octavo.errors import InvalidRequest

__all__ = ["MAX_LOGPROBS", "MAX_STOPS", "SamplingParams"]

MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_N = 128
_SEED_LIMIT = 1 << 63


def _refuse(field: str, value: object, remedy: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {ascii(value)[:200]} {remedy}", field)


def _is_unicode(text: str) -> bool:
    """Whether the text can be written as UTF-8: no halves of characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How one request is sampled and when it stops.

    Attributes:
        n: answers to the one prompt.
        temperature: 0 takes the likeliest token (ties: the lowest id); below 1e-5 counts as 0.
        top_p: keep the smallest set of tokens whose probability reaches this.
        top_k: keep the k likeliest tokens; -1 or 0 keeps all.
        min_p: keep tokens at least this share as likely as the likeliest.
        seed: makes the answer reproducible; drawn by the engine when None.
        max_tokens: output tokens at most; up to the context's end when None.
        min_tokens: no stop before this many output tokens.
        stop: texts that end the answer; left out of it unless include_stop_str_in_output.
        stop_token_ids: tokens that end the answer, besides the model's own.
        ignore_eos: go on after the model's end tokens.
        repetition_penalty: above 1 makes tokens of prompt and output less likely (divides positive logits).
        presence_penalty: taken off the logit of each token already in the output.
        frequency_penalty: taken off the logit for each time the token is in the output.
        logprobs: log probabilities of the chosen token and of this many likeliest; None for none.
        skip_special_tokens: leave control tokens out of the text.
        priority: under the `priority` policy, lower is sooner.
        cache_salt: requests share cached prefixes only with those of the same salt.
        structured_outputs: what the answer is held to, one of `{"json": schema}`, `{"regex": ...}`,
            `{"choice": [...]}`, `{"grammar": ...}`, `{"json_object": True}`. For engines that say they can; Octavo's
            own refuses it.

    The numbers are checked at construction, and again when a request is submitted.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    skip_special_tokens: bool = True
    priority: int = 0
    cache_salt: str = ""
    structured_outputs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        """Take one stop text for a list of one, None for none, and check the values."""
        stop: Any = self.stop
        self.stop = [stop] if isinstance(stop, str) else list(stop or ())
        self.stop_token_ids = list(self.stop_token_ids or ())
        self.validate()

    def validate(self) -> None:
        """Refuse values out of range.

        Raises:
            InvalidRequest: naming the field, its value and the remedy.
        """
        self._check_integer("n", 1, MAX_N)
        self._check_number("temperature", 0.0, 1e4)
        if self._check_number("top_p", 0.0, 1.0) == 0.0:
            raise _refuse("top_p", self.top_p, "keeps no token; use a value in (0, 1]")
        self._check_integer("top_k", -1, 1 << 30)
        self._check_number("min_p", 0.0, 1.0)
        if self.seed is not None:
            self._check_integer("seed", -_SEED_LIMIT, _SEED_LIMIT - 1)
        if self.max_tokens is not None:
            self._check_integer("max_tokens", 1, 1 << 30)
        self._check_integer("min_tokens", 0, 1 << 30)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _refuse("min_tokens", self.min_tokens, f"is more than max_tokens ({self.max_tokens})")
        if len(self.stop) > MAX_STOPS:
            raise _refuse("stop", len(self.stop), f"texts are too many; give {MAX_STOPS} at most")
        for text in self.stop:
            if not isinstance(text, str) or not text or not _is_unicode(text):
                raise _refuse("stop", text, "is not a text of one character or more")
        if len(self.stop_token_ids) > MAX_STOPS:
            raise _refuse("stop_token_ids", len(self.stop_token_ids), f"ids are too many; give {MAX_STOPS} at most")
        for token in self.stop_token_ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 1 << 31:
                raise _refuse("stop_token_ids", token, "is not a token id")
        if self._check_number("repetition_penalty", 0.0, 1e3) == 0.0:
            raise _refuse("repetition_penalty", self.repetition_penalty, "must be above 0; 1 is neutral")
        self._check_number("presence_penalty", -2.0, 2.0)
        self._check_number("frequency_penalty", -2.0, 2.0)
        if self.logprobs is not None:
            self._check_integer("logprobs", 0, MAX_LOGPROBS)
        self._check_integer("priority", -(1 << 31), (1 << 31) - 1)
        salt: Any = self.cache_salt
        if not isinstance(salt, str) or len(salt) > 128 or "\0" in salt or not _is_unicode(salt):
            raise _refuse("cache_salt", salt, "is not a text of at most 128 characters without NUL")
        for field in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if type(getattr(self, field)) is not bool:
                raise _refuse(field, getattr(self, field), "is neither True nor False")

    def _check_number(self, field: str, low: float, high: float) -> float:
        value: Any = getattr(self, field)
        if type(value) is float and low <= value <= high:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise _refuse(field, value, "is not a finite number")
        if not low <= value <= high:
            raise _refuse(field, value, f"is not between {low:g} and {high:g}")
        return float(value)

    def _check_integer(self, field: str, low: int, high: int) -> None:
        value: Any = getattr(self, field)
        if type(value) is int and low <= value <= high:
            return
        if isinstance(value, bool) or not isinstance(value, int):
            raise _refuse(field, value, "is not a whole number")
        if not low <= value <= high:
            raise _refuse(field, value, f"is not between {low} and {high}")
