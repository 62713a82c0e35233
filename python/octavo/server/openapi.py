"""`GET /openapi.json`: every route of the application, its requests from the types that decode them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from octavo._core import __version__
from octavo.server import ollama_protocol, tgi_protocol
from octavo.server.answer_schemas import ANSWERS, reference
from octavo.server.anthropic import CountTokensRequest, MessagesRequest
from octavo.server.protocol import ChatCompletionRequest, CompletionRequest
from octavo.server.responses import ResponsesRequest
from octavo.server.tokens import DetokenizeRequest, TokenizeRequest

if TYPE_CHECKING:
    from octavo.server.state import ServerState

__all__ = ["document", "routes"]

_EVENTS = "text/event-stream"
_JSON = "application/json"


class _Operation(msgspec.Struct, frozen=True):
    """What a route's code does not say of it.

    Attributes:
        request: type of the body.
        answer: schema by name; None for any.
        stream: content type of a streamed answer.
        example: a body to try.
        error: schema by name; None for any.
    """

    request: Any = None
    answer: str | None = None
    stream: str | None = None
    example: Any = None
    error: str | None = "Error"


_MESSAGES = [{"role": "user", "content": "Hello!"}]
_OPERATIONS: dict[tuple[str, str], _Operation] = {
    ("POST", "/v1/chat/completions"): _Operation(
        ChatCompletionRequest, "ChatCompletion", _EVENTS, {"messages": _MESSAGES, "max_tokens": 64}
    ),
    ("POST", "/v1/completions"): _Operation(
        CompletionRequest, "Completion", _EVENTS, {"prompt": "Once upon a time", "max_tokens": 64}
    ),
    ("POST", "/v1/responses"): _Operation(
        ResponsesRequest, "Response", _EVENTS, {"input": "Hello!", "max_output_tokens": 64}
    ),
    ("POST", "/v1/messages"): _Operation(
        MessagesRequest, "Message", _EVENTS, {"messages": _MESSAGES, "max_tokens": 64}, "AnthropicError"
    ),
    ("POST", "/v1/messages/count_tokens"): _Operation(
        CountTokensRequest, "InputTokens", None, {"messages": _MESSAGES}, "AnthropicError"
    ),
    ("GET", "/v1/models"): _Operation(answer="ModelList"),
    ("GET", "/v1/models/{name}"): _Operation(answer="Model"),
    ("GET", "/version"): _Operation(answer="Version"),
    ("POST", "/tokenize"): _Operation(TokenizeRequest, "Tokens", None, {"prompt": "Hello!"}),
    ("POST", "/detokenize"): _Operation(DetokenizeRequest, "Text", None, {"tokens": [72, 105]}),
    ("GET", "/tokenizer_info"): _Operation(answer="TokenizerInfo"),
    ("POST", "/api/chat"): _Operation(
        ollama_protocol.ChatBody, None, "application/x-ndjson", {"messages": _MESSAGES}, None
    ),
    ("POST", "/api/generate"): _Operation(
        ollama_protocol.GenerateBody, None, "application/x-ndjson", {"prompt": "Hello!"}, None
    ),
    ("POST", "/api/show"): _Operation(ollama_protocol.ModelBody, error=None),
    ("POST", "/generate"): _Operation(tgi_protocol.GenerateBody, example={"inputs": "Hello!"}, error=None),
    ("POST", "/generate_stream"): _Operation(tgi_protocol.GenerateBody, None, _EVENTS, {"inputs": "Hello!"}, None),
    ("POST", "/"): _Operation(tgi_protocol.GenerateBody, None, _EVENTS, {"inputs": "Hello!"}, None),
}
# What these answer is a page or a text for a machine.
_OTHER_TYPES: dict[str, tuple[str, ...]] = {
    "/metrics": ("text/plain",),
    "/docs": ("text/html",),
    "/": ("text/plain", "text/html", _JSON),
    "/health": (),
    "/ping": (),
}
_PARAMETER = re.compile(r"{(\w+)(:\w+)?}")


def document(routes: Sequence[BaseRoute], root_path: str = "") -> dict[str, Any]:
    """The OpenAPI 3.1 document of an application's routes."""
    types = list({operation.request: None for operation in _OPERATIONS.values() if operation.request is not None})
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    by_type = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        if not isinstance(route, Route):
            continue
        path = _PARAMETER.sub(r"{\1}", route.path)
        for method in sorted(route.methods or ()):
            if method != "HEAD":
                paths.setdefault(path, {})[method.lower()] = _operation(route, method, path, by_type)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Octavo",
            "version": __version__,
            "description": "OpenAI's API, with Anthropic's, Ollama's and TGI's beside it.",
        },
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {
            "schemas": {**components, **ANSWERS},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(route: Route, method: str, path: str, by_type: dict[Any, Any]) -> dict[str, Any]:
    known = _OPERATIONS.get((method, path)) or _Operation(error=None)
    content: dict[str, Any] = {}
    for kind in _OTHER_TYPES.get(path, (_JSON,)) if known.request is None else (_JSON,):
        content[kind] = {"schema": reference(known.answer)} if known.answer else {}
    if known.stream is not None:
        content[known.stream] = {}
    error = {"schema": reference(known.error)} if known.error else {}
    summary, description = _said(route)
    operation: dict[str, Any] = {
        "summary": summary,
        "operationId": f"{method.lower()}_{re.sub(r'[^a-z0-9]+', '_', path.lower()).strip('_') or 'root'}",
        "tags": [_tag(path)],
        "responses": {
            "200": {"description": "The answer.", **({"content": content} if content else {})},
            "default": {"description": "What is wrong.", "content": {_JSON: error, "text/plain": {}}},
        },
    }
    if description:
        operation["description"] = description
    names = [match.group(1) for match in _PARAMETER.finditer(route.path)]
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in names
        ]
    if known.request is not None:
        body: dict[str, Any] = {"schema": by_type[known.request]}
        if known.example is not None:
            body["example"] = known.example
        operation["requestBody"] = {"required": True, "content": {_JSON: body}}
    return operation


def _tag(path: str) -> str:
    if path.startswith(("/v1/messages",)):
        return "Anthropic"
    if path.startswith("/v1/"):
        return "OpenAI"
    if path.startswith("/api/"):
        return "Ollama"
    if path in ("/", "/generate", "/generate_stream", "/info"):
        return "TGI"
    return "Server"


def _said(route: Route) -> tuple[str, str]:
    """The first line of what a route's work says of itself, and the rest."""
    work = getattr(route.endpoint, "process", route.endpoint)
    text = inspect.cleandoc(getattr(work, "__doc__", None) or "")
    summary, _, rest = text.partition("\n")
    return summary or route.name, rest.strip()


def routes(state: ServerState) -> list[BaseRoute]:
    """`/openapi.json`."""
    made: list[bytes] = []

    async def openapi(request: Request) -> Response:
        """`GET /openapi.json`: this document."""
        if not made:
            made.append(msgspec.json.encode(document(request.app.routes, state.settings.root_path)))
        return Response(made[0], 200, None, "application/json")

    return [Route("/openapi.json", openapi)]
