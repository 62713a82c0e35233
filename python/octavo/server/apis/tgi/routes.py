"""TGI's API (text-generation-inference): `/generate`, `/generate_stream`, `POST /` and `/info`."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from octavo._core import __version__
from octavo.engine.outputs import TokenLogprobs
from octavo.sampling_params import MAX_N, MAX_STOPS, SamplingParams
from octavo.server.apis.openai.responses import LOWEST_LOGPROB, mean_logprob
from octavo.server.apis.tgi.requests import GenerateBody
from octavo.server.error_responses import describe
from octavo.server.models.model_handle import TEXT_THREADS, ModelHandle
from octavo.server.observability.request_record import RequestRecord
from octavo.server.request.decoding import decode
from octavo.server.request.endpoint import Endpoint, RequestContext
from octavo.server.request.generation import Choice, collect
from octavo.server.request.generation import generate as generate_events
from octavo.server.request.output_events import OutputEvent
from octavo.server.request.stream import StreamWriter, write_stream
from octavo.server.transport.http import EVENTS, ErrorFormat, json_response
from octavo.text.token_bytes import SPECIAL

if TYPE_CHECKING:
    from octavo.server.state import ServerState

__all__ = ["compatible", "generate", "generate_stream", "routes"]

_encode = msgspec.json.Encoder().encode


class _Errors(ErrorFormat):
    """`{"error", "error_type"}` and TGI's statuses."""

    def status(self, status: int, error: dict[str, Any]) -> int:
        """422 for the client's mistakes, 424 for failures within the generation, 429 for a full queue."""
        if error["code"] in ("queue_full", "queue_timeout"):
            return 429
        return {400: 422, 404: 422, 500: 424}.get(status, status)

    def body(self, status: int, error: dict[str, Any]) -> Any:
        """The JSON value of the error."""
        if status in (429, 503):
            kind, text = "overloaded", "Model is overloaded: "
        elif status < 500:
            kind, text = "validation", "Input validation error: "
        else:
            kind, text = "generation", "Request failed during generation: "
        return {"error": text + error["message"], "error_type": kind}

    def last_event(self, status: int, error: dict[str, Any]) -> bytes:
        """The last event of a stream that fails."""
        text = f"Request failed during generation: {error['message']}"
        return b"data:" + _encode({"error": text, "error_type": "generation"}) + b"\n\n"


_ERRORS = _Errors()


def routes(state: ServerState) -> list[BaseRoute]:
    """All of TGI's routes."""
    return [
        Route("/generate", Endpoint(state, generate, _ERRORS), methods=["POST"]),
        Route("/generate_stream", Endpoint(state, generate_stream, _ERRORS), methods=["POST"]),
        Route("/", Endpoint(state, compatible, _ERRORS), methods=["POST"]),
        Route("/info", _Info(state).info),
    ]


async def generate(context: RequestContext) -> None:
    """`POST /generate`: the whole output."""
    await _whole(context, decode(GenerateBody, context.body), as_list=False)


async def generate_stream(context: RequestContext) -> None:
    """`POST /generate_stream`: an event a token."""
    await _stream(context, decode(GenerateBody, context.body))


async def compatible(context: RequestContext) -> None:
    """`POST /`: a stream if `stream` is true, else a list of one response."""
    request = decode(GenerateBody, context.body)
    if request.stream:
        await _stream(context, request)
    else:
        await _whole(context, request, as_list=True)


class _Tokens:
    """Writes tokens in TGI's format."""

    def __init__(self, token_bytes: Callable[[int], bytes], flags: bytes) -> None:
        self._token_bytes = token_bytes
        self._flags = flags

    def special(self, token_id: int) -> bool:
        """Whether the token is left out of texts."""
        return token_id < len(self._flags) and bool(self._flags[token_id] & SPECIAL)

    def texts(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token. A character of several tokens belongs to the last; special tokens have none."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return [decoder.decode(b"" if self.special(token) else self._token_bytes(token)) for token in token_ids]

    def spread(self, text: str, token_ids: Sequence[int]) -> list[str]:
        """Split `text` among the tokens that it came with, as far as possible."""
        if len(token_ids) > 1:
            cut = self.texts(token_ids)
            if "".join(cut) == text:
                return cut
        return [*[""] * (len(token_ids) - 1), text][: len(token_ids)]

    def token(self, token_id: int, logprob: float | None, text: str) -> dict[str, Any]:
        """`{id, text, logprob, special}`."""
        clamped = None if logprob is None else max(logprob, LOWEST_LOGPROB)
        return {"id": token_id, "text": text, "logprob": clamped, "special": self.special(token_id)}

    def top(self, entry: TokenLogprobs) -> list[dict[str, Any]]:
        """The likeliest tokens at one position."""
        return [self.token(token, logprob, self.texts([token])[0]) for token, logprob in entry.top]


async def _tokens(model: ModelHandle) -> _Tokens:
    token_bytes = await model.token_bytes("details")
    return _Tokens(token_bytes, model.tokenizer("details").vocabulary.flags)


class _Request:
    """One request: what whole and streamed responses share."""

    def __init__(
        self, context: RequestContext, request: GenerateBody, model: ModelHandle, prompt: list[int], logprobs: bool
    ) -> None:
        self.context = context
        self.request = request
        self.model = model
        self.prompt = prompt
        self.params: SamplingParams = request.sampling_params(model, len(prompt), logprobs=logprobs)
        self.record: RequestRecord = context.record(model, len(prompt))
        self.validated = time.monotonic()

    @classmethod
    async def read(cls, context: RequestContext, request: GenerateBody, *, logprobs: bool) -> _Request:
        """Find the model and tokenize."""
        model = await context.route(request.model)
        prompt = await model.tokenize(request.inputs or "", add_special_tokens=True, field="inputs")
        if request.params.truncate is not None:
            prompt = prompt[-request.params.truncate :]
        model.check_length(prompt, "inputs")
        work = cls(context, request, model, prompt, logprobs)
        await context.constrain(model, work.params.structured_outputs, "grammar")
        return work

    @property
    def full_text(self) -> str:
        """The text before the output."""
        return (self.request.inputs or "") if self.request.params.return_full_text else ""

    def compute(self) -> dict[str, str]:
        """The headers that are known at the start."""
        return {
            "x-compute-type": str(self.model.engine.model.device),
            "x-compute-characters": str(len(self.request.inputs or "")),
        }

    def times(self) -> dict[str, str]:
        """The headers at the end. Times are milliseconds, but x-compute-time is seconds."""
        record = self.record
        now = time.monotonic()
        total, validation = now - record.arrival, self.validated - record.arrival
        queue = max((record.queue_time or validation) - validation, 0.0)
        inference = total - validation - queue
        return {
            **self.compute(),
            "x-compute-time": f"{total:.6f}",
            "x-total-time": _milliseconds(total),
            "x-validation-time": _milliseconds(validation),
            "x-queue-time": _milliseconds(queue),
            "x-inference-time": _milliseconds(inference),
            "x-time-per-token": _milliseconds(inference / max(record.completion_tokens, 1)),
            "x-prompt-tokens": str(len(self.prompt)),
            "x-generated-tokens": str(record.completion_tokens),
        }


def _milliseconds(seconds: float) -> str:
    return str(int(seconds * 1000))


async def _whole(context: RequestContext, request: GenerateBody, *, as_list: bool) -> None:
    given = request.params
    detailed = bool(given.details or given.decoder_input_details)
    # The likeliest of several is found by its tokens' log probabilities.
    work = await _Request.read(context, request, logprobs=detailed or given.num_candidates > 1)
    tokens = await _tokens(work.model) if detailed else None
    events = generate_events(context, work.model, [work.prompt], work.params, work.record, whole=True)
    choices = await collect(events, work.params.n)
    choices.sort(key=lambda choice: mean_logprob(choice.logprobs), reverse=True)
    shapes = [_sequence(work, choice, tokens) for choice in choices]
    best = shapes[0]
    payload: dict[str, Any] = {"generated_text": best.pop("generated_text")}
    if detailed:
        payload["details"] = best
        if len(shapes) > 1:
            best["best_of_sequences"] = shapes[1:]
    await context.reply.json([payload] if as_list else payload, headers=work.times())


def _sequence(work: _Request, choice: Choice, tokens: _Tokens | None) -> dict[str, Any]:
    shape: dict[str, Any] = {"generated_text": work.full_text + choice.text}
    if tokens is None:
        return shape
    prefill: list[dict[str, Any]] = []
    if work.request.params.decoder_input_details:
        # The engine gives no log probabilities of a prompt.
        texts = tokens.texts(work.prompt)
        prefill = [{"id": token, "text": text, "logprob": None} for token, text in zip(work.prompt, texts, strict=True)]
    texts = tokens.texts(choice.token_ids)
    shape |= {
        "finish_reason": _finish_reason(choice.finish_reason, choice.stop_reason),
        "generated_tokens": len(choice.token_ids),
        "seed": work.params.seed,
        "prefill": prefill,
        "tokens": [
            tokens.token(entry.token_id, entry.logprob, text)
            for entry, text in zip(choice.logprobs, texts, strict=True)
        ],
    }
    if work.request.params.top_n_tokens:
        shape["top_tokens"] = [tokens.top(entry) for entry in choice.logprobs]
    return shape


def _finish_reason(reason: str | None, stop_reason: int | str | None) -> str:
    if reason == "stop":
        return "stop_sequence" if isinstance(stop_reason, str) else "eos_token"
    return "length"


async def _stream(context: RequestContext, request: GenerateBody) -> None:
    request.check_stream()
    work = await _Request.read(context, request, logprobs=True)
    events = generate_events(context, work.model, [work.prompt], work.params, work.record)
    await write_stream(context, events, _TokenStream(work, await _tokens(work.model)))


class _TokenStream(StreamWriter):
    """Writes one event per token."""

    def __init__(self, work: _Request, tokens: _Tokens) -> None:
        self._work = work
        self._tokens = tokens
        self._texts: list[str] = []
        self._index = 0
        self.headers = [*EVENTS, *((name.encode(), value.encode()) for name, value in work.compute().items())]

    def event(self, event: OutputEvent) -> bytes:
        """The tokens of an event; the end of the text in the last one."""
        self._texts.append(event.text)
        end = event if event.finish_reason is not None else None
        entries = event.logprobs or []
        texts = self._tokens.spread(event.text, event.token_ids)
        chunks = []
        for place, (entry, text) in enumerate(zip(entries, texts, strict=True), 1):
            token = self._tokens.token(entry.token_id, entry.logprob, text)
            chunks.append(self._chunk(token, entry, end if place == len(entries) else None))
        if end and not entries:
            # Every chunk has a token; this end came without one.
            chunks.append(self._chunk({"id": 0, "text": event.text, "logprob": 0.0, "special": True}, None, end))
        return b"".join(chunks)

    def _chunk(self, token: dict[str, Any], entry: TokenLogprobs | None, end: OutputEvent | None) -> bytes:
        work, given = self._work, self._work.request.params
        self._index += 1
        shape: dict[str, Any] = {"index": self._index, "token": token, "generated_text": None, "details": None}
        if given.top_n_tokens:
            shape["top_tokens"] = self._tokens.top(entry) if entry else []
        if end is not None:
            shape["generated_text"] = work.full_text + "".join(self._texts)
            if given.details:
                shape["details"] = {
                    "finish_reason": _finish_reason(end.finish_reason, end.stop_reason),
                    "generated_tokens": work.record.completion_tokens,
                    "seed": work.params.seed,
                    "input_length": len(work.prompt),
                }
        return b"data:" + _encode(shape) + b"\n\n"


class _Info:
    """`GET /info`."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def info(self, request: Request) -> Response:
        """The model and the limits of a request."""
        try:
            model = self._state.resolve(None)
        except Exception as error:
            status, payload, headers = describe(error)
            return json_response(_ERRORS.body(status, payload["error"]), status, headers)
        limit, settings = model.max_model_len, self._state.settings
        at_once = self._state.admission_queue(model).max_requests
        return json_response(
            {
                "model_id": model.name,
                "model_sha": None,
                "model_pipeline_tag": "text-generation",
                "max_concurrent_requests": min(at_once, settings.max_concurrency or at_once),
                "max_best_of": min(MAX_N, settings.max_answers),
                "max_stop_sequences": min(MAX_STOPS, settings.max_stops),
                "max_input_tokens": limit - 1,
                "max_total_tokens": limit,
                "validation_workers": TEXT_THREADS,
                "auto_truncate": False,
                "max_client_batch_size": 1,
                "router": "octavo",
                "version": __version__,
                "sha": None,
                "docker_label": None,
            }
        )
