"""The fields that the request bodies of OpenAI's APIs share, with the extras that vLLM's clients send.

Every field may be null, which means absent; unknown fields are ignored. A field that would change the output and is not
supported is refused rather than ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from octavo.errors import InvalidRequest
from octavo.sampling_params import MAX_N, MAX_STOPS, SamplingParams
from octavo.server.request.decoding import REFUSED, RequestBody, doc, shorten, unsupported
from octavo.server.request.structured_outputs import ResponseFormat, StructuredOutputs, output_constraint

if TYPE_CHECKING:
    from octavo.server.models.model_handle import ModelHandle

__all__ = [
    "Count",
    "SamplingFields",
    "StreamOptions",
    "TokenId",
    "check_token_ids",
]

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")

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

TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
"""An id of the vocabulary."""
Count = Annotated[int, Meta(ge=0, le=1 << 30)]
"""A number of tokens."""
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_STOPS)]
_Stops = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(max_length=MAX_STOPS)]


class StreamOptions(msgspec.Struct, kw_only=True):
    """`stream_options`."""

    include_usage: Annotated[bool | None, doc("End the stream with a chunk of the usage.")] = None
    continuous_usage_stats: Annotated[bool | None, doc("Add the usage so far to every chunk.")] = None


class SamplingFields(RequestBody, kw_only=True):
    """The shared fields. Most have the meaning of `SamplingParams`'."""

    model: Annotated[str | None, doc("A name that `/v1/models` lists. Default: the server's first.")] = None
    stream: Annotated[bool | None, doc("Send the output as it is generated.")] = None
    stream_options: Annotated[StreamOptions | None, doc("What a stream carries besides the output.")] = None
    max_tokens: Annotated[
        Count | None, doc("Maximum number of tokens of each choice. Default: up to the end of the model's context.")
    ] = None
    max_completion_tokens: Annotated[Count | None, doc("Replaces `max_tokens`.")] = None
    n: Annotated[Annotated[int, Meta(ge=1, le=MAX_N)] | None, doc("Number of choices for each prompt.")] = None
    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=2)] | None, doc("0 takes the likeliest token; higher is more varied.")
    ] = None
    top_p: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None, doc("Keep the likeliest tokens that make up this probability.")
    ] = None
    top_k: Annotated[
        Annotated[int, Meta(ge=-1, le=1 << 30)] | None, doc("Keep the k likeliest tokens; -1 keeps all.")
    ] = None
    min_p: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        doc("Keep tokens that are at least this fraction as likely as the likeliest."),
    ] = None
    seed: Annotated[
        Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None, doc("Makes the output reproducible.")
    ] = None
    stop: Annotated[str | _Stops | None, doc("A text, or several, that end the output and are left out of it.")] = None
    stop_token_ids: Annotated[_TokenIds | None, doc("Tokens that end the output, besides the model's own.")] = None
    min_tokens: Annotated[Count | None, doc("Minimum number of tokens before anything ends the output.")] = None
    ignore_eos: Annotated[bool | None, doc("Continue after the model's end tokens, up to `max_tokens`.")] = None
    include_stop_str_in_output: Annotated[bool | None, doc("Keep the stop text at the end of the output.")] = None
    repetition_penalty: Annotated[
        Annotated[float, Meta(gt=0, le=1000)] | None,
        doc("Above 1 makes tokens of the prompt and the output less likely."),
    ] = None
    presence_penalty: Annotated[
        _Penalty | None, doc("Subtracted from the logit of each token that is in the output.")
    ] = None
    frequency_penalty: Annotated[
        _Penalty | None, doc("Subtracted from a token's logit for each time it is in the output.")
    ] = None
    skip_special_tokens: Annotated[bool | None, doc("Leave special tokens out of the text. Default: true.")] = None
    spaces_between_special_tokens: Annotated[bool | None, doc("Ignored: there are none.")] = (
        None  # there are none to leave out
    )
    priority: Annotated[
        Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)] | None,
        doc("Below 0 runs before other requests, above 0 after them, within the limits of the API key."),
    ] = None
    timeout: Annotated[float | None, doc("Maximum number of seconds for the request.")] = None
    cache_salt: Annotated[
        Annotated[str, Meta(max_length=128)] | None,
        doc("Cached prefixes are shared only between requests of the same salt."),
    ] = None
    request_id: Annotated[str | None, doc("Part of the response's `id`.")] = None
    # The user decides only which model of an alias runs the request, so any type will do.
    user: Annotated[Any, doc("An alias of several models always uses the same one for a user.")] = None
    session_id: Annotated[Any, doc("An alias of several models always uses the same one for a session.")] = None
    add_special_tokens: Annotated[
        bool | None,
        doc("Let the tokenizer add its special tokens. Default: false for chats, whose template writes them."),
    ] = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1, le=1 << 30)] | None,
        doc("Keep this many tokens of the prompt; -1 keeps what leaves room for the output."),
    ] = None
    truncation_side: Annotated[
        Literal["left", "right"] | None, doc('"right" keeps the beginning of the prompt. Default: its end is kept.')
    ] = None
    return_token_ids: Annotated[bool | None, doc("Return the token ids of the prompt and the output.")] = None
    return_tokens_as_token_ids: Annotated[bool | None, doc("Write tokens as `token_id:5` in log probabilities.")] = None
    response_format: Annotated[
        ResponseFormat | None,
        doc("Constrains the output; use one such field. `json_object`, or `json_schema` with a schema."),
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None,
        doc("Constrains the output; use one such field. vLLM's: one of json, regex, choice, grammar, json_object."),
    ] = None
    guided_json: Annotated[Any, doc("Constrains the output; use one such field. A JSON schema, or its text.")] = None
    guided_regex: Annotated[
        str | None,
        doc("Constrains the output; use one such field. A regular expression that the whole output matches."),
    ] = None
    guided_choice: Annotated[
        list[str] | None, doc("Constrains the output; use one such field. One of these texts.")
    ] = None
    guided_grammar: Annotated[str | None, doc("Constrains the output; use one such field. A grammar.")] = None
    json_schema: Annotated[Any, doc("Constrains the output; use one such field. A JSON schema.")] = (
        None  # llama.cpp's, as grammar
    )
    grammar: Annotated[
        str | None, doc("Constrains the output; use one such field. A grammar: Lark, or GBNF with a rule `root ::=`.")
    ] = None
    regex: Annotated[
        str | None,
        doc("Constrains the output; use one such field. A regular expression that the whole output matches."),
    ] = None  # SGLang's, as ebnf
    ebnf: Annotated[str | None, doc("Constrains the output; use one such field. A grammar (SGLang's name).")] = None
    logit_bias: Annotated[
        dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None,
        doc("Added to the logits of tokens, by id. -100 bans a token; 100 practically forces it."),
    ] = None
    bad_words: Annotated[
        list[str] | None, doc("Texts that must not be generated, as the tokens that spell them alone or after a space.")
    ] = None
    allowed_token_ids: Annotated[
        list[TokenId] | None, doc("The only tokens that may be sampled, besides the model's end tokens.")
    ] = None
    # Known and not supported: refused when they ask for something.
    prompt_logprobs: Annotated[Annotated[int, Meta(ge=-1, le=1 << 30)] | None, REFUSED] = None
    use_beam_search: Annotated[bool | None, REFUSED] = None
    logits_processors: Annotated[list[Any] | None, REFUSED] = None

    def check(self) -> None:
        """Refuse what contradicts itself or is not supported."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options: allowed only together with stream: true", "stream_options")
        for field in ("use_beam_search", "logits_processors"):
            if getattr(self, field):
                raise unsupported(field, getattr(self, field), "beam search and custom processors are not available")
        if self.prompt_logprobs is not None:
            raise unsupported(
                "prompt_logprobs", self.prompt_logprobs, "log probabilities of the prompt are not available"
            )
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest(
                "truncate_prompt_tokens: 0 leaves no prompt; give 1 or more, or -1 for the model's context",
                "truncate_prompt_tokens",
            )

    def sampling_params(
        self,
        model: ModelHandle,
        *,
        max_tokens: int | None,
        logprobs: int | None,
        defaults: Mapping[str, Any] | None = None,
    ) -> SamplingParams:
        """The sampling parameters: the request's fields, else the model's recommendations, else OpenAI's defaults.

        Args:
            model: the requested model.
            max_tokens: when the request names none.
            logprobs: as `SamplingParams.logprobs`.
            defaults: in place of what the model's makers recommend.

        Raises:
            InvalidRequest: a value out of range, or a constraint that the engine does not support.
        """
        values: dict[str, Any] = dict(model.sampling_defaults if defaults is None else defaults)
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
        limit = model.max_model_len
        if asked is not None and asked > limit:
            raise InvalidRequest(
                f"{field}: {asked} is more than the model's context of {limit} tokens. Please request fewer output "
                "tokens.",
                field,
            )
        if asked == 0 and self.min_tokens:
            raise InvalidRequest(f"min_tokens: {self.min_tokens} is more than {field} (0)", "min_tokens")
        vocab_size = model.engine.model.vocab_size
        check_token_ids(self.stop_token_ids or (), vocab_size, "stop_token_ids")
        values |= self._single_logits(model, vocab_size)
        constraint = output_constraint(self)
        if constraint is not None:
            if not model.constrains_output:
                raise unsupported(constraint.field, constraint.kind, "this model's engine cannot constrain its output")
            if self.min_tokens:
                raise InvalidRequest(
                    f"min_tokens: {self.min_tokens} cannot be guaranteed together with {constraint.field}; remove one "
                    "of the fields",
                    "min_tokens",
                )
            values["structured_outputs"] = constraint.spec
        # The engine generates at least one token; a request for none does not reach it.
        values["max_tokens"] = max_tokens if asked is None else max(asked, 1)
        return SamplingParams(**values, logprobs=logprobs)

    def _single_logits(self, model: ModelHandle, vocab_size: int) -> dict[str, Any]:
        """The fields that change logits of single tokens, for `SamplingParams`."""
        given = {field: getattr(self, field) for field in ("logit_bias", "bad_words", "allowed_token_ids")}
        values = {field: value for field, value in given.items() if value or (value == [] and field != "bad_words")}
        if values and not model.constrains_output:
            field, value = next(iter(values.items()))
            raise unsupported(field, value, "this model's engine cannot change single logits")
        if "logit_bias" in values:
            biases = {_token_id(token): value for token, value in values["logit_bias"].items()}
            check_token_ids(list(biases), vocab_size, "logit_bias")
            values["logit_bias"] = biases
        if "allowed_token_ids" in values:
            check_token_ids(values["allowed_token_ids"], vocab_size, "allowed_token_ids")
        return values

    def truncate(self, prompt: list[int], max_model_len: int, max_tokens: int | None) -> list[int]:
        """The part of a prompt that `truncate_prompt_tokens` keeps: its end, unless `truncation_side` is "right".

        Args:
            prompt: token ids.
            max_model_len: the model's context.
            max_tokens: of the output, for which -1 leaves room.

        Raises:
            InvalidRequest: more than the context.
        """
        keep = self.truncate_prompt_tokens
        if keep is None:
            return prompt
        if keep > max_model_len:
            raise InvalidRequest(
                f"truncate_prompt_tokens: {keep} is more than the model's context of {max_model_len} tokens",
                "truncate_prompt_tokens",
            )
        if keep == -1:
            keep = max(max_model_len - (max_tokens or 1), 1)
        return prompt[:keep] if self.truncation_side == "right" else prompt[-keep:]

    def response_id(self, prefix: str, request_id: str, header: str | None) -> str:
        """The response's `id`: from the request header, else from `request_id`, else a new one."""
        if header is None and self.request_id and _REQUEST_ID.fullmatch(self.request_id):
            return f"{prefix}-{self.request_id}"
        return f"{prefix}-{request_id}"

    @property
    def wants_nothing(self) -> bool:
        """Whether the request asks for no output tokens."""
        asked = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return asked == 0

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk carries the usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


def _token_id(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 11):
        raise InvalidRequest(f"logit_bias: {shorten(text)} is not a token id; use numbers as keys", "logit_bias")
    return int(text)


def check_token_ids(token_ids: Sequence[int], vocab_size: int, field: str) -> None:
    """Refuse ids outside the vocabulary.

    Raises:
        InvalidRequest: naming `field` and such an id.
    """
    for token in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"{field}: token id {token} is outside the vocabulary; ids go from 0 to {vocab_size - 1}", field
            )
