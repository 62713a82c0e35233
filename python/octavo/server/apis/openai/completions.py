"""`POST /v1/completions`."""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.routing import BaseRoute, Route

from octavo.engine.outputs import OutputDelta
from octavo.sampling_params import SamplingParams
from octavo.server.apis.openai.requests import CompletionRequest, check_token_ids, decode
from octavo.server.apis.openai.responses import CompletionLogprobs, finish_reason, mean_logprob, usage
from octavo.server.models.model_handle import ModelHandle
from octavo.server.observability.request_record import RequestRecord
from octavo.server.request.endpoint import Call, Exchange
from octavo.server.request.generation import Answer, collect, pieces
from octavo.server.request.keep_alive import keep_alive
from octavo.server.request.nothing import no_answers, no_pieces
from octavo.server.request.sse import ChunkWriter
from octavo.server.request.structured_outputs import constraint_field

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
    params = request.sampling_params(
        served, max_tokens=_DEFAULT_MAX_TOKENS, logprobs=request.logprobs, defaults=call.sampling_defaults(served)
    )
    await call.constrain(served, params.structured_outputs, constraint_field(request) or "")
    given = request.prompts()
    special = True if request.add_special_tokens is None else request.add_special_tokens
    prompts = [
        await served.tokenize(prompt, add_special_tokens=special) if isinstance(prompt, str) else prompt
        for prompt in given
    ]
    prompts = [request.truncate(ids, served.max_model_len, params.max_tokens) for ids in prompts]
    for ids in prompts:
        served.check_length(ids, "prompt")
        if request.wants_nothing:
            check_token_ids(ids, served.engine.model.vocab_size, "prompt")
    echoes = [_echo(served, request, prompt) for prompt in given] if request.echo else [""] * len(given)
    record = call.record(served, sum(map(len, prompts)), len(prompts))
    answer_id = request.answer_id("cmpl", call.request_id, call.header(b"x-request-id"))
    to_logprobs = await _logprobs(served, request, len(prompts) * params.n)
    if request.stream:
        await _stream(call, served, request, prompts, echoes, params, record, answer_id, to_logprobs)
        return
    if request.wants_nothing:
        answers = no_answers(len(prompts) * params.n)
        record.finish()
    elif request.num_candidates > params.n:
        answers = await _best(call, served, request, prompts, params, record)
    else:
        answers = await collect(call, served, prompts, params, record)
    await call.reply.json(
        {
            "id": answer_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": served.name,
            "choices": [
                _choice(index, answer, echoes[index // params.n], prompts[index // params.n], request, to_logprobs)
                for index, answer in enumerate(answers)
            ],
            "service_tier": None,
            "system_fingerprint": served.version,
            "usage": usage(record.prompt_tokens, record.completion_tokens, record.cached_tokens),
            "kv_transfer_params": None,
        }
    )


async def _best(
    call: Call,
    served: ModelHandle,
    request: CompletionRequest,
    prompts: list[list[int]],
    params: SamplingParams,
    record: RequestRecord,
) -> list[Answer]:
    """The n answers to each prompt whose tokens are the likeliest on average, best first, of `best_of`."""
    count = request.num_candidates
    asked = msgspec.structs.replace(params, n=count, logprobs=params.logprobs or 0)
    answers = await collect(call, served, prompts, asked, record)
    best = []
    for start in range(0, len(answers), count):
        candidates = answers[start : start + count]
        candidates.sort(key=lambda answer: mean_logprob(answer.logprobs), reverse=True)
        best += candidates[: params.n]
    return best


def _echo(served: ModelHandle, request: CompletionRequest, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    return served.tokenizer("echo").decode(prompt, skip_special_tokens=request.skip_special_tokens is not False)


async def _logprobs(served: ModelHandle, request: CompletionRequest, count: int) -> list[CompletionLogprobs]:
    """One an answer, as each counts its own offsets; none when none are asked for."""
    if request.logprobs is None:
        return []
    token_bytes, as_ids = await served.token_bytes("logprobs"), bool(request.return_tokens_as_token_ids)
    flags = served.tokenizer("logprobs").vocabulary.flags
    skips = request.skip_special_tokens is not False

    def is_hidden(token_id: int) -> bool:
        return skips and token_id < len(flags) and bool(flags[token_id] & 1)

    return [CompletionLogprobs(token_bytes, as_ids, is_hidden) for _ in range(count)]


def _choice(
    index: int,
    answer: Answer,
    echo: str,
    prompt: list[int],
    request: CompletionRequest,
    to_logprobs: list[CompletionLogprobs],
) -> dict[str, Any]:
    return {
        "index": index,
        "text": echo + answer.text,
        "logprobs": to_logprobs[index](answer.logprobs) if to_logprobs else None,
        "finish_reason": finish_reason(answer.finish_reason),
        "stop_reason": answer.stop_reason,
        "token_ids": answer.token_ids if request.return_token_ids else None,
        "prompt_logprobs": None,
        "prompt_token_ids": prompt if request.return_token_ids else None,
    }


async def _stream(
    call: Call,
    served: ModelHandle,
    request: CompletionRequest,
    prompts: list[list[int]],
    echoes: list[str],
    params: SamplingParams,
    record: RequestRecord,
    answer_id: str,
    to_logprobs: list[CompletionLogprobs],
) -> None:
    reply = call.reply
    writer = ChunkWriter(answer_id, "text_completion", served.name, served.version, null_usage=request.include_usage)
    plain = not (to_logprobs or request.return_token_ids or request.continuous_usage)
    count = len(prompts) * params.n
    pending = [echoes[index // params.n] for index in range(count)]
    shown = [prompts[index // params.n] if request.return_token_ids else None for index in range(count)]

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
            "finish_reason": finish_reason(delta.finish_reason),
            "stop_reason": delta.stop_reason,
        }
        if request.return_token_ids:
            shape["token_ids"] = delta.token_ids
            if shown[choice] is not None:
                shape["prompt_token_ids"], shown[choice] = shown[choice], None
        return writer.chunk([shape], usage_now() if request.continuous_usage else None)

    source: Any = (
        no_pieces(count, record)
        if request.wants_nothing
        else pieces(call, served, prompts, params, record, push=push if plain else None)
    )
    async with keep_alive(reply, call.state.settings.sse_keep_alive_seconds), aclosing(source):
        async for choice, delta in source:
            # Only the first output proves that the request is sound: until then an error has its own status.
            if not reply.streaming:
                await reply.events()
            data = event(choice, delta)
            if data:
                await reply.event(data)
    await reply.end_events(writer.chunk([], usage_now()) if request.include_usage else b"")
