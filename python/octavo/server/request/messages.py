"""Messages of a chat request, checked and converted for chat templates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from octavo.errors import InvalidRequest

if TYPE_CHECKING:
    from octavo.server.models.model_handle import ModelHandle

__all__ = ["MAX_MESSAGES", "flatten", "render", "template_variables"]

MAX_MESSAGES = 4096
# What a client's template variables may not stand in for.
_RESERVED = (
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "tools",
    "documents",
)
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def flatten(messages: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Messages whose content is one text each.

    Args:
        messages: OpenAI's; content is a text, null, or a list of parts of type `text` (joined by line breaks, as vLLM
            does). `developer` becomes `system`. The arguments of earlier tool calls become objects.

    Raises:
        InvalidRequest: no messages, too many, an unknown role, a part that is not text; the message names which.
    """
    if not messages:
        raise InvalidRequest("messages: the list is empty; give at least one message", "messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(f"messages: {len(messages)} are more than {MAX_MESSAGES}", "messages")
    return [_flatten_one(message, f"messages[{index}]") for index, message in enumerate(messages)]


def template_variables(
    given: dict[str, Any] | None, documents: list[dict[str, Any]] | None = None, reasoning_effort: str | None = None
) -> dict[str, Any]:
    """The variables of a chat template besides the messages.

    Args:
        given: the client's `chat_template_kwargs`; names that are the server's own are dropped.
        documents: as the template knows them.
        reasoning_effort: told to templates under both names that they read; `given` stands before it.
    """
    variables: dict[str, Any] = {}
    if documents is not None:
        variables["documents"] = documents
    if reasoning_effort is not None:
        variables["reasoning_effort"] = reasoning_effort
        variables["enable_thinking"] = reasoning_effort != "none"
    variables |= {key: value for key, value in (given or {}).items() if key not in _RESERVED}
    return variables


async def render(
    model: ModelHandle,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
    add_special_tokens: bool | None = None,
    variables: dict[str, Any] | None = None,
) -> list[int]:
    """Render flat messages to token ids, with defaults for what the request leaves out.

    A start token that the template wrote and the tokenizer would write again is there once.

    Raises:
        InvalidRequest, ContextLengthExceeded: as `ModelHandle.render`.
    """
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    try:
        prompt = await model.render(
            messages,
            add_special_tokens=bool(add_special_tokens),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=bool(continue_final_message),
            **(variables or {}),
        )
    except RecursionError:
        raise InvalidRequest("messages: are nested too deeply", "messages") from None
    if add_special_tokens:
        start = getattr(model.engine.tokenizer, "bos_token_id", None)
        if start is not None and prompt[:2] == [start, start]:
            return prompt[1:]
    return prompt


def _flatten_one(message: dict[str, Any], place: str) -> dict[str, Any]:
    role = message.get("role")
    if role not in _ROLES:
        raise InvalidRequest(f"{place}.role: {role!r} is not one of {', '.join(_ROLES)}", f"{place}.role")
    flat = {key: value for key, value in message.items() if value is not None}
    flat["role"] = "system" if role == "developer" else role
    flat["content"] = _text(message.get("content"), f"{place}.content")
    calls = message.get("tool_calls")
    if calls is not None:
        flat["tool_calls"] = _tool_calls(calls, f"{place}.tool_calls")
    elif message.get("content") is None:
        raise InvalidRequest(f"{place}.content: is missing; give a text", f"{place}.content")
    return flat


def _text(content: Any, place: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{place}: is neither a text nor a list of parts", place)
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise InvalidRequest(
                f"{place}[{index}]: a part of type {kind!r} is not supported; send parts of type 'text'",
                f"{place}[{index}]",
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _tool_calls(calls: Any, place: str) -> list[Any]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise InvalidRequest(f"{place}: is not a list of tool calls", place)
    parsed = []
    for call in calls:
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                arguments = msgspec.json.decode(function["arguments"] or "{}")
            except (msgspec.DecodeError, RecursionError):
                arguments = function["arguments"]
            call = {**call, "function": {**function, "arguments": arguments}}
        parsed.append(call)
    return parsed
