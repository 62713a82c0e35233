"""Anthropic's API: `POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.routing import BaseRoute, Route

from octavo.errors import InvalidRequest
from octavo.sampling_params import MAX_STOPS, SamplingParams
from octavo.server.apis.openai.chat_request import ChatCompletionRequest
from octavo.server.models.model_handle import ModelHandle
from octavo.server.observability.request_record import RequestRecord
from octavo.server.request.decoding import REFUSED, RequestBody, convert, decode, doc, unsupported
from octavo.server.request.endpoint import Endpoint, RequestContext
from octavo.server.request.field_renames import renamed_errors
from octavo.server.request.generation import Choice, collect, generate
from octavo.server.request.limits import check_messages
from octavo.server.request.messages import render, template_variables
from octavo.server.request.output_events import OutputEvent
from octavo.server.request.stream import StreamWriter, write_stream
from octavo.server.transport.http import ErrorFormat

if TYPE_CHECKING:
    from octavo.server.state import ServerState

__all__ = ["CountTokensRequest", "InputTokens", "Message", "MessagesRequest", "count_tokens", "messages", "routes"]

_encode = msgspec.json.Encoder().encode
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_FORMAT = "output_config.format"
# Thinking of earlier turns is left out of the prompt.
_THOUGHTS = ("thinking", "redacted_thinking")


class _Errors(ErrorFormat):
    """`{"type": "error", "error": {"type", "message"}}`, also as the last event of a stream."""

    def body(self, status: int, error: dict[str, Any]) -> Any:
        """The JSON value of the error."""
        kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": error["message"]}}

    def last_event(self, status: int, error: dict[str, Any]) -> bytes:
        """The last event of a stream that fails."""
        return _event("error", self.body(status, error))


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind} | fields))


class Thinking(msgspec.Struct, kw_only=True):
    """`thinking`."""

    type: str
    budget_tokens: int | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    """`output_config.format`."""

    type: Literal["json_schema"]
    schema: Annotated[dict[str, Any], doc("A JSON schema.")]


class OutputConfig(msgspec.Struct, kw_only=True):
    """`output_config`."""

    format: Annotated[OutputFormat | None, doc("Format of the output: JSON, or a JSON schema.")] = None


class CountTokensRequest(RequestBody, kw_only=True):
    """The body of `POST /v1/messages/count_tokens`."""

    messages: Annotated[
        list[dict[str, Any]], doc("The conversation. Contents are texts, or lists of parts of type text.")
    ]
    model: Annotated[str | None, doc("A name that `/v1/models` lists. Default: the server's first.")] = None
    system: Annotated[str | list[dict[str, Any]] | None, doc("The system message.")] = None
    tools: Annotated[list[Any] | None, doc("Refused unless `tool_choice` is none.")] = None
    tool_choice: Annotated[
        dict[str, Any] | None, doc('`{"type": "none"}` replies in text even if there are tools.')
    ] = None
    thinking: Annotated[
        Thinking | None, doc("`disabled`, for templates that support thinking. Other types are refused.")
    ] = None

    def check(self) -> None:
        """Refuse an empty list of messages, and tools."""
        if not self.messages:
            raise InvalidRequest("messages: the list is empty; give at least one message", "messages")
        if self.tools and (self.tool_choice or {}).get("type") != "none":
            raise InvalidRequest(
                "tools: tool calls are not supported; remove the field, or send tool_choice: "
                '{"type": "none"} for a reply in text',
                "tools",
            )

    def conversation(self) -> list[dict[str, Any]]:
        """The system text and the messages, each with one text.

        Raises:
            InvalidRequest: a block that is not text, or an unknown role.
        """
        flat = []
        if self.system is not None:
            flat.append({"role": "system", "content": _text(self.system, "system")})
        for index, message in enumerate(self.messages):
            place = f"messages[{index}]"
            role = message.get("role")
            if role not in ("user", "assistant", "system"):
                raise InvalidRequest(f"{place}.role: {str(role)[:60]!r} is not user or assistant", f"{place}.role")
            flat.append({"role": role, "content": _text(message.get("content"), f"{place}.content")})
        return flat


class MessagesRequest(CountTokensRequest, kw_only=True):
    """The body of `POST /v1/messages`."""

    max_tokens: Annotated[Annotated[int, Meta(ge=1, le=1 << 30)], doc("Maximum number of output tokens.")]
    stream: Annotated[bool | None, doc("Send the output as it is generated.")] = None
    stop_sequences: Annotated[
        Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(max_length=MAX_STOPS)] | None,
        doc("Texts that end the output."),
    ] = None
    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=2)] | None, doc("0 takes the likeliest token; higher is more varied.")
    ] = None
    top_p: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None, doc("Keep the likeliest tokens that make up this probability.")
    ] = None
    top_k: Annotated[
        Annotated[int, Meta(ge=-1, le=1 << 30)] | None, doc("Keep the k likeliest tokens; -1 keeps all.")
    ] = None
    metadata: Annotated[
        dict[str, Any] | None, doc("`user_id`: an alias of several models always uses the same one for a user.")
    ] = None
    output_config: Annotated[OutputConfig | None, doc("`format` constrains the output to a JSON schema.")] = None
    output_format: Annotated[OutputFormat | None, doc("The older name of `output_config.format`.")] = None
    mcp_servers: Annotated[list[Any] | None, REFUSED] = None

    def check(self) -> None:
        """Refuse thinking and MCP servers too."""
        super().check()
        if self.thinking is not None and self.thinking.type != "disabled":
            raise unsupported("thinking", self.thinking.type, "thinking blocks are not available")
        if self.mcp_servers:
            raise unsupported("mcp_servers", f"{len(self.mcp_servers)} servers", "MCP servers are not available")

    @property
    def held_to(self) -> OutputFormat | None:
        """The format that constrains the output."""
        own = None if self.output_config is None else self.output_config.format
        return self.output_format if own is None else own

    def sampling_params(self, model: ModelHandle, defaults: Mapping[str, Any]) -> SamplingParams:
        """The sampling parameters; errors name the fields of this API."""
        fields: dict[str, Any] = {
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }
        if self.held_to is not None:
            fields["response_format"] = {"type": "json_schema", "schema": self.held_to.schema}
        with renamed_errors({"stop": "stop_sequences", "response_format": _FORMAT}):
            return convert(ChatCompletionRequest, fields).sampling_params(
                model, max_tokens=None, logprobs=None, defaults=defaults
            )


def _text(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{place}: must be a string or a list of blocks", place)
    texts = []
    for index, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else type(block).__name__
        if kind in _THOUGHTS:
            continue
        text = block.get("text") if isinstance(block, dict) else None
        if kind != "text" or not isinstance(text, str):
            where = f"{place}[{index}]"
            raise InvalidRequest(
                f"{where}: a block of type {str(kind)[:60]!r} is not supported; send blocks of type 'text'", where
            )
        texts.append(text)
    return "\n".join(texts)


def routes(state: ServerState) -> list[BaseRoute]:
    """The routes of Anthropic's API."""
    errors = _Errors()
    return [
        Route("/v1/messages", Endpoint(state, messages, errors), methods=["POST"]),
        Route("/v1/messages/count_tokens", Endpoint(state, count_tokens, errors), methods=["POST"]),
    ]


def _is_begun(flat: list[dict[str, Any]]) -> bool:
    """Whether the model continues the last message, which is the assistant's."""
    return flat[-1]["role"] == "assistant" and "tool_calls" not in flat[-1]


async def _prompt(context: RequestContext, model: ModelHandle, request: CountTokensRequest) -> list[int]:
    flat = request.conversation()
    effort = "none" if request.thinking is not None and request.thinking.type == "disabled" else None
    return await render(
        model, flat, continue_final_message=_is_begun(flat), variables=template_variables(None, None, effort)
    )


async def count_tokens(context: RequestContext) -> None:
    """Count the tokens of a prompt."""
    request = decode(CountTokensRequest, context.body)
    context.reply.headers.append((b"request-id", context.request_id.encode()))
    check_messages(request.messages, context.state.settings)
    model = await context.route(request.model)
    await context.reply.json(InputTokens(len(await _prompt(context, model, request))))


async def messages(context: RequestContext) -> None:
    """Complete a conversation, whole or streamed."""
    request = decode(MessagesRequest, context.body)
    context.reply.headers.append((b"request-id", context.request_id.encode()))
    check_messages(request.messages, context.state.settings)
    user = (request.metadata or {}).get("user_id")
    model = await context.route(request.model, user=user)
    params = request.sampling_params(model, context.sampling_defaults(model))
    params.begins_text = not _is_begun(request.conversation())
    await context.constrain(model, params.structured_outputs, _FORMAT)
    prompt = await _prompt(context, model, request)
    model.check_length(prompt, "messages")
    record = context.record(model, len(prompt))
    if request.stream:
        writer = _MessageStream(context, model, record)

        def push(_: int, text: bytes) -> bool:
            return not text or context.reply.try_event(writer.text(text.decode()))

        await write_stream(context, generate(context, model, [prompt], params, record, push=push), writer)
        return
    choice = (await collect(generate(context, model, [prompt], params, record, whole=True), 1))[0]
    reason, sequence = _stop(choice)
    await context.reply.json(
        _message(context, model, [TextBlock("text", choice.text)], reason, sequence, _usage(record))
    )


class InputTokens(msgspec.Struct):
    """The response of `POST /v1/messages/count_tokens`."""

    input_tokens: int


class TextBlock(msgspec.Struct):
    """A block of a message's content."""

    type: Literal["text"]
    text: str


class MessageUsage(msgspec.Struct):
    """`usage`. Tokens from the cache are not among the input tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class Message(msgspec.Struct):
    """The response of `POST /v1/messages`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock]
    stop_reason: Literal["end_turn", "stop_sequence", "max_tokens"] | None
    stop_sequence: str | None
    usage: MessageUsage


def _message(
    context: RequestContext,
    model: ModelHandle,
    content: list[TextBlock],
    stop_reason: Literal["end_turn", "stop_sequence", "max_tokens"] | None,
    stop_sequence: str | None,
    usage: MessageUsage,
) -> Message:
    return Message(
        f"msg_{context.request_id}", "message", "assistant", model.name, content, stop_reason, stop_sequence, usage
    )


def _usage(record: RequestRecord) -> MessageUsage:
    return MessageUsage(
        input_tokens=record.prompt_tokens - record.cached_tokens,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=record.cached_tokens,
        output_tokens=record.completion_tokens,
    )


def _stop(choice: Choice) -> tuple[Literal["end_turn", "stop_sequence", "max_tokens"], str | None]:
    if choice.finish_reason != "stop":
        return "max_tokens", None
    if isinstance(choice.stop_reason, str):
        return "stop_sequence", choice.stop_reason
    return "end_turn", None


class _MessageStream(StreamWriter):
    """Events of one message."""

    def __init__(self, context: RequestContext, model: ModelHandle, record: RequestRecord) -> None:
        self._context = context
        self._model = model
        self._record = record
        self._choice = Choice()

    def opening(self) -> bytes:
        """The start of the message and of its text block."""
        message = _message(self._context, self._model, [], None, None, _usage(self._record))
        return (
            _event("message_start", {"message": message})
            + _event("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}})
            + _event("ping", {})
        )

    def event(self, event: OutputEvent) -> bytes:
        """A delta of the text."""
        self._choice.finish_reason, self._choice.stop_reason = event.finish_reason, event.stop_reason
        return self.text(event.text) if event.text else b""

    def text(self, text: str) -> bytes:
        """The event that adds text."""
        return _event("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": text}})

    def closing(self) -> bytes:
        """The end of the text block and of the message."""
        reason, sequence = _stop(self._choice)
        end = {"delta": {"stop_reason": reason, "stop_sequence": sequence}, "usage": _usage(self._record)}
        return _event("content_block_stop", {"index": 0}) + _event("message_delta", end) + _event("message_stop", {})
