"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from starlette.routing import BaseRoute, Route

from octavo.engine.outputs import OutputDelta
from octavo.sampling_params import SamplingParams
from octavo.server.exchange import Call, Exchange
from octavo.server.generation import Answer, collect, pieces
from octavo.server.http import Reply
from octavo.server.limits import check_messages
from octavo.server.messages import flatten
from octavo.server.metrics import RequestRecord
from octavo.server.protocol import ChatCompletionRequest, decode
from octavo.server.served import ServedModel
from octavo.server.shapes import ChatLogprobs, usage
from octavo.server.sse import ChunkWriter

if TYPE_CHECKING:
    from octavo.server.state import ServerState

__all__ = ["chat_completions", "routes"]

# What a client's template variables may not stand in for.
_RESERVED = (
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "tools",
)


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
        served.sampling_defaults,
        max_tokens=None,
        logprobs=request.num_logprobs,
        max_model_len=served.max_model_len,
    )
    prompt = await served.render(
        flatten(request.messages),
        add_special_tokens=bool(request.add_special_tokens),
        add_generation_prompt=_generation_prompt(request),
        continue_final_message=bool(request.continue_final_message),
        **_template_variables(request),
    )
    served.check_length(prompt, "messages")
    to_logprobs = await _logprobs(served, request)
    record = call.record(served, len(prompt))
    answer_id = f"chatcmpl-{call.request_id}"
    if request.stream:
        await _stream(call, served, request, prompt, params, record, call.reply, answer_id, to_logprobs)
        return
    answers = await collect(call, served, [prompt], params, record)
    await call.reply.json(
        {
            "id": answer_id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": served.name,
            "choices": [_choice(index, answer, request, to_logprobs) for index, answer in enumerate(answers)],
            "service_tier": None,
            "system_fingerprint": served.version,
            "usage": usage(record.prompt_tokens, record.completion_tokens, record.cached_tokens),
        }
    )


def _generation_prompt(request: ChatCompletionRequest) -> bool:
    if request.add_generation_prompt is None:
        return not request.continue_final_message
    return request.add_generation_prompt


def _template_variables(request: ChatCompletionRequest) -> dict[str, Any]:
    return {key: value for key, value in (request.chat_template_kwargs or {}).items() if key not in _RESERVED}


async def _logprobs(served: ServedModel, request: ChatCompletionRequest) -> ChatLogprobs | None:
    if not request.logprobs:
        return None
    return ChatLogprobs(await served.token_bytes("logprobs"), bool(request.return_tokens_as_token_ids))


def _choice(
    index: int, answer: Answer, request: ChatCompletionRequest, to_logprobs: ChatLogprobs | None
) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": index,
        "message": {"role": "assistant", "content": answer.text, "refusal": None},
        "logprobs": to_logprobs(answer.logprobs) if to_logprobs else None,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
    }
    if request.return_token_ids:
        choice["token_ids"] = answer.token_ids
    return choice


async def _stream(
    call: Call,
    served: ServedModel,
    request: ChatCompletionRequest,
    prompt: list[int],
    params: SamplingParams,
    record: RequestRecord,
    reply: Reply,
    answer_id: str,
    to_logprobs: ChatLogprobs | None,
) -> None:
    writer = ChunkWriter(answer_id, "chat.completion.chunk", served.name)
    plain = not (to_logprobs or request.return_token_ids or request.continuous_usage)

    def usage_now() -> dict[str, Any]:
        return usage(record.prompt_tokens, record.completion_tokens, record.cached_tokens)

    def chunk(choice: dict[str, Any]) -> bytes:
        return writer.chunk([choice], usage_now() if request.continuous_usage else None)

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
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason:
            shape["stop_reason"] = delta.stop_reason
        if request.return_token_ids:
            shape["token_ids"] = delta.token_ids
        return chunk(shape)

    source: Any = pieces(call, served, [prompt], params, record, push=push if plain else None)
    async with aclosing(source):
        async for choice, delta in source:
            # Only the first output proves that the request is sound: until then an error has its own status.
            if not reply.streaming:
                await reply.events()
                first = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
                await reply.event(b"".join(chunk({"index": index, **first}) for index in range(params.n)))
            data = event(choice, delta)
            if data:
                await reply.event(data)
    await reply.end_events(writer.chunk([], usage_now()) if request.include_usage else b"")
