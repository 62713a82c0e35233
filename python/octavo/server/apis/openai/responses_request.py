"""The body of `POST /v1/responses`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from octavo.errors import InvalidRequest
from octavo.sampling_params import MAX_LOGPROBS
from octavo.server.apis.openai.sampling_fields import SamplingFields
from octavo.server.request.decoding import REFUSED, doc, unsupported
from octavo.server.request.structured_outputs import JsonSchema, ResponseFormat

__all__ = ["ResponsesRequest"]

_INCLUDED_LOGPROBS = "message.output_text.logprobs"
_ROLES = ("system", "developer", "user", "assistant")


class TextFormat(msgspec.Struct, kw_only=True):
    """`text.format`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: Annotated[dict[str, Any] | None, doc("A JSON schema.")] = None
    strict: Annotated[bool | None, doc("Ignored: schemas are always enforced.")] = None


class TextOptions(msgspec.Struct, kw_only=True):
    """`text`."""

    format: Annotated[TextFormat | None, doc("Format of the output: JSON, or a JSON schema.")] = None
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    """`reasoning`."""

    effort: Annotated[
        Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None,
        doc("How much the model should think, if its template supports that."),
    ] = None
    summary: str | None = None


class ResponsesRequest(SamplingFields, kw_only=True):
    """The body of `POST /v1/responses`."""

    input: Annotated[str | list[dict[str, Any]] | None, doc("A text, or a list of messages.")] = None
    instructions: Annotated[str | None, doc("The system message.")] = None
    max_output_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 30)] | None, doc("Maximum number of output tokens.")
    ] = None
    text: Annotated[TextOptions | None, doc("Format of the output.")] = None
    reasoning: Annotated[
        ReasoningOptions | None, doc("`effort`: how much the model should think, if its template supports that.")
    ] = None
    top_logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None,
        doc("Number of likeliest tokens to return at each position."),
    ] = None
    include: Annotated[list[str] | None, doc("`message.output_text.logprobs` adds log probabilities.")] = None
    metadata: Annotated[dict[str, Any] | None, doc("Returned unchanged.")] = None
    store: Annotated[bool | None, REFUSED] = None
    previous_response_id: Annotated[str | None, REFUSED] = None
    conversation: Annotated[Any, REFUSED] = None
    prompt: Annotated[Any, REFUSED] = None
    background: Annotated[bool | None, REFUSED] = None
    truncation: Annotated[Literal["auto", "disabled"] | None, doc('"auto" is not supported.')] = None
    tools: Annotated[list[Any] | None, doc("Refused unless `tool_choice` is none.")] = None
    tool_choice: Annotated[Any, doc('"none" replies in text even if there are tools.')] = None
    parallel_tool_calls: Annotated[bool | None, doc("Ignored: tool calls are not supported.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, doc("Variables for the model's chat template.")] = None

    def check(self) -> None:
        """Refuse what needs stored responses, tools or several choices."""
        # Its one option pads events against those who watch their length, and may come without a stream.
        self.stream_options = None
        if self.max_output_tokens is not None:
            self.max_tokens, self.max_completion_tokens = self.max_output_tokens, None
        if self.text is not None and self.text.format is not None:
            asked = self.text.format
            self.response_format = ResponseFormat(
                type=asked.type,
                json_schema=JsonSchema(name=asked.name, schema=asked.schema) if asked.type == "json_schema" else None,
            )
        super().check()
        remedy = "this server does not store responses"
        if self.previous_response_id is not None:
            raise InvalidRequest(
                f"previous_response_id: {remedy}; send the whole conversation as input", "previous_response_id"
            )
        if self.store:
            raise InvalidRequest(f"store: {remedy}; send store: false", "store")
        if self.conversation is not None:
            raise InvalidRequest(f"conversation: {remedy}; send the whole conversation as input", "conversation")
        if self.background:
            raise InvalidRequest(f"background: {remedy}; remove the field, or stream the response", "background")
        if self.prompt is not None:
            raise InvalidRequest("prompt: prompt templates are not supported; send the text as input", "prompt")
        if self.truncation == "auto":
            raise InvalidRequest(
                'truncation: "auto" is not supported; shorten the input, or send truncate_prompt_tokens: -1',
                "truncation",
            )
        if (self.n or 1) > 1:
            raise InvalidRequest(f"n: {self.n} is not supported; a response has one choice", "n")
        if self.tools and self.tool_choice != "none":
            raise unsupported(
                "tools",
                f"{len(self.tools)} tools",
                'send tool_choice: "none" for a reply in text',
            )

    def conversation_messages(self) -> list[dict[str, Any]]:
        """The instructions and the input as messages, each with one text.

        Raises:
            InvalidRequest: an item that is not a message of text.
        """
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            for index, item in enumerate(self.input or ()):
                # Reasoning of earlier turns is left out of the prompt.
                if item.get("type") != "reasoning":
                    messages.append(_message(item, f"input[{index}]"))
        if not self.input or not messages:
            raise InvalidRequest("input: empty; give a string or a list of messages", "input")
        return messages

    @property
    def num_logprobs(self) -> int | None:
        """Number of likeliest tokens at each position; None without log probabilities."""
        wanted = self.top_logprobs is not None or _INCLUDED_LOGPROBS in (self.include or ())
        return (self.top_logprobs or 0) if wanted else None


def _message(item: dict[str, Any], place: str) -> dict[str, Any]:
    kind = item.get("type") or "message"
    if kind != "message":
        raise InvalidRequest(
            f"{place}.type: {str(kind)[:60]!r} is not supported; send messages of text", f"{place}.type"
        )
    role = item.get("role")
    if role not in _ROLES:
        raise InvalidRequest(f"{place}.role: {str(role)[:60]!r} is not one of {', '.join(_ROLES)}", f"{place}.role")
    content = item.get("content")
    if isinstance(content, list):
        content = "\n".join(_part(part, f"{place}.content[{index}]") for index, part in enumerate(content))
    if not isinstance(content, str):
        raise InvalidRequest(f"{place}.content: must be a string or a list of parts", f"{place}.content")
    return {"role": "system" if role == "developer" else role, "content": content}


def _part(part: Any, place: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    text = part.get("text") if isinstance(part, dict) else None
    if kind not in ("input_text", "output_text", "text") or not isinstance(text, str):
        raise InvalidRequest(
            f"{place}: a part of type {str(kind)[:60]!r} is not supported; send parts of type 'input_text'", place
        )
    return text
