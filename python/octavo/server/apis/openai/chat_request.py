"""The body of `POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from octavo.errors import InvalidRequest
from octavo.sampling_params import MAX_LOGPROBS
from octavo.server.apis.openai.sampling_fields import SamplingFields
from octavo.server.request.decoding import REFUSED, doc

__all__ = ["ChatCompletionRequest"]


class ChatCompletionRequest(SamplingFields, kw_only=True):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[
        list[dict[str, Any]] | None, doc("The conversation. Contents are texts, or lists of parts of type text.")
    ] = None
    logprobs: Annotated[bool | None, doc("Return log probabilities of the output's tokens.")] = None
    top_logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None,
        doc("Number of likeliest tokens to return at each position. Requires `logprobs`."),
    ] = None
    echo: Annotated[
        bool | None, doc("Begin the output with the prompt; in chats with the assistant's last message.")
    ] = None
    add_generation_prompt: Annotated[
        bool | None, doc("Let the template open the reply. Default: true, unless the last message is continued.")
    ] = None
    continue_final_message: Annotated[bool | None, doc("Continue the last message where it ends.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, doc("Variables for the model's chat template.")] = None
    documents: Annotated[list[dict[str, Any]] | None, doc("Documents for templates that use them.")] = None
    reasoning_effort: Annotated[
        Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None,
        doc("How much the model should think, if its template supports that."),
    ] = None
    parallel_tool_calls: Annotated[bool | None, doc("Ignored: tool calls are not supported.")] = None
    tools: Annotated[list[Any] | None, doc("Refused unless `tool_choice` is none.")] = None
    tool_choice: Annotated[Any, doc('"none" replies in text even if there are tools.')] = None
    # Known and not supported.
    chat_template: Annotated[str | None, REFUSED] = None
    functions: Annotated[list[Any] | None, REFUSED] = None
    function_call: Annotated[Any, REFUSED] = None

    def check(self) -> None:
        """Refuse what contradicts itself or is not supported."""
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
        """Number of likeliest tokens at each position; None without log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None
