"""`POST /v1/responses`. Responses are not stored: each request contains its whole conversation."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.routing import BaseRoute, Route

from octavo.sampling_params import SamplingParams
from octavo.server.apis.openai.responses import ChatLogprobWriter, PositionLogprobs
from octavo.server.apis.openai.responses_request import ResponsesRequest
from octavo.server.error_responses import ResponseNotFound
from octavo.server.models.model_handle import ModelHandle
from octavo.server.observability.request_record import RequestRecord
from octavo.server.request.decoding import decode
from octavo.server.request.endpoint import Endpoint, RequestContext
from octavo.server.request.field_renames import renamed_errors
from octavo.server.request.generation import Choice, collect, generate
from octavo.server.request.limits import check_messages
from octavo.server.request.messages import render, template_variables
from octavo.server.request.output_events import OutputEvent
from octavo.server.request.stream import StreamWriter, write_stream
from octavo.server.request.structured_outputs import constraint_field
from octavo.server.transport.http import ErrorFormat

if TYPE_CHECKING:
    from octavo.server.state import ServerState

__all__ = ["create_response", "routes"]

_encode = msgspec.json.Encoder().encode
_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format.schema",
}


def routes(state: ServerState) -> list[BaseRoute]:
    """`/v1/responses`, and what would read stored ones."""
    stored = Endpoint(state, stored_response)
    return [
        Route("/v1/responses", Endpoint(state, create_response), methods=["POST"]),
        Route("/v1/responses/{response_id}", stored, methods=["GET", "DELETE"]),
        Route("/v1/responses/{response_id}/cancel", stored, methods=["POST"]),
    ]


async def stored_response(context: RequestContext) -> None:
    """Refuse: responses are not stored."""
    raise ResponseNotFound("This server does not store responses; send the whole conversation with each request.")


async def create_response(context: RequestContext) -> None:
    """Respond to one request, whole or streamed."""
    with renamed_errors(_NAMES):
        request = decode(ResponsesRequest, context.body)
        messages = request.conversation_messages()
        check_messages(messages, context.state.settings)
        context.timeout = request.timeout
        model = await context.route(request.model, user=request.user, session=request.session_id)
        params = request.sampling_params(
            model, max_tokens=None, logprobs=request.num_logprobs, defaults=context.sampling_defaults(model)
        )
        params.begins_text = True
        field = constraint_field(request) or ""
        await context.constrain(model, params.structured_outputs, _NAMES.get(field, field))
        effort = request.reasoning.effort if request.reasoning is not None else None
        prompt = await render(
            model,
            messages,
            add_special_tokens=request.add_special_tokens,
            variables=template_variables(request.chat_template_kwargs, None, effort),
        )
        prompt = request.truncate(prompt, model.max_model_len, params.max_tokens)
        model.check_length(prompt, "input")
    to_logprobs = ChatLogprobWriter(await model.token_bytes("include"), False) if params.logprobs is not None else None
    shape = _Shape(context, model, request, params, context.record(model, len(prompt)), to_logprobs)
    events = generate(context, model, [prompt], params, shape.record, whole=not request.stream)
    if request.stream:
        context.reply.errors = writer = _ResponseStream(shape)
        await write_stream(context, events, writer)
        return
    choices = await collect(events, 1)
    await context.reply.json(shape.finished(choices[0]))


class _Shape:
    """The objects of one response."""

    def __init__(
        self,
        context: RequestContext,
        model: ModelHandle,
        request: ResponsesRequest,
        params: SamplingParams,
        record: RequestRecord,
        to_logprobs: ChatLogprobWriter | None,
    ) -> None:
        self.record = record
        self.item_id = f"msg_{context.request_id}"
        self._to_logprobs = to_logprobs
        text_format: Any = {"type": "text"}
        if request.text is not None and request.text.format is not None:
            given = msgspec.to_builtins(request.text.format)
            text_format = {key: value for key, value in given.items() if value is not None}
        self._shared: dict[str, Any] = {
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": model.name,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": {"format": text_format},
            "tool_choice": "none" if request.tool_choice == "none" else "auto",
            "tools": request.tools or [],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "user": request.user if isinstance(request.user, str) else None,
        }
        self._head: dict[str, Any] = {
            "id": f"resp_{context.request_id}",
            "object": "response",
            "created_at": int(time.time()),
        }

    def running(self) -> dict[str, Any]:
        """The response before its first token."""
        return self._response("in_progress", None, [], None)

    def finished(self, choice: Choice) -> dict[str, Any]:
        """The response at its end."""
        record = self.record
        status = _status(choice)
        used = {
            "input_tokens": record.prompt_tokens,
            "input_tokens_details": {"cached_tokens": record.cached_tokens},
            "output_tokens": record.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": record.prompt_tokens + record.completion_tokens,
        }
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return self._response(status, details, [self.item(status, [self.part(choice)])], used)

    def item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        """The one message of the output."""
        return {"type": "message", "id": self.item_id, "status": status, "role": "assistant", "content": content}

    def part(self, choice: Choice) -> dict[str, Any]:
        """The one part of that message."""
        return {
            "type": "output_text",
            "text": choice.text,
            "annotations": [],
            "logprobs": self.logprobs(choice.logprobs),
        }

    def logprobs(self, entries: Any) -> list[PositionLogprobs]:
        """Log probabilities of tokens; empty if the request does not ask for them."""
        if self._to_logprobs is None or not entries:
            return []
        return self._to_logprobs(entries).content

    def _response(
        self,
        status: str,
        incomplete: dict[str, Any] | None,
        output: list[dict[str, Any]],
        used: dict[str, Any] | None,
    ) -> dict[str, Any]:
        return {
            **self._head,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": incomplete,
            "output": output,
            "usage": used,
            **self._shared,
        }


def _status(choice: Choice) -> str:
    return "completed" if choice.finish_reason == "stop" else "incomplete"


class _ResponseStream(StreamWriter, ErrorFormat):
    """Events of one response, numbered from 0, its error among them."""

    def __init__(self, shape: _Shape) -> None:
        self._shape = shape
        self._number = 0
        self._choice = Choice()
        self._place = {"item_id": shape.item_id, "output_index": 0, "content_index": 0}

    def _frame(self, kind: str, **fields: Any) -> bytes:
        data = _encode({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)

    def opening(self) -> bytes:
        """The start of the response, its message and its part."""
        running = self._shape.running()
        empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return (
            self._frame("response.created", response=running)
            + self._frame("response.in_progress", response=running)
            + self._frame("response.output_item.added", output_index=0, item=self._shape.item("in_progress", []))
            + self._frame("response.content_part.added", **self._place, part=empty)
        )

    def event(self, event: OutputEvent) -> bytes:
        """A delta of the text."""
        self._choice.add(event)
        if not (event.text or event.logprobs):
            return b""
        logprobs = self._shape.logprobs(event.logprobs)
        return self._frame("response.output_text.delta", **self._place, delta=event.text, logprobs=logprobs)

    def closing(self) -> bytes:
        """The end of the part, the message and the response."""
        part = self._shape.part(self._choice)
        status = _status(self._choice)
        return (
            self._frame("response.output_text.done", **self._place, text=part["text"], logprobs=part["logprobs"])
            + self._frame("response.content_part.done", **self._place, part=part)
            + self._frame("response.output_item.done", output_index=0, item=self._shape.item(status, [part]))
            + self._frame(f"response.{status}", response=self._shape.finished(self._choice))
        )

    def last_event(self, status: int, error: dict[str, Any]) -> bytes:
        """The error as fields, as OpenAI documents it, and as the object that clients look for."""
        code = error["code"] or str(status)
        fields = {"code": code, "message": error["message"], "param": error["param"]}
        return self._frame("error", **fields, error={**error, "code": code})
