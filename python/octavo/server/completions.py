"""`POST /v1/completions`."""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from starlette.routing import BaseRoute, Route

from octavo.engine.outputs import OutputDelta
from octavo.errors import InvalidRequest
from octavo.sampling_params import MAX_LOGPROBS, SamplingParams
from octavo.server.exchange import Call, Exchange
from octavo.server.generation import Answer, collect, pieces
from octavo.server.http import Reply
from octavo.server.metrics import RequestRecord
from octavo.server.protocol import CompletionRequest, decode
from octavo.server.served import ServedModel
from octavo.server.shapes import CompletionLogprobs, usage
from octavo.server.sse import ChunkWriter

if TYPE_CHECKING:
    from octavo.server.state import ServerState

__all__ = ["completions", "routes"]

_DEFAULT_MAX_TOKENS = 16


def routes(state: ServerState) -> list[BaseRoute]:
    """`/v1/completions`."""
    return [Route("/v1/completions", Exchange(state, completions), methods=["POST"])]


async def completions(call: Call) -> None:
    """Answer one completion request, whole or streamed."""
    request = decode(CompletionRequest, call.body)
    call.timeout = request.timeout
    served = await call.route(request.model, user=request.user, session=request.session_id)
    if request.logprobs is not None and request.logprobs > MAX_LOGPROBS:
        raise InvalidRequest(f"logprobs: {request.logprobs} is more than {MAX_LOGPROBS}", "logprobs")
    params = request.sampling_params(
        served.sampling_defaults,
        max_tokens=_DEFAULT_MAX_TOKENS,
        logprobs=request.logprobs,
        max_model_len=served.max_model_len,
    )
    given = request.prompts()
    special = True if request.add_special_tokens is None else request.add_special_tokens
    prompts = [
        await served.tokenize(prompt, add_special_tokens=special) if isinstance(prompt, str) else prompt
        for prompt in given
    ]
    for ids in prompts:
        served.check_length(ids, "prompt")
    echoes = [await _echo(served, prompt) for prompt in given] if request.echo else [""] * len(given)
    record = call.record(served, sum(map(len, prompts)), len(prompts))
    answer_id = f"cmpl-{call.request_id}"
    to_logprobs = await _logprobs(served, request, len(prompts) * params.n)
    if request.stream:
        await _stream(call, served, request, prompts, echoes, params, record, call.reply, answer_id, to_logprobs)
        return
    answers = await collect(call, served, prompts, params, record)
    await call.reply.json(
        {
            "id": answer_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": served.name,
            "choices": [
                _choice(index, answer, echoes[index // params.n], request, to_logprobs)
                for index, answer in enumerate(answers)
            ],
            "service_tier": None,
            "system_fingerprint": served.version,
            "usage": usage(record.prompt_tokens, record.completion_tokens, record.cached_tokens),
        }
    )


async def _echo(served: ServedModel, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    return b"".join(map(await served.token_bytes("echo"), prompt)).decode("utf-8", "replace")


async def _logprobs(served: ServedModel, request: CompletionRequest, count: int) -> list[CompletionLogprobs]:
    """One an answer, as each counts its own offsets; none when none are asked for."""
    if request.logprobs is None:
        return []
    token_bytes, as_ids = await served.token_bytes("logprobs"), bool(request.return_tokens_as_token_ids)
    return [CompletionLogprobs(token_bytes, as_ids) for _ in range(count)]


def _choice(
    index: int, answer: Answer, echo: str, request: CompletionRequest, to_logprobs: list[CompletionLogprobs]
) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": index,
        "text": echo + answer.text,
        "logprobs": to_logprobs[index](answer.logprobs) if to_logprobs else None,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
    }
    if request.return_token_ids:
        choice["token_ids"] = answer.token_ids
    return choice


async def _stream(
    call: Call,
    served: ServedModel,
    request: CompletionRequest,
    prompts: list[list[int]],
    echoes: list[str],
    params: SamplingParams,
    record: RequestRecord,
    reply: Reply,
    answer_id: str,
    to_logprobs: list[CompletionLogprobs],
) -> None:
    writer = ChunkWriter(answer_id, "text_completion", served.name)
    plain = not (to_logprobs or request.return_token_ids or request.continuous_usage)
    pending = [echoes[index // params.n] for index in range(len(prompts) * params.n)]

    def usage_now() -> dict[str, Any]:
        return usage(record.prompt_tokens, record.completion_tokens, record.cached_tokens)

    def push(choice: int, text: bytes) -> bool:
        return reply.try_event(writer.completion_text(choice, text.decode()))

    def event(choice: int, delta: OutputDelta) -> bytes:
        text = pending[choice] + delta.text
        pending[choice] = ""
        # As vLLM, a chunk for tokens whose text is still held back: clients time tokens by chunks.
        if not (text or delta.token_ids or delta.finish_reason):
            return b""
        if plain and not delta.finish_reason:
            return writer.completion_text(choice, text)
        shape: dict[str, Any] = {
            "index": choice,
            "text": text,
            "logprobs": to_logprobs[choice](delta.logprobs) if to_logprobs and delta.logprobs else None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if request.return_token_ids:
            shape["token_ids"] = delta.token_ids
        return writer.chunk([shape], usage_now() if request.continuous_usage else None)

    source: Any = pieces(call, served, prompts, params, record, push=push if plain else None)
    async with aclosing(source):
        async for choice, delta in source:
            # Only the first output proves that the request is sound: until then an error has its own status.
            if not reply.streaming:
                await reply.events()
            data = event(choice, delta)
            if data:
                await reply.event(data)
    await reply.end_events(writer.chunk([], usage_now()) if request.include_usage else b"")
