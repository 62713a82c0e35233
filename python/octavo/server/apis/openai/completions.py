"""`POST /v1/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.routing import BaseRoute, Route

from octavo.server.apis.openai.completion_request import CompletionRequest
from octavo.server.apis.openai.responses import (
    Completion,
    CompletionChoice,
    CompletionLogprobWriter,
    finish_reason,
    mean_logprob,
    usage_of,
)
from octavo.server.apis.openai.sampling_fields import check_token_ids
from octavo.server.models.model_handle import ModelHandle
from octavo.server.observability.request_record import RequestRecord
from octavo.server.request.decoding import decode
from octavo.server.request.endpoint import Endpoint, RequestContext
from octavo.server.request.generation import Choice, collect, generate, generate_nothing
from octavo.server.request.output_events import OutputEvent
from octavo.server.request.sse import ChunkWriter
from octavo.server.request.stream import StreamWriter, write_stream
from octavo.server.request.structured_outputs import constraint_field

if TYPE_CHECKING:
    from octavo.server.state import ServerState

__all__ = ["completions", "routes"]

_DEFAULT_MAX_TOKENS = 16


def routes(state: ServerState) -> list[BaseRoute]:
    """`/v1/completions`."""
    return [Route("/v1/completions", Endpoint(state, completions), methods=["POST"])]


async def completions(context: RequestContext) -> None:
    """Complete a text, whole or streamed."""
    request = decode(CompletionRequest, context.body)
    context.timeout = request.timeout
    model = await context.route(request.model, user=request.user, session=request.session_id)
    params = request.sampling_params(
        model, max_tokens=_DEFAULT_MAX_TOKENS, logprobs=request.logprobs, defaults=context.sampling_defaults(model)
    )
    await context.constrain(model, params.structured_outputs, constraint_field(request) or "")
    given = request.prompts()
    prompts = await _token_ids(model, request, given, params.max_tokens)
    echoes = [_echo(model, request, prompt) for prompt in given] if request.echo else [""] * len(given)
    record = context.record(model, sum(map(len, prompts)), len(prompts))
    response_id = request.response_id("cmpl", context.request_id, context.header(b"x-request-id"))
    to_logprobs = await _logprobs(model, request, len(prompts) * params.n)
    chunks = ChunkWriter(response_id, "text_completion", model.name, model.version, null_usage=request.include_usage)
    writer = _CompletionStream(request, chunks, prompts, echoes, params.n, record, to_logprobs)

    def push(choice: int, text: bytes) -> bool:
        return context.reply.try_event(chunks.completion_text(choice, text.decode()))

    if request.wants_nothing:
        events = generate_nothing(len(prompts) * params.n, record)
    else:
        asked = params
        if request.num_candidates > params.n:
            asked = msgspec.structs.replace(params, n=request.num_candidates, logprobs=params.logprobs or 0)
        direct = push if request.stream and writer.is_plain else None
        events = generate(context, model, prompts, asked, record, push=direct, whole=not request.stream)
    if request.stream:
        await write_stream(context, events, writer)
        return
    if request.num_candidates > params.n and not request.wants_nothing:
        choices = await _best(events, len(prompts), request.num_candidates, params.n)
    else:
        choices = await collect(events, len(prompts) * params.n)
    await context.reply.json(
        Completion(
            id=response_id,
            object="text_completion",
            created=int(time.time()),
            model=model.name,
            choices=[
                _choice(index, choice, echoes[index // params.n], prompts[index // params.n], request, to_logprobs)
                for index, choice in enumerate(choices)
            ],
            service_tier=None,
            system_fingerprint=model.version,
            usage=usage_of(record),
            kv_transfer_params=None,
        )
    )


async def _token_ids(
    model: ModelHandle, request: CompletionRequest, given: list[str | list[int]], max_tokens: int | None
) -> list[list[int]]:
    """Token ids of each prompt, truncated and checked."""
    special = True if request.add_special_tokens is None else request.add_special_tokens
    prompts = [
        await model.tokenize(prompt, add_special_tokens=special) if isinstance(prompt, str) else prompt
        for prompt in given
    ]
    prompts = [request.truncate(ids, model.max_model_len, max_tokens) for ids in prompts]
    for ids in prompts:
        model.check_length(ids, "prompt")
        if request.wants_nothing:
            check_token_ids(ids, model.engine.model.vocab_size, "prompt")
    return prompts


async def _best(events: AsyncGenerator[OutputEvent, None], num_prompts: int, candidates: int, n: int) -> list[Choice]:
    """The n candidates of each prompt with the highest mean log probability, best first."""
    choices = await collect(events, num_prompts * candidates)
    best = []
    for start in range(0, len(choices), candidates):
        ranked = choices[start : start + candidates]
        ranked.sort(key=lambda choice: mean_logprob(choice.logprobs), reverse=True)
        best += ranked[:n]
    return best


def _echo(model: ModelHandle, request: CompletionRequest, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    return model.tokenizer("echo").decode(prompt, skip_special_tokens=request.skip_special_tokens is not False)


async def _logprobs(model: ModelHandle, request: CompletionRequest, count: int) -> list[CompletionLogprobWriter]:
    """One writer per choice, as each counts its own offsets; empty without log probabilities."""
    if request.logprobs is None:
        return []
    token_bytes, as_ids = await model.token_bytes("logprobs"), bool(request.return_tokens_as_token_ids)
    flags = model.tokenizer("logprobs").vocabulary.flags
    skips = request.skip_special_tokens is not False

    def is_hidden(token_id: int) -> bool:
        return skips and token_id < len(flags) and bool(flags[token_id] & 1)

    return [CompletionLogprobWriter(token_bytes, as_ids, is_hidden) for _ in range(count)]


def _choice(
    index: int,
    choice: Choice,
    echo: str,
    prompt: list[int],
    request: CompletionRequest,
    to_logprobs: list[CompletionLogprobWriter],
) -> CompletionChoice:
    return CompletionChoice(
        index=index,
        text=echo + choice.text,
        logprobs=to_logprobs[index](choice.logprobs) if to_logprobs else None,
        finish_reason=finish_reason(choice.finish_reason),
        stop_reason=choice.stop_reason,
        token_ids=choice.token_ids if request.return_token_ids else None,
        prompt_logprobs=None,
        prompt_token_ids=prompt if request.return_token_ids else None,
    )


class _CompletionStream(StreamWriter):
    """Chunks of a completion."""

    def __init__(
        self,
        request: CompletionRequest,
        chunks: ChunkWriter,
        prompts: list[list[int]],
        echoes: list[str],
        n: int,
        record: RequestRecord,
        to_logprobs: list[CompletionLogprobWriter],
    ) -> None:
        self._request = request
        self._chunks = chunks
        self._record = record
        self._to_logprobs = to_logprobs
        count = len(prompts) * n
        # What a choice's first chunk brings besides its output.
        self._echoes = [echoes[index // n] for index in range(count)]
        self._prompts = [prompts[index // n] if request.return_token_ids else None for index in range(count)]
        self.is_plain = not (to_logprobs or request.return_token_ids or request.continuous_usage)

    def event(self, event: OutputEvent) -> bytes:
        """A chunk, also for tokens whose text is held back, as in vLLM: clients time tokens by chunks."""
        index = event.choice
        text, self._echoes[index] = self._echoes[index] + event.text, ""
        if not (text or event.token_ids or event.finish_reason):
            return b""
        if self.is_plain and not event.finish_reason:
            return self._chunks.completion_text(index, text)
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": self._to_logprobs[index](event.logprobs) if self._to_logprobs and event.logprobs else None,
            "finish_reason": finish_reason(event.finish_reason),
            "stop_reason": event.stop_reason,
        }
        if self._request.return_token_ids:
            choice["token_ids"] = event.token_ids
            if self._prompts[index] is not None:
                choice["prompt_token_ids"], self._prompts[index] = self._prompts[index], None
        return self._chunks.chunk([choice], usage_of(self._record) if self._request.continuous_usage else None)

    def closing(self) -> bytes:
        """The usage, if asked for."""
        return self._chunks.closing(usage_of(self._record) if self._request.include_usage else None)
