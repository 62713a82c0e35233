"""The request bodies of OpenAI's API, with the extras that vLLM's clients send.

Every field may be null, which means absent; unknown fields are ignored. A field that would change the answer and is not
supported is refused rather than ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from octavo.errors import InvalidRequest
from octavo.sampling_params import MAX_LOGPROBS, MAX_N, MAX_STOPS, SamplingParams
from octavo.server.request.decoding import RequestBody, shorten, unsupported
from octavo.server.request.structured_outputs import ResponseFormat, StructuredOutputs, output_constraint

if TYPE_CHECKING:
    from octavo.server.models.model_handle import ModelHandle

__all__ = [
    "ChatCompletionRequest",
    "CompletionRequest",
    "SamplingFields",
    "StreamOptions",
    "TokenId",
    "check_token_ids",
]

MAX_ANSWERS = 1024  # of one request, prompts times n
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
_Count = Annotated[int, Meta(ge=0, le=1 << 30)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_STOPS)]
_Stops = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(max_length=MAX_STOPS)]


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream carries besides the answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(RequestBody, kw_only=True):
    """What both endpoints share; the meaning of most fields is `SamplingParams`'."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 30)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: str | _Stops | None = None
    stop_token_ids: _TokenIds | None = None
    min_tokens: _Count | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=1000)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None  # there are none to leave out
    priority: Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)] | None = None
    timeout: float | None = None
    cache_salt: Annotated[str, Meta(max_length=128)] | None = None
    request_id: str | None = None
    # Who asks: decides nothing but which model of an alias answers, so any type will do.
    user: Any = None
    session_id: Any = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=1 << 30)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: Any = None  # llama.cpp's, as grammar
    grammar: str | None = None
    regex: str | None = None  # SGLang's, as ebnf
    ebnf: str | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[TokenId] | None = None
    # Known and not supported: refused when they ask for something.
    prompt_logprobs: Annotated[int, Meta(ge=-1, le=1 << 30)] | None = None
    use_beam_search: bool | None = None
    logits_processors: list[Any] | None = None

    def check(self) -> None:
        """As `RequestBody.check`."""
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
        """The request's sampling: its own fields, else what the model's makers recommend, else OpenAI's.

        Args:
            model: the model that answers.
            max_tokens: when the request names none.
            logprobs: as `SamplingParams.logprobs`.
            defaults: in place of what the model's makers recommend.

        Raises:
            InvalidRequest: a value out of range, or a constraint that the engine cannot keep.
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
        # The engine makes one token at least; a request for none is answered without it.
        values["max_tokens"] = max_tokens if asked is None else max(asked, 1)
        return SamplingParams(**values, logprobs=logprobs)

    def _single_logits(self, model: ModelHandle, vocab_size: int) -> dict[str, Any]:
        """What changes logits of single tokens, as `SamplingParams` takes it."""
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
            max_tokens: of the answer, for which -1 leaves room.

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

    def answer_id(self, prefix: str, request_id: str, header: str | None) -> str:
        """The answer's `id`: from the request's header, else its body's `request_id`, else a fresh one."""
        if header is None and self.request_id and _REQUEST_ID.fullmatch(self.request_id):
            return f"{prefix}-{self.request_id}"
        return f"{prefix}-{request_id}"

    @property
    def wants_nothing(self) -> bool:
        """Whether no output token is asked for."""
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


class ChatCompletionRequest(SamplingFields, kw_only=True):
    """The body of `POST /v1/chat/completions`."""

    messages: list[dict[str, Any]] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    parallel_tool_calls: bool | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    # Known and not supported.
    chat_template: str | None = None
    functions: list[Any] | None = None
    function_call: Any = None

    def check(self) -> None:
        """As `SamplingFields.check`, and what only a chat has."""
        super().check()
        if self.chat_template is not None:
            raise InvalidRequest(
                "chat_template: only the model's own template is supported; remove the field", "chat_template"
            )
        for field in ("functions", "function_call"):
            if getattr(self, field) is not None:
                raise InvalidRequest(f"{field}: not supported; it is deprecated in favor of tools", field)
        self._check_tools()
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message: cannot be true together with add_generation_prompt", "continue_final_message"
            )
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs: requires logprobs: true", "top_logprobs")

    def _check_tools(self) -> None:
        if self.tools is None:
            if self.tool_choice not in (None, "none"):
                raise InvalidRequest("tool_choice: allowed only together with tools", "tool_choice")
            return
        if not self.tools:
            raise InvalidRequest("tools: the list is empty; give at least one tool, or remove the field", "tools")
        if self.tool_choice != "none":
            raise InvalidRequest(
                "tools: tool calls are not supported; remove the field, or send tool_choice: "
                '"none" for a reply in text',
                "tools",
            )

    @property
    def num_logprobs(self) -> int | None:
        """As `SamplingParams.logprobs`."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(SamplingFields, kw_only=True):
    """The body of `POST /v1/completions`."""

    prompt: str | list[str | int | list[int]] | None = None
    logprobs: Annotated[int, Meta(ge=-1, le=1 << 30)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int, Meta(ge=0, le=20)] | None = None

    def check(self) -> None:
        """As `SamplingFields.check`, and what only a completion has."""
        super().check()
        if self.suffix:
            raise unsupported("suffix", self.suffix, "fill-in-the-middle is not available")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise InvalidRequest(
                f"logprobs: Requested sample logprobs of {self.logprobs}, which is greater than max allowed: "
                f"{MAX_LOGPROBS}",
                "logprobs",
            )
        if self.best_of and self.best_of < (self.n or 1):
            raise InvalidRequest(f"best_of: {self.best_of} is less than n ({self.n or 1})", "best_of")
        if self.stream and self.num_candidates > (self.n or 1):
            raise InvalidRequest("best_of: candidates beyond n cannot be streamed; remove the field", "best_of")
        if self.echo and self.logprobs is not None:
            raise InvalidRequest(
                "echo: together with logprobs it requires log probabilities of the prompt, which are not supported; "
                "remove one of the fields",
                "echo",
            )

    @property
    def num_candidates(self) -> int:
        """Answers generated for each prompt, of which the n best are given."""
        return max(self.best_of or 0, self.n or 1)

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
                raise InvalidRequest(
                    "prompt: strings, token ids and lists of token ids are mixed; use one kind", "prompt"
                )
        if not found or not all(found):
            raise InvalidRequest("prompt: empty; give a string or a list of token ids", "prompt")
        if len(found) * self.num_candidates > MAX_ANSWERS:
            raise InvalidRequest(f"prompt: {len(found)} prompts ask for more than {MAX_ANSWERS} completions", "prompt")
        return found


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
