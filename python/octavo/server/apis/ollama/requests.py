"""The request bodies of Ollama's API, and their conversion to OpenAI's fields.

Unknown options are ignored, as in Ollama. Options that would change the output and are not supported are refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any

from octavo.errors import InvalidRequest
from octavo.sampling_params import SamplingParams
from octavo.server.apis.openai.chat_request import ChatCompletionRequest
from octavo.server.models.model_handle import ModelHandle
from octavo.server.request.decoding import REFUSED, RequestBody, convert, doc
from octavo.server.request.field_renames import renamed_errors

__all__ = ["ChatBody", "GenerateBody", "ModelBody", "parse_keep_alive"]

_SAME = ("temperature", "top_k", "top_p", "min_p", "seed", "presence_penalty", "frequency_penalty", "stop")
_WHOLE = ("seed", "top_k", "num_predict", "num_ctx", "repeat_last_n")
_NO_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_NAMES = {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "response_format": "format",
    "logprobs": "top_logprobs",
    **{field: f"options.{field}" for field in _SAME},
}
# Options of samplers that Ollama's own has had, with the value that leaves each off.
_OTHER_SAMPLERS = {"mirostat": 0, "tfs_z": 1, "typical_p": 1}
_DURATION = re.compile(r"-?(?:\d+(?:\.\d*)?|\.\d+)(?:ns|us|µs|μs|ms|s|m|h)")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_keep_alive(value: float | str | None) -> float | None:
    """Seconds to keep a model for: a number, or a duration such as `5m` or `1h30m`; negative is for ever.

    Raises:
        InvalidRequest: neither of them.
    """
    if value is None:
        return None
    seconds = _seconds(value) if isinstance(value, str) else float(value)
    if not math.isfinite(seconds):
        raise InvalidRequest(
            f"keep_alive: {ascii(value)[:60]} is not a duration; use seconds, or a string such as '5m'", "keep_alive"
        )
    return seconds


def _seconds(text: str) -> float:
    sign, rest = (-1.0, text[1:]) if text.startswith("-") else (1.0, text)
    if rest.isascii() and rest.isdigit() and len(rest) < 16:
        return sign * int(rest)
    total = 0.0
    while rest:
        found = _DURATION.match(rest)
        if found is None or found.group().startswith("-") or len(text) > 64:
            return math.nan
        number = found.group().rstrip("nuµμmsh")
        total += float(number) * _SECONDS[found.group()[len(number) :]]
        rest = rest[found.end() :]
    return sign * total if text.strip("-") else math.nan


class ModelBody(RequestBody, kw_only=True):
    """The fields of every POST route: the model, which older clients call `name`."""

    model: Annotated[str | None, doc("A name that `/v1/models` lists. Default: the server's first.")] = None
    name: str | None = None

    @property
    def model_name(self) -> str:
        """The name of the requested model.

        Raises:
            InvalidRequest: the name is missing.
        """
        name = self.model or self.name
        if not name:
            raise InvalidRequest("model: required field is missing; /api/tags lists the models", "model")
        return name


class _GenerationBody(ModelBody, kw_only=True):
    """The fields that `/api/chat` and `/api/generate` share."""

    stream: Annotated[bool | None, doc("Send the output as it is generated.")] = None
    format: Annotated[str | dict[str, Any] | None, doc("Format of the output: JSON, or a JSON schema.")] = None
    keep_alive: Annotated[
        float | str | None,
        doc("How long the model stays loaded afterwards: seconds, or a duration such as `5m`; negative for ever."),
    ] = None
    options: Annotated[
        dict[str, Any] | None,
        doc("Ollama's options: num_predict, temperature, top_k, top_p, min_p, seed, stop, repeat_penalty and so on."),
    ] = None
    think: Annotated[
        bool | str | None, doc("Whether, or how much, the model should think, if its template supports that.")
    ] = None
    logprobs: Annotated[bool | None, doc("Return log probabilities of the output's tokens.")] = None
    top_logprobs: Annotated[
        int | None, doc("Number of likeliest tokens to return at each position. Requires `logprobs`.")
    ] = None

    def check(self) -> None:
        """Refuse what is not supported.

        Raises:
            InvalidRequest: naming the field.
        """
        for field in _WHOLE:
            _whole((self.options or {}).get(field), f"options.{field}")
        for field, neutral in _OTHER_SAMPLERS.items():
            value = (self.options or {}).get(field)
            if value is not None and value != neutral:
                raise InvalidRequest(
                    f"options.{field}: {ascii(value)[:60]} is not supported; remove the field", f"options.{field}"
                )
        if isinstance(self.think, str) and self.think not in ("low", "medium", "high", "max"):
            raise InvalidRequest(
                f"think: {ascii(self.think)[:60]} is not one of true, false, 'low', 'medium', 'high', 'max'", "think"
            )

    @property
    def keep_alive_seconds(self) -> float | None:
        """Seconds to keep the model loaded; negative for ever, None for the default."""
        return parse_keep_alive(self.keep_alive)

    @property
    def streams(self) -> bool:
        """Whether the response is streamed. Default: true."""
        return self.stream is not False

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables that `think` sets in chat templates."""
        if self.think is None:
            return {}
        thinks = self.think is not False
        variables: dict[str, Any] = {"enable_thinking": thinks, "thinking": thinks}
        if isinstance(self.think, str):
            variables["reasoning_effort"] = self.think
        return variables

    def sampling_params(self, model: ModelHandle, defaults: Mapping[str, Any]) -> SamplingParams:
        """The options as sampling parameters; others take the server's defaults.

        Raises:
            InvalidRequest: an invalid value; `field` names the option.
        """
        given = {key: value for key, value in (self.options or {}).items() if value is not None}
        values: dict[str, Any] = {field: given[field] for field in _SAME if field in given}
        if "repeat_penalty" in given:
            values["repetition_penalty"] = given["repeat_penalty"]
        last = _whole(given.get("repeat_last_n"), "options.repeat_last_n")
        if last == 0:
            values |= _NO_PENALTIES
        elif last is not None:
            _check_last(last, model.max_model_len, {**defaults, **values})
        predict = _whole(given.get("num_predict"), "options.num_predict")
        # Values below 1 or beyond the context set no limit.
        if predict is not None and 0 < predict < model.max_model_len:
            values["max_tokens"] = predict
        for field in ("seed", "top_k"):
            if field in values:
                values[field] = _whole(values[field], f"options.{field}")
        if values.get("top_k", 0) < 0:
            values["top_k"] = -1
        values["logprobs"], values["top_logprobs"] = self.logprobs, self.top_logprobs
        values["response_format"] = _response_format(self.format)
        with renamed_errors(_NAMES):
            fields = convert(ChatCompletionRequest, values)
            return fields.sampling_params(model, max_tokens=None, logprobs=fields.num_logprobs, defaults=defaults)


class ChatBody(_GenerationBody, kw_only=True):
    """The body of `POST /api/chat`."""

    messages: Annotated[
        list[dict[str, Any]] | None, doc("The conversation. Contents are texts, or lists of parts of type text.")
    ] = None
    tools: Annotated[list[Any] | None, REFUSED] = None

    def check(self) -> None:
        """Refuse tools too."""
        super().check()
        if self.tools:
            raise InvalidRequest("tools: tool calls are not supported; remove the field", "tools")

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """The messages in OpenAI's format.

        Raises:
            InvalidRequest: images.
        """
        found = []
        for index, message in enumerate(self.messages or ()):
            _refuse_images(message.get("images"), f"messages[{index}].images")
            plain = {key: value for key, value in message.items() if key != "images" and value is not None}
            if not plain.get("tool_calls"):
                plain.pop("tool_calls", None)
            plain.setdefault("content", "")
            found.append(plain)
        return found


class GenerateBody(_GenerationBody, kw_only=True):
    """The body of `POST /api/generate`."""

    prompt: Annotated[str | None, doc("The text to reply to or to continue.")] = None
    system: Annotated[str | None, doc("The system message.")] = None
    raw: Annotated[bool | None, doc("Send the prompt unchanged, without the chat template.")] = None
    context: Annotated[list[int] | None, doc("Tokens of the conversation so far, from the previous response.")] = None
    suffix: Annotated[str | None, REFUSED] = None
    template: Annotated[str | None, REFUSED] = None
    images: Annotated[list[Any] | None, REFUSED] = None

    def check(self) -> None:
        """Refuse images, suffixes and templates too."""
        super().check()
        _refuse_images(self.images, "images")
        if self.suffix:
            raise InvalidRequest("suffix: not supported; remove the field", "suffix")
        if self.template:
            raise InvalidRequest(
                "template: only the model's own template is supported; set raw to send a prompt unchanged", "template"
            )
        if self.raw and (self.system or self.context):
            field = "system" if self.system else "context"
            raise InvalidRequest(f"{field}: not allowed in raw mode; remove the field", field)

    def history(self, model: ModelHandle) -> list[int]:
        """The tokens of the conversation so far.

        Raises:
            InvalidRequest: an id outside the vocabulary.
        """
        size = int(model.engine.model.vocab_size)
        for token in self.context or ():
            if not 0 <= token < size:
                raise InvalidRequest(f"context: {token} is not a token id of this model", "context")
        return self.context or []


def _refuse_images(images: Any, field: str) -> None:
    if images:
        raise InvalidRequest(f"{field}: images are not supported; remove the field", field)


def _check_last(last: int, max_model_len: int, values: Mapping[str, Any]) -> None:
    """Refuse a window of penalties that is shorter than the context; the engine counts all tokens."""
    if last < -1 or (
        0 < last < max_model_len and any(values.get(name, off) != off for name, off in _NO_PENALTIES.items())
    ):
        raise InvalidRequest(
            f"options.repeat_last_n: {last} is not supported; use -1 (penalties count all tokens) or 0 (no penalties)",
            "options.repeat_last_n",
        )


def _whole(value: Any, field: str) -> int | None:
    """A whole number, which many clients write as 5.0."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        raise InvalidRequest(f"{field}: {ascii(value)[:60]} is not a whole number", field)
    return int(value)


def _response_format(form: str | Mapping[str, Any] | None) -> dict[str, Any] | None:
    if not form:
        return None
    if isinstance(form, str):
        if form != "json":
            raise InvalidRequest(f"format: {ascii(form)[:60]} is neither 'json' nor a JSON schema", "format")
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "format", "schema": form}}
