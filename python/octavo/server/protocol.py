"""The request bodies of OpenAI's API, with the extras that vLLM's clients send.

Every field may be null, which means absent; unknown fields are ignored. A field that would change the answer and is not
supported is refused rather than ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from octavo.errors import InvalidRequest
from octavo.sampling_params import SamplingParams

__all__ = [
    "ChatCompletionRequest",
    "CompletionRequest",
    "RequestBody",
    "SamplingFields",
    "StreamOptions",
    "convert",
    "decode",
]

MAX_ANSWERS = 1024  # of one request, prompts times n

_SAME_NAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "skip_special_tokens",
    "priority",
    "cache_salt",
)


class StreamOptions(msgspec.Struct):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class RequestBody(msgspec.Struct, kw_only=True):
    """Any request's body."""

    def check(self) -> None:
        """Refuse what contradicts itself or is not supported.

        Raises:
            InvalidRequest: naming the field.
        """


class SamplingFields(RequestBody, kw_only=True):
    """What both endpoints share; the meaning of most fields is `SamplingParams`'."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    timeout: float | None = None
    cache_salt: str | None = None
    # Who asks: decides nothing but which model of an alias answers, so any type will do.
    user: Any = None
    session_id: Any = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    # Known and not supported: refused when they ask for something.
    logit_bias: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    prompt_logprobs: Any = None
    truncate_prompt_tokens: Any = None

    def check(self) -> None:
        """Refuse what contradicts itself or is not supported.

        Raises:
            InvalidRequest: naming the field.
        """
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options: is allowed only together with stream: true", "stream_options")
        kind = self.response_format.get("type") if isinstance(self.response_format, dict) else self.response_format
        if kind not in (None, "text"):
            raise _unsupported("response_format", kind)
        for field in (
            "logit_bias",
            "structured_outputs",
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "bad_words",
            "allowed_token_ids",
            "truncate_prompt_tokens",
        ):
            if getattr(self, field) not in (None, {}, [], ""):
                raise _unsupported(field, getattr(self, field))
        if self.prompt_logprobs not in (None, False):
            raise _unsupported("prompt_logprobs", self.prompt_logprobs)

    def sampling_params(
        self, defaults: Mapping[str, Any], *, max_tokens: int | None, logprobs: int | None, max_model_len: int | None
    ) -> SamplingParams:
        """The request's sampling: its own fields, else the model's `defaults`, else OpenAI's.

        Args:
            defaults: from the model's generation_config.
            max_tokens: when the request names none.
            logprobs: as `SamplingParams.logprobs`.
            max_model_len: the model's context; max_tokens above it is refused.

        Raises:
            InvalidRequest: a value out of range.
        """
        values: dict[str, Any] = dict(defaults)
        for field in _SAME_NAME:
            value = getattr(self, field)
            if value is not None:
                values[field] = value
        if self.stop is not None:
            values["stop"] = [self.stop] if isinstance(self.stop, str) else self.stop
        if values.get("seed") == -1:
            del values["seed"]
        asked, field = self.max_completion_tokens, "max_completion_tokens"
        if asked is None:
            asked, field = self.max_tokens, "max_tokens"
        if asked is not None and asked < 1:
            raise InvalidRequest(f"{field}: {asked} is too small; ask for 1 token or more", field)
        if asked is not None and max_model_len is not None and asked > max_model_len:
            raise InvalidRequest(f"{field}: {asked} is more than the model's context of {max_model_len} tokens", field)
        values["max_tokens"] = max_tokens if asked is None else asked
        return SamplingParams(**values, logprobs=logprobs)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk carries the usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class ChatCompletionRequest(SamplingFields, kw_only=True):
    """The body of `POST /v1/chat/completions`."""

    messages: list[dict[str, Any]] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Any = None
    tools: list[Any] | None = None
    tool_choice: Any = None

    def check(self) -> None:
        """As `SamplingFields.check`, and what only a chat has."""
        super().check()
        if self.chat_template is not None:
            raise InvalidRequest("chat_template: the server renders the model's own template only", "chat_template")
        if self.tools and self.tool_choice != "none":
            raise _unsupported("tools", f"{len(self.tools)} tools")
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message: cannot be true together with add_generation_prompt", "continue_final_message"
            )
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs: needs logprobs: true", "top_logprobs")

    @property
    def num_logprobs(self) -> int | None:
        """As `SamplingParams.logprobs`."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(SamplingFields, kw_only=True):
    """The body of `POST /v1/completions`."""

    prompt: str | list[str | int | list[int]] | None = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    def check(self) -> None:
        """As `SamplingFields.check`, and what only a completion has."""
        super().check()
        if self.suffix:
            raise _unsupported("suffix", self.suffix)
        if self.best_of is not None and self.best_of > (self.n or 1):
            raise _unsupported("best_of", self.best_of)
        if self.echo and self.logprobs is not None:
            raise InvalidRequest("echo: together with logprobs is not supported; leave one of them out", "echo")

    def prompts(self) -> list[str | list[int]]:
        """The prompts, a text or its token ids each.

        Raises:
            InvalidRequest: none, too many, an empty one, or a list of mixed kinds.
        """
        given = self.prompt
        if given is None or isinstance(given, str):
            found: list[str | list[int]] = [given or ""]
        elif given and all(isinstance(item, int) for item in given):
            found = [[item for item in given if isinstance(item, int)]]
        else:
            found = [item for item in given if not isinstance(item, int)]
            if len(found) != len(given) or len({isinstance(item, str) for item in found}) > 1:
                raise InvalidRequest("prompt: mixes texts, token ids and lists of token ids; give one kind", "prompt")
        if not found or not all(found):
            raise InvalidRequest("prompt: is empty; give a text or a list of token ids with something in it", "prompt")
        if len(found) * (self.n or 1) > MAX_ANSWERS:
            raise InvalidRequest(f"prompt: {len(found)} prompts ask for more than {MAX_ANSWERS} answers", "prompt")
        return found


Body = TypeVar("Body", bound=RequestBody)

_PATH = re.compile(r" - at `\$\.?([^`]*)`$")


def decode(kind: type[Body], body: bytes) -> Body:
    """Parse and check a request body.

    Raises:
        InvalidRequest: not JSON, not an object, a field of the wrong type or value; `field` names it.
    """
    try:
        request = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _wrong_type(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply") from None
    request.check()
    return request


def convert(kind: type[Body], fields: Mapping[str, Any]) -> Body:
    """As `decode`, from fields that are parsed already.

    Raises:
        InvalidRequest: a field of the wrong type or value; `field` names it.
    """
    try:
        request = msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _wrong_type(error) from None
    request.check()
    return request


def _wrong_type(error: msgspec.ValidationError) -> InvalidRequest:
    message = str(error)
    found = _PATH.search(message)
    field = found.group(1) if found and found.group(1) else None
    reason = _PATH.sub("", message)
    return InvalidRequest(f"{field}: {reason}" if field else reason, field)


def _unsupported(field: str, value: object) -> InvalidRequest:
    shown = repr(value)
    return InvalidRequest(f"{field}: {shown[:60]} is not supported; leave it out", field)
