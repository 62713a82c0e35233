"""Summary, description and types of each route, for `/openapi.json`."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.server.apis.anthropic.routes import CountTokensRequest, InputTokens, Message, MessagesRequest
from octavo.server.apis.ollama import requests as ollama_protocol
from octavo.server.apis.openai.chat_request import ChatCompletionRequest
from octavo.server.apis.openai.completion_request import CompletionRequest
from octavo.server.apis.openai.models_route import Model, ModelList, Version
from octavo.server.apis.openai.responses import ChatCompletion, Completion
from octavo.server.apis.openai.responses_request import ResponsesRequest
from octavo.server.apis.openai.tokenization import DetokenizeRequest, Text, TokenizeRequest, Tokens
from octavo.server.apis.tgi import requests as tgi_protocol

__all__ = ["EVENTS", "OPERATIONS", "Operation"]

EVENTS = "text/event-stream"
_LINES = "application/x-ndjson"
_STREAMS = "With `stream: true` the response is a stream of server-sent events, one or a few tokens each"


class Operation(msgspec.Struct, frozen=True):
    """One route.

    Attributes:
        tag: name of its API.
        summary: one line.
        description: more sentences.
        request: type of the body.
        response: type of the response; None for any.
        stream: content type of a streamed answer.
        example: of the body.
        openai_errors: its errors are OpenAI's.
    """

    tag: str
    summary: str
    description: str = ""
    request: Any = None
    response: Any = None
    stream: str | None = None
    example: Any = None
    openai_errors: bool = False


_MESSAGES = [{"role": "user", "content": "Hello!"}]
_NOT_STORED = "Responses are not stored, so this is always 404. Keep the response of `POST /v1/responses`."
_OPERATORS = "Refused. The operator manages the models with `octavo serve` and its admin port."
_NO_EMBEDDINGS = "Refused. Embeddings are not supported."

OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(
        "OpenAI",
        "Answer a conversation",
        "Renders the messages with the model's chat template and generates `n` replies. "
        f"{_STREAMS}, and ends with `data: [DONE]`. `response_format` constrains the reply to JSON, or to a JSON "
        "schema; `logprobs` returns log probabilities. Unknown fields are ignored; known fields that are not supported "
        "are refused by name.",
        ChatCompletionRequest,
        ChatCompletion,
        EVENTS,
        {"messages": _MESSAGES, "max_tokens": 64},
        openai_errors=True,
    ),
    ("POST", "/v1/completions"): Operation(
        "OpenAI",
        "Continue a text",
        "Continues a prompt without a chat template: a text, token ids, or a list of either. "
        f"{_STREAMS}, and ends with `data: [DONE]`. The default of `max_tokens` is 16; `echo` "
        "puts the prompt before the output.",
        CompletionRequest,
        Completion,
        EVENTS,
        {"prompt": "Once upon a time", "max_tokens": 64},
        openai_errors=True,
    ),
    ("POST", "/v1/responses"): Operation(
        "OpenAI",
        "Answer an input (Responses API)",
        "OpenAI's newer API for chats. Responses are not stored: send the whole conversation "
        f"as `input` each time. {_STREAMS}. `text.format` constrains the output to JSON, or to a JSON schema.",
        ResponsesRequest,
        None,
        EVENTS,
        {"input": "Hello!", "max_output_tokens": 64},
        openai_errors=True,
    ),
    ("GET", "/v1/responses/{response_id}"): Operation(
        "OpenAI", "Read a response again", _NOT_STORED, openai_errors=True
    ),
    ("DELETE", "/v1/responses/{response_id}"): Operation(
        "OpenAI", "Delete a response", _NOT_STORED, openai_errors=True
    ),
    ("POST", "/v1/responses/{response_id}/cancel"): Operation(
        "OpenAI", "Cancel a response", _NOT_STORED, openai_errors=True
    ),
    ("GET", "/v1/models"): Operation(
        "OpenAI",
        "List the models",
        "Every name that a request's `model` may have, aliases among them, loaded or not.",
        response=ModelList,
        openai_errors=True,
    ),
    ("GET", "/v1/models/{name}"): Operation(
        "OpenAI", "Describe a model", "Its name may hold slashes.", response=Model, openai_errors=True
    ),
    ("POST", "/v1/messages"): Operation(
        "Anthropic",
        "Answer a conversation (Messages API)",
        f"For clients of Anthropic's API: text in, text out. {_STREAMS}. `output_config.format` constrains the "
        "reply to a JSON schema.",
        MessagesRequest,
        Message,
        EVENTS,
        {"messages": _MESSAGES, "max_tokens": 64},
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        "Anthropic",
        "Count a conversation's tokens",
        "The prompt tokens of `POST /v1/messages`, without generating.",
        CountTokensRequest,
        InputTokens,
        None,
        {"messages": _MESSAGES},
    ),
    ("POST", "/api/chat"): Operation(
        "Ollama",
        "Answer a conversation (Ollama)",
        "Streams JSON objects, one per line, unless `stream` is false. Without messages it loads the model, or unloads "
        "it if `keep_alive` is 0. `format` constrains the reply to JSON, or to a JSON schema.",
        ollama_protocol.ChatBody,
        None,
        _LINES,
        {"messages": _MESSAGES},
    ),
    ("POST", "/api/generate"): Operation(
        "Ollama",
        "Answer a prompt (Ollama)",
        "Like `/api/chat`, for one prompt. `raw` sends it to the model unchanged. `context` of a response continues "
        "its conversation.",
        ollama_protocol.GenerateBody,
        None,
        _LINES,
        {"prompt": "Hello!"},
    ),
    ("POST", "/api/show"): Operation(
        "Ollama", "Describe a model (Ollama)", "Loads nothing.", ollama_protocol.ModelBody
    ),
    ("GET", "/api/tags"): Operation("Ollama", "List the models (Ollama)", "Loaded or not."),
    ("GET", "/api/ps"): Operation("Ollama", "List the loaded models", "With their size, and when each is unloaded."),
    ("GET", "/api/version"): Operation("Ollama", "Tell the version (Ollama)"),
    ("POST", "/api/pull"): Operation("Ollama", "Download a model", _OPERATORS),
    ("POST", "/api/push"): Operation("Ollama", "Upload a model", _OPERATORS),
    ("POST", "/api/create"): Operation("Ollama", "Create a model", _OPERATORS),
    ("POST", "/api/copy"): Operation("Ollama", "Copy a model", _OPERATORS),
    ("DELETE", "/api/delete"): Operation("Ollama", "Delete a model", _OPERATORS),
    ("POST", "/api/embed"): Operation("Ollama", "Make embeddings", _NO_EMBEDDINGS),
    ("POST", "/api/embeddings"): Operation("Ollama", "Make an embedding", _NO_EMBEDDINGS),
    ("POST", "/generate"): Operation(
        "TGI",
        "Continue a text (TGI)",
        "The whole output at once. `parameters.details` adds its tokens; `parameters.grammar` constrains it to a JSON "
        "schema or a regular expression.",
        tgi_protocol.GenerateBody,
        example={"inputs": "Hello!"},
    ),
    ("POST", "/generate_stream"): Operation(
        "TGI",
        "Continue a text, streamed (TGI)",
        "One server-sent event per token.",
        tgi_protocol.GenerateBody,
        None,
        EVENTS,
        {"inputs": "Hello!"},
    ),
    ("POST", "/"): Operation(
        "TGI",
        "Continue a text, whole or streamed (TGI)",
        "Like `/generate_stream` if `stream` is true, else like `/generate`, within a list.",
        tgi_protocol.GenerateBody,
        None,
        EVENTS,
        {"inputs": "Hello!"},
    ),
    ("GET", "/info"): Operation("TGI", "Describe the model and the limits of a request (TGI)"),
    ("POST", "/tokenize"): Operation(
        "Tokens",
        "Turn a text or a conversation into token ids",
        "The model's chat template renders a conversation first.",
        TokenizeRequest,
        Tokens,
        None,
        {"prompt": "Hello!"},
        openai_errors=True,
    ),
    ("POST", "/detokenize"): Operation(
        "Tokens",
        "Turn token ids into a text",
        "Special tokens are included.",
        DetokenizeRequest,
        Text,
        None,
        {"tokens": [72, 105]},
        openai_errors=True,
    ),
    ("GET", "/tokenizer_info"): Operation(
        "Tokens",
        "Describe the tokenizer",
        "Its special tokens, its size and the chat template, for clients that count tokens or write prompts "
        "themselves. `?model=` names the model.",
        openai_errors=True,
    ),
    ("GET", "/"): Operation("Server", "Say that the server runs", "For Ollama's clients; browsers get links."),
    ("GET", "/health"): Operation(
        "Server", "Tell whether requests are answered", "200 without a body, or 503 with the reason."
    ),
    ("GET", "/ping"): Operation("Server", "Tell whether requests are answered", "Like `/health`."),
    ("POST", "/ping"): Operation("Server", "Tell whether requests are answered", "Like `/health`."),
    ("GET", "/livez"): Operation(
        "Server",
        "Tell whether the process is alive",
        "503 if only a restart helps. For Kubernetes' liveness probe.",
    ),
    ("GET", "/readyz"): Operation(
        "Server",
        "Tell whether the models are ready",
        "503 while they load, with the progress, and when the server is about to stop. For Kubernetes' readiness "
        "probe.",
    ),
    ("GET", "/metrics"): Operation("Server", "Read the metrics", "In Prometheus' text format, with vLLM's names."),
    ("GET", "/version"): Operation("Server", "Tell the version", response=Version, openai_errors=True),
    ("GET", "/docs"): Operation("Server", "Read and try this API", "A page that needs no other server."),
    ("GET", "/openapi.json"): Operation("Server", "Describe this API", "An OpenAPI 3.1 document."),
}
