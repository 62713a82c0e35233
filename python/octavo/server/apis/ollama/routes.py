"""Ollama's API: its routes, `/api/chat` and `/api/generate`.

Models are named as everywhere on this server; a client's `:latest` is left off where no model has it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.routing import BaseRoute, Route

from octavo.engine.outputs import TokenLogprobs
from octavo.sampling_params import SamplingParams
from octavo.server.apis.ollama.models import Reads, load_or_unload, now, refuse, route, set_keep_alive, show
from octavo.server.apis.ollama.requests import ChatBody, GenerateBody
from octavo.server.apis.openai.responses import ChatLogprobWriter, finish_reason
from octavo.server.models.model_handle import ModelHandle
from octavo.server.observability.request_record import RequestRecord
from octavo.server.request.decoding import decode
from octavo.server.request.endpoint import Endpoint, RequestContext
from octavo.server.request.generation import Choice, collect
from octavo.server.request.generation import generate as generate_events
from octavo.server.request.keep_alive import LINE_SPACE
from octavo.server.request.messages import flatten
from octavo.server.request.output_events import OutputEvent
from octavo.server.request.stream import StreamWriter, write_stream
from octavo.server.transport.http import ErrorFormat

if TYPE_CHECKING:
    from octavo.server.state import ServerState

__all__ = ["chat", "generate", "routes"]

_encode = msgspec.json.Encoder().encode
_LINES = [
    (b"content-type", b"application/x-ndjson"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
# Changes of the models on disk, and embeddings.
_REFUSED = (
    ("/api/pull", "POST"),
    ("/api/push", "POST"),
    ("/api/create", "POST"),
    ("/api/copy", "POST"),
    ("/api/delete", "DELETE"),
    ("/api/embed", "POST"),
    ("/api/embeddings", "POST"),
)


class _Errors(ErrorFormat):
    """`{"error": "what is wrong"}`, also as the last line of a stream."""

    def body(self, status: int, error: dict[str, Any]) -> Any:
        """The JSON value of the error."""
        return {"error": error["message"]}

    def last_event(self, status: int, error: dict[str, Any]) -> bytes:
        """The last event of a stream that fails."""
        return _encode(self.body(status, error)) + b"\n"


def routes(state: ServerState) -> list[BaseRoute]:
    """All of Ollama's routes, and `GET /`."""
    errors = _Errors()
    reads = Reads(state)

    def post(process: Any) -> Endpoint:
        # curl's own content type for a body is a form's, and Ollama's documentation leaves it at that.
        return Endpoint(state, process, errors, any_content_type=True)

    return [
        Route("/", reads.index, methods=["GET"]),
        Route("/api/chat", post(chat), methods=["POST"]),
        Route("/api/generate", post(generate), methods=["POST"]),
        Route("/api/show", post(show), methods=["POST"]),
        *(Route(path, post(refuse), methods=[method]) for path, method in _REFUSED),
        Route("/api/tags", reads.tags),
        Route("/api/ps", reads.running),
        Route("/api/version", reads.version),
    ]


async def chat(context: RequestContext) -> None:
    """`POST /api/chat`."""
    began = time.monotonic_ns()
    request = decode(ChatBody, context.body)
    idle_seconds = request.keep_alive_seconds
    if not request.messages:
        message = {"role": "assistant", "content": ""}
        await load_or_unload(context, request.model_name, idle_seconds, {"message": message})
        return
    model = await route(context, request.model_name)
    set_keep_alive(context, model, idle_seconds)
    loading = time.monotonic_ns() - began
    params = request.sampling_params(model, context.sampling_defaults(model))
    await context.constrain(model, params.structured_outputs, "format")
    messages = flatten(request.conversation)
    # As Ollama: the model continues an assistant's last message.
    begun = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    params.begins_text = not begun
    prompt = await model.render(
        messages,
        add_special_tokens=False,
        add_generation_prompt=not begun,
        continue_final_message=begun,
        **request.template_variables,
    )
    model.check_length(prompt, "messages")

    def part(text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    await _respond(context, model, request, prompt, params, loading, part)


async def generate(context: RequestContext) -> None:
    """`POST /api/generate`."""
    began = time.monotonic_ns()
    request = decode(GenerateBody, context.body)
    idle_seconds = request.keep_alive_seconds
    if not request.prompt:
        await load_or_unload(context, request.model_name, idle_seconds, {"response": ""})
        return
    model = await route(context, request.model_name)
    set_keep_alive(context, model, idle_seconds)
    loading = time.monotonic_ns() - began
    params = request.sampling_params(model, context.sampling_defaults(model))
    await context.constrain(model, params.structured_outputs, "format")
    params.begins_text = not request.raw and model.tokenizer("prompt").has_chat_template
    prompt = await _prompt(model, request, request.prompt)
    model.check_length(prompt, "prompt")

    def part(text: str) -> dict[str, Any]:
        return {"response": text}

    await _respond(context, model, request, prompt, params, loading, part)


async def _prompt(model: ModelHandle, request: GenerateBody, text: str) -> list[int]:
    tokenizer = model.tokenizer("prompt")
    if request.raw or not tokenizer.has_chat_template:
        if request.system:
            text = f"{request.system}\n\n{text}"
        prompt = await model.tokenize(text, add_special_tokens=True)
    else:
        messages = [{"role": "system", "content": request.system}] if request.system else []
        prompt = await model.render(
            [*messages, {"role": "user", "content": text}],
            add_special_tokens=False,
            add_generation_prompt=True,
            continue_final_message=False,
            **request.template_variables,
        )
    history = request.history(model)
    if history and prompt[:1] == [tokenizer.bos_token_id]:
        del prompt[0]
    return history + prompt


async def _respond(
    context: RequestContext,
    model: ModelHandle,
    request: ChatBody | GenerateBody,
    prompt: list[int],
    params: SamplingParams,
    loading: int,
    part: Callable[[str], dict[str, Any]],
) -> None:
    """Generate, and respond whole or line by line; `loading` is in nanoseconds, `part` wraps a text in its field."""
    to_logprobs = ChatLogprobWriter(await model.token_bytes("logprobs"), False) if request.logprobs else None
    record = context.record(model, len(prompt))
    history = [*prompt] if isinstance(request, GenerateBody) and not request.raw else None
    writer = _LineStream(request.model_name, part, to_logprobs, history, record, loading)

    def push(_: int, text: bytes) -> bool:
        return not text or context.reply.try_event(writer.text(text.decode()))

    if request.streams:
        plain = history is None and to_logprobs is None
        events = generate_events(context, model, [prompt], params, record, push=push if plain else None)
        await write_stream(context, events, writer)
    else:
        choices = await collect(generate_events(context, model, [prompt], params, record, whole=True), 1)
        await context.reply.json(writer.whole(choices[0]))


class _LineStream(StreamWriter):
    """Writes one JSON value per line.

    Args:
        model: as the client named it.
        part: puts a text in its place.
        to_logprobs: None where none are asked for.
        history: tokens of the prompt, to which those of the reply are added; None where the client gets none.
        record: of the request.
        loading: nanoseconds that the model took to load.
    """

    headers = _LINES
    heartbeat = LINE_SPACE

    def __init__(
        self,
        model: str,
        part: Callable[[str], dict[str, Any]],
        to_logprobs: ChatLogprobWriter | None,
        history: list[int] | None,
        record: RequestRecord,
        loading: int,
    ) -> None:
        self._model = model
        self._part = part
        self._to_logprobs = to_logprobs
        self._history = history
        self._record = record
        self._loading = loading
        self._submitted = time.monotonic() - record.arrival
        self._finish_reason: str | None = None

    def text(self, text: str, entries: Sequence[TokenLogprobs] | None = None) -> bytes:
        """The line that adds text."""
        return _encode(self._line(text, False, entries)) + b"\n"

    def event(self, event: OutputEvent) -> bytes:
        """A line, unless it would be empty."""
        self._finish_reason = event.finish_reason
        if self._history is not None:
            self._history.extend(event.token_ids)
        return self.text(event.text, event.logprobs) if event.text or event.logprobs else b""

    def closing(self) -> bytes:
        """The last line, without text."""
        return _encode(self._last("", self._finish_reason, None)) + b"\n"

    def whole(self, choice: Choice) -> dict[str, Any]:
        """The response that is not streamed."""
        if self._history is not None:
            self._history.extend(choice.token_ids)
        return self._last(choice.text, choice.finish_reason, choice.logprobs)

    def _line(self, text: str, done: bool, entries: Sequence[TokenLogprobs] | None) -> dict[str, Any]:
        shape = {"model": self._model, "created_at": now(), **self._part(text), "done": done}
        if self._to_logprobs and entries:
            shape["logprobs"] = self._to_logprobs(entries).content
        return shape

    def _last(self, text: str, reason: str | None, entries: Sequence[TokenLogprobs] | None) -> dict[str, Any]:
        shape = self._line(text, True, entries) | {"done_reason": finish_reason(reason)}
        if self._history is not None:
            shape["context"] = self._history
        return shape | _durations(self._record, self._loading, self._submitted)


def _durations(record: RequestRecord, loading: int, submitted: float) -> dict[str, int]:
    """Counts, and times in nanoseconds. The request was submitted `submitted` seconds after its arrival."""
    prefill = (record.time_to_first_token or 0.0) - max(record.queue_time or 0.0, submitted)
    return {
        "total_duration": round((time.monotonic() - record.arrival) * 1e9),
        "load_duration": loading,
        "prompt_eval_count": record.prompt_tokens,
        "prompt_eval_duration": max(round(prefill * 1e9), 0),
        "eval_count": record.completion_tokens,
        # Clients divide by it.
        "eval_duration": max(round((record.decode_time or 0.0) * 1e9), 1),
    }
