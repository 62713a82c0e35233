"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from starlette.routing import BaseRoute, Route

from octavo.engine.outputs import OutputDelta
from octavo.sampling_params import SamplingParams
from octavo.server.apis.openai.requests import ChatCompletionRequest, decode
from octavo.server.apis.openai.responses import ChatLogprobs, assistant_message, finish_reason, usage
from octavo.server.models.model_handle import ModelHandle
from octavo.server.observability.request_record import RequestRecord
from octavo.server.request.endpoint import Call, Exchange
from octavo.server.request.generation import Answer, collect, pieces
from octavo.server.request.keep_alive import keep_alive
from octavo.server.request.limits import check_messages
from octavo.server.request.messages import flatten, render, template_variables
from octavo.server.request.nothing import no_answers, no_pieces
from octavo.server.request.sse import ChunkWriter
from octavo.server.request.structured_outputs import constraint_field

if TYPE_CHECKING:
    from octavo.server.state import ServerState

__all__ = ["chat_completions", "routes"]


def routes(state: ServerState) -> list[BaseRoute]:
    """`/v1/chat/completions`."""
    return [Route("/v1/chat/completions", Exchange(state, chat_completions), methods=["POST"])]


async def chat_completions(call: Call) -> None:
    """Answer one chat request, whole or streamed."""
    request = decode(ChatCompletionRequest, call.body)
    check_messages(request.messages, call.state.settings)
    call.timeout = request.timeout
    served = await call.route(request.model, user=request.user, session=request.session_id)
    params = request.sampling_params(
        served, max_tokens=None, logprobs=request.num_logprobs, defaults=call.sampling_defaults(served)
    )
    params.begins_text = not request.continue_final_message
    await call.constrain(served, params.structured_outputs, constraint_field(request) or "")
    messages = flatten(request.messages)
    prompt = await render(
        served,
        messages,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        add_special_tokens=request.add_special_tokens,
        variables=template_variables(request.chat_template_kwargs, request.documents, request.reasoning_effort),
    )
    prompt = request.truncate(prompt, served.max_model_len, params.max_tokens)
    served.check_length(prompt, "messages")
    echo = messages[-1]["content"] if request.echo and messages[-1]["role"] == "assistant" else ""
    to_logprobs = await _logprobs(served, request)
    record = call.record(served, len(prompt))
    answer_id = request.answer_id("chatcmpl", call.request_id, call.header(b"x-request-id"))
    if request.stream:
        await _stream(call, served, request, prompt, params, record, answer_id, to_logprobs, echo)
        return
    if request.wants_nothing:
        answers = no_answers(params.n)
        record.finish()
    else:
        answers = await collect(call, served, [prompt], params, record)
    await call.reply.json(
        {
            "id": answer_id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": served.name,
            "choices": [_choice(index, answer, request, to_logprobs, echo) for index, answer in enumerate(answers)],
            "service_tier": None,
            "system_fingerprint": served.version,
            "usage": usage(record.prompt_tokens, record.completion_tokens, record.cached_tokens),
            "prompt_logprobs": None,
            "prompt_token_ids": prompt if request.return_token_ids else None,
            "kv_transfer_params": None,
        }
    )


async def _logprobs(served: ModelHandle, request: ChatCompletionRequest) -> ChatLogprobs | None:
    if not request.logprobs:
        return None
    return ChatLogprobs(await served.token_bytes("logprobs"), bool(request.return_tokens_as_token_ids))


def _choice(
    index: int, answer: Answer, request: ChatCompletionRequest, to_logprobs: ChatLogprobs | None, echo: str
) -> dict[str, Any]:
    return {
        "index": index,
        "message": assistant_message(echo + answer.text),
        "logprobs": to_logprobs(answer.logprobs) if to_logprobs else None,
        "finish_reason": finish_reason(answer.finish_reason),
        "stop_reason": answer.stop_reason,
        "token_ids": answer.token_ids if request.return_token_ids else None,
    }


async def _stream(
    call: Call,
    served: ModelHandle,
    request: ChatCompletionRequest,
    prompt: list[int],
    params: SamplingParams,
    record: RequestRecord,
    answer_id: str,
    to_logprobs: ChatLogprobs | None,
    echo: str,
) -> None:
    reply = call.reply
    writer = ChunkWriter(
        answer_id, "chat.completion.chunk", served.name, served.version, null_usage=request.include_usage
    )
    plain = not (to_logprobs or request.return_token_ids or request.continuous_usage)

    def usage_now() -> dict[str, Any]:
        return usage(record.prompt_tokens, record.completion_tokens, record.cached_tokens)

    def chunk(choice: dict[str, Any], prompt_token_ids: list[int] | None = None) -> bytes:
        return writer.chunk([choice], usage_now() if request.continuous_usage else None, prompt_token_ids)

    def opening() -> bytes:
        chunks = []
        shown = prompt if request.return_token_ids else None
        for delta in [{"role": "assistant", "content": ""}] + ([{"content": echo}] if echo else []):
            for index in range(params.n):
                chunks.append(chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None}, shown))
                shown = None
        return b"".join(chunks)

    def push(choice: int, text: bytes) -> bool:
        return reply.try_event(writer.chat_text(choice, text.decode()))

    def event(choice: int, delta: OutputDelta) -> bytes:
        # As vLLM, a chunk for tokens whose text is still held back: clients time tokens by chunks.
        if not (delta.text or delta.token_ids or delta.finish_reason):
            return b""
        if plain and not delta.finish_reason:
            return writer.chat_text(choice, delta.text)
        shape: dict[str, Any] = {
            "index": choice,
            "delta": {"content": delta.text},
            "logprobs": to_logprobs(delta.logprobs) if to_logprobs and delta.logprobs else None,
            "finish_reason": finish_reason(delta.finish_reason),
        }
        if delta.finish_reason:
            shape["stop_reason"] = delta.stop_reason
        if request.return_token_ids:
            shape["token_ids"] = delta.token_ids
        return chunk(shape)

    source: Any = (
        no_pieces(params.n, record)
        if request.wants_nothing
        else pieces(call, served, [prompt], params, record, push=push if plain else None)
    )
    begun = False
    async with keep_alive(reply, call.state.settings.sse_keep_alive_seconds), aclosing(source):
        async for choice, delta in source:
            # Only the first output proves that the request is sound: until then an error has its own status.
            if not begun:
                begun = True
                if not reply.streaming:
                    await reply.events()
                await reply.event(opening())
            data = event(choice, delta)
            if data:
                await reply.event(data)
    await reply.end_events(writer.chunk([], usage_now()) if request.include_usage else b"")
