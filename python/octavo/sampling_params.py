"""Sampling parameters of a request, with vLLM's names."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from octavo.errors import InvalidRequest

__all__ = ["MAX_BAD_WORDS", "MAX_LOGIT_BIAS", "MAX_LOGPROBS", "MAX_STOPS", "SamplingParams"]

MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_N = 128
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 256
_MAX_WORD_LENGTH = 256
_OUTPUTS = ("json", "regex", "choice", "grammar", "json_object")
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


def _as_id(token: Any) -> Any:
    """A token id that was written as a text; all else as it is."""
    return int(token) if isinstance(token, str) and token.isascii() and token.isdecimal() and len(token) < 11 else token


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Sampling parameters and stop conditions of one request.

    Attributes:
        n: answers to the one prompt.
        temperature: 0 takes the likeliest token (ties: the lowest id); below 1e-5 counts as 0.
        top_p: keep the smallest set of tokens whose probability reaches this; 0 keeps the likeliest token alone.
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
        begins_text: the output begins a text, as a chat answer does, so the first space is dropped where the tokenizer
            drops a text's first space. When false, the output continues the prompt: prompt and output together are
            the decoded tokens. The `chat` methods set it.
        priority: under the `priority` policy, lower is sooner.
        cache_salt: requests share cached prefixes only with those of the same salt.
        structured_outputs: what the answer is held to, one of `{"json": schema}` (an object, or its text),
            `{"regex": ...}`, `{"choice": [...]}`, `{"grammar": ...}` (Lark, GBNF or EBNF), `{"json_object": True}`.
        logit_bias: added to the logits of single tokens, by id; -100 to 100.
        allowed_token_ids: the only tokens that may be drawn; without an end token among them, answers are as long as
            they may be.
        bad_words: texts whose tokens are never drawn one after the other, with and without a space before them. A text
            that is spelled by other tokens still can come out.

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
    begins_text: bool = False
    priority: int = 0
    cache_salt: str = ""
    structured_outputs: dict[str, Any] | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = []

    def __post_init__(self) -> None:
        """Take one stop text for a list of one, None for none, and check the values."""
        stop: Any = self.stop
        self.stop = [stop] if isinstance(stop, str) else list(stop or ())
        self.stop_token_ids = list(self.stop_token_ids or ())
        words: Any = self.bad_words
        self.bad_words = [words] if isinstance(words, str) else list(words or ())
        if isinstance(self.logit_bias, dict):
            # JSON knows no other keys than texts.
            self.logit_bias = {_as_id(token): value for token, value in self.logit_bias.items()}
        self.validate()

    def validate(self) -> None:
        """Refuse values out of range.

        Raises:
            InvalidRequest: naming the field, its value and the remedy.
        """
        self._check_integer("n", 1, MAX_N)
        self._check_number("temperature", 0.0, 1e4)
        self._check_number("top_p", 0.0, 1.0)
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
        for field in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "begins_text"):
            if type(getattr(self, field)) is not bool:
                raise _refuse(field, getattr(self, field), "is neither True nor False")

        self._check_constraints()

    @property
    def is_constrained(self) -> bool:
        """Whether every token is held to a set of tokens."""
        return self.structured_outputs is not None or self.allowed_token_ids is not None or bool(self.bad_words)

    def _check_constraints(self) -> None:
        if self.structured_outputs is not None:
            self._check_structured_outputs(self.structured_outputs)
        if self.logit_bias is not None:
            self._check_logit_bias(self.logit_bias)
        if self.allowed_token_ids is not None:
            if not isinstance(self.allowed_token_ids, list) or not self.allowed_token_ids:
                raise _refuse("allowed_token_ids", self.allowed_token_ids, "is not a list of one token id or more")
            for token in self.allowed_token_ids:
                if type(token) is not int or not 0 <= token < 1 << 31:
                    raise _refuse("allowed_token_ids", token, "is not a token id")
        if self.bad_words:
            self._check_bad_words()
        if self.min_tokens:
            for field in ("structured_outputs", "allowed_token_ids"):
                if getattr(self, field) is not None:
                    raise _refuse(
                        "min_tokens", self.min_tokens, f"cannot be promised together with {field}; leave one out"
                    )

    @staticmethod
    def _check_structured_outputs(outputs: Any) -> None:
        field = "structured_outputs"
        known = ", ".join(_OUTPUTS)
        if not isinstance(outputs, dict) or len(outputs) != 1 or next(iter(outputs)) not in _OUTPUTS:
            raise _refuse(field, outputs, f"is not an object with exactly one of {known}")
        ((kind, value),) = outputs.items()
        if kind == "json":
            if not isinstance(value, dict | bool | str):
                raise _refuse(
                    field,
                    value,
                    "is no JSON schema; give an object, such as a pydantic class's model_json_schema(), or its text",
                )
        elif kind == "json_object":
            if value is not True:
                raise _refuse(field, value, "is not True, the one value of json_object")
        elif kind == "choice":
            if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
                raise _refuse(field, value, "is not a list of one text or more")
            if not all(text and _is_unicode(text) for text in value):
                raise _refuse(field, value, "has a choice that is not a text of one character or more")
        elif not isinstance(value, str) or not value or not _is_unicode(value):
            raise _refuse(field, value, f"is no {kind}; give a text of one character or more")

    @staticmethod
    def _check_logit_bias(biases: Any) -> None:
        if not isinstance(biases, dict):
            raise _refuse("logit_bias", biases, "is not an object of token ids and numbers")
        if len(biases) > MAX_LOGIT_BIAS:
            raise _refuse("logit_bias", len(biases), f"tokens are too many; give {MAX_LOGIT_BIAS} at most")
        for token, value in biases.items():
            if type(token) is not int or not 0 <= token < 1 << 31:
                raise _refuse("logit_bias", token, "is not a token id")
            if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
                raise _refuse("logit_bias", value, "is not between -100 and 100")

    def _check_bad_words(self) -> None:
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise _refuse("bad_words", len(self.bad_words), f"texts are too many; give {MAX_BAD_WORDS} at most")
        for text in self.bad_words:
            if not isinstance(text, str) or not text.strip() or not _is_unicode(text):
                raise _refuse("bad_words", text, "is not a text with more than spaces")
            if len(text) > _MAX_WORD_LENGTH:
                raise _refuse("bad_words", text, f"is longer than {_MAX_WORD_LENGTH} characters")

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
