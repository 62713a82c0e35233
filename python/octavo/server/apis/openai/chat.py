"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from starlette.routing import BaseRoute, Route

from octavo.server.apis.openai.chat_request import ChatCompletionRequest
from octavo.server.apis.openai.responses import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatLogprobWriter,
    finish_reason,
    usage_of,
)
from octavo.server.models.model_handle import ModelHandle
from octavo.server.observability.request_record import RequestRecord
from octavo.server.request.decoding import decode
from octavo.server.request.endpoint import Endpoint, RequestContext
from octavo.server.request.generation import Choice, collect, generate, generate_nothing
from octavo.server.request.limits import check_messages
from octavo.server.request.messages import flatten, render, template_variables
from octavo.server.request.output_events import OutputEvent
from octavo.server.request.sse import ChunkWriter
from octavo.server.request.stream import StreamWriter, write_stream
from octavo.server.request.structured_outputs import constraint_field

if TYPE_CHECKING:
    from octavo.server.state import ServerState

__all__ = ["chat_completions", "routes"]


def routes(state: ServerState) -> list[BaseRoute]:
    """`/v1/chat/completions`."""
    return [Route("/v1/chat/completions", Endpoint(state, chat_completions), methods=["POST"])]


async def chat_completions(context: RequestContext) -> None:
    """Complete a conversation, whole or streamed."""
    request = decode(ChatCompletionRequest, context.body)
    check_messages(request.messages, context.state.settings)
    context.timeout = request.timeout
    model = await context.route(request.model, user=request.user, session=request.session_id)
    params = request.sampling_params(
        model, max_tokens=None, logprobs=request.num_logprobs, defaults=context.sampling_defaults(model)
    )
    params.begins_text = not request.continue_final_message
    await context.constrain(model, params.structured_outputs, constraint_field(request) or "")
    messages = flatten(request.messages)
    prompt = await render(
        model,
        messages,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        add_special_tokens=request.add_special_tokens,
        variables=template_variables(request.chat_template_kwargs, request.documents, request.reasoning_effort),
    )
    prompt = request.truncate(prompt, model.max_model_len, params.max_tokens)
    model.check_length(prompt, "messages")
    echo = messages[-1]["content"] if request.echo and messages[-1]["role"] == "assistant" else ""
    to_logprobs = await _logprobs(model, request)
    record = context.record(model, len(prompt))
    response_id = request.response_id("chatcmpl", context.request_id, context.header(b"x-request-id"))
    chunks = ChunkWriter(
        response_id, "chat.completion.chunk", model.name, model.version, null_usage=request.include_usage
    )
    writer = _ChatStream(request, chunks, prompt, params.n, record, to_logprobs, echo)

    def push(choice: int, text: bytes) -> bool:
        return context.reply.try_event(chunks.chat_text(choice, text.decode()))

    if request.wants_nothing:
        events = generate_nothing(params.n, record)
    else:
        direct = push if request.stream and writer.is_plain else None
        events = generate(context, model, [prompt], params, record, push=direct, whole=not request.stream)
    if request.stream:
        await write_stream(context, events, writer)
        return
    choices = await collect(events, params.n)
    await context.reply.json(
        ChatCompletion(
            id=response_id,
            object="chat.completion",
            created=int(time.time()),
            model=model.name,
            choices=[_choice(index, choice, request, to_logprobs, echo) for index, choice in enumerate(choices)],
            service_tier=None,
            system_fingerprint=model.version,
            usage=usage_of(record),
            prompt_logprobs=None,
            prompt_token_ids=prompt if request.return_token_ids else None,
            kv_transfer_params=None,
        )
    )


async def _logprobs(model: ModelHandle, request: ChatCompletionRequest) -> ChatLogprobWriter | None:
    if not request.logprobs:
        return None
    return ChatLogprobWriter(await model.token_bytes("logprobs"), bool(request.return_tokens_as_token_ids))


def _choice(
    index: int, choice: Choice, request: ChatCompletionRequest, to_logprobs: ChatLogprobWriter | None, echo: str
) -> ChatChoice:
    return ChatChoice(
        index=index,
        message=AssistantMessage("assistant", echo + choice.text),
        logprobs=to_logprobs(choice.logprobs) if to_logprobs else None,
        finish_reason=finish_reason(choice.finish_reason),
        stop_reason=choice.stop_reason,
        token_ids=choice.token_ids if request.return_token_ids else None,
    )


class _ChatStream(StreamWriter):
    """Chunks of a chat completion."""

    def __init__(
        self,
        request: ChatCompletionRequest,
        chunks: ChunkWriter,
        prompt: list[int],
        num_choices: int,
        record: RequestRecord,
        to_logprobs: ChatLogprobWriter | None,
        echo: str,
    ) -> None:
        self._request = request
        self._chunks = chunks
        self._prompt = prompt
        self._num_choices = num_choices
        self._record = record
        self._to_logprobs = to_logprobs
        self._echo = echo
        self.is_plain = not (to_logprobs or request.return_token_ids or request.continuous_usage)

    def opening(self) -> bytes:
        """The role of every choice, then the echo."""
        chunks = []
        shown = self._prompt if self._request.return_token_ids else None
        for delta in [{"role": "assistant", "content": ""}] + ([{"content": self._echo}] if self._echo else []):
            for index in range(self._num_choices):
                choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
                chunks.append(self._chunk(choice, shown))
                shown = None
        return b"".join(chunks)

    def event(self, event: OutputEvent) -> bytes:
        """A chunk, also for tokens whose text is held back, as in vLLM: clients time tokens by chunks."""
        if not (event.text or event.token_ids or event.finish_reason):
            return b""
        if self.is_plain and not event.finish_reason:
            return self._chunks.chat_text(event.choice, event.text)
        choice: dict[str, Any] = {
            "index": event.choice,
            "delta": {"content": event.text},
            "logprobs": self._to_logprobs(event.logprobs) if self._to_logprobs and event.logprobs else None,
            "finish_reason": finish_reason(event.finish_reason),
        }
        if event.finish_reason:
            choice["stop_reason"] = event.stop_reason
        if self._request.return_token_ids:
            choice["token_ids"] = event.token_ids
        return self._chunk(choice)

    def closing(self) -> bytes:
        """The usage, if asked for."""
        return self._chunks.closing(usage_of(self._record) if self._request.include_usage else None)

    def _chunk(self, choice: dict[str, Any], prompt_token_ids: list[int] | None = None) -> bytes:
        return self._chunks.chunk(
            [choice], usage_of(self._record) if self._request.continuous_usage else None, prompt_token_ids
        )
