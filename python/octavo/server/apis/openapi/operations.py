"""What each route does, in its users' words, and what its code does not say of it."""

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
_STREAMS = "With `stream: true` the answer comes as server-sent events, a token or a few at a time"


class Operation(msgspec.Struct, frozen=True):
    """One route.

    Attributes:
        tag: whose API it is of.
        summary: in a line.
        description: more of it.
        request: type of the body.
        response: type of the response; None for any.
        stream: content type of a streamed answer.
        example: a body to try.
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
_NOT_STORED = "This server stores no responses, so the answer is always 404: keep what `POST /v1/responses` answers."
_OPERATORS = "Refused: models on disk are the operator's. `octavo serve` and its admin port load and unload them."
_NO_EMBEDDINGS = "Refused: the models here write text, and make no embeddings."

OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(
        "OpenAI",
        "Answer a conversation",
        "Renders the messages with the model's chat template and generates the assistant's answer, or `n` of them. "
        f"{_STREAMS}, and ends with `data: [DONE]`. `response_format` holds the answer to JSON, or to a JSON schema; "
        "`logprobs` tells how likely its tokens were. Unknown fields are ignored; known ones that cannot be honoured "
        "are refused by name.",
        ChatCompletionRequest,
        ChatCompletion,
        EVENTS,
        {"messages": _MESSAGES, "max_tokens": 64},
        True,
    ),
    ("POST", "/v1/completions"): Operation(
        "OpenAI",
        "Continue a text",
        "Goes on with a prompt as it is, without a chat template: a text, token ids, or a list of either. "
        f"{_STREAMS}, and ends with `data: [DONE]`. Generates 16 tokens unless `max_tokens` says otherwise; `echo` "
        "puts the prompt before the answer.",
        CompletionRequest,
        Completion,
        EVENTS,
        {"prompt": "Once upon a time", "max_tokens": 64},
        True,
    ),
    ("POST", "/v1/responses"): Operation(
        "OpenAI",
        "Answer an input (Responses API)",
        "As `/v1/chat/completions`, in the form of OpenAI's newer API. Nothing is stored: send the whole conversation "
        f"as `input` each time. {_STREAMS}. `text.format` holds the answer to JSON, or to a JSON schema.",
        ResponsesRequest,
        None,
        EVENTS,
        {"input": "Hello!", "max_output_tokens": 64},
        True,
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
        f"For clients of Anthropic's API: text in, text out. {_STREAMS}. `output_config.format` holds the answer to a "
        "JSON schema.",
        MessagesRequest,
        Message,
        EVENTS,
        {"messages": _MESSAGES, "max_tokens": 64},
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        "Anthropic",
        "Count a conversation's tokens",
        "What `POST /v1/messages` would read, without generating an answer.",
        CountTokensRequest,
        InputTokens,
        None,
        {"messages": _MESSAGES},
    ),
    ("POST", "/api/chat"): Operation(
        "Ollama",
        "Answer a conversation (Ollama)",
        "Streams JSON objects, one a line, unless `stream` is false. Without messages it loads the model, or unloads "
        "it where `keep_alive` is 0. `format` holds the answer to JSON, or to a JSON schema.",
        ollama_protocol.ChatBody,
        None,
        _LINES,
        {"messages": _MESSAGES},
    ),
    ("POST", "/api/generate"): Operation(
        "Ollama",
        "Answer a prompt (Ollama)",
        "As `/api/chat`, for one prompt; `raw` sends it to the model as it is. `context` of an answer goes on with its "
        "conversation.",
        ollama_protocol.GenerateBody,
        None,
        _LINES,
        {"prompt": "Hello!"},
    ),
    ("POST", "/api/show"): Operation(
        "Ollama", "Describe a model (Ollama)", "Loads nothing.", ollama_protocol.ModelBody
    ),
    ("GET", "/api/tags"): Operation("Ollama", "List the models (Ollama)", "Loaded or not."),
    ("GET", "/api/ps"): Operation("Ollama", "List the loaded models", "Of what size, and when each is unloaded."),
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
        "The whole answer at once. `parameters.details` adds its tokens; `parameters.grammar` holds it to a JSON "
        "schema or a regular expression.",
        tgi_protocol.GenerateBody,
        example={"inputs": "Hello!"},
    ),
    ("POST", "/generate_stream"): Operation(
        "TGI",
        "Continue a text, streamed (TGI)",
        "A server-sent event a token.",
        tgi_protocol.GenerateBody,
        None,
        EVENTS,
        {"inputs": "Hello!"},
    ),
    ("POST", "/"): Operation(
        "TGI",
        "Continue a text, whole or streamed (TGI)",
        "As `/generate_stream` where `stream` is true, else as `/generate`, within a list.",
        tgi_protocol.GenerateBody,
        None,
        EVENTS,
        {"inputs": "Hello!"},
    ),
    ("GET", "/info"): Operation("TGI", "Describe the model and the limits of a request (TGI)"),
    ("POST", "/tokenize"): Operation(
        "Tokens",
        "Turn a text or a conversation into token ids",
        "A conversation is written by the model's chat template first.",
        TokenizeRequest,
        Tokens,
        None,
        {"prompt": "Hello!"},
        True,
    ),
    ("POST", "/detokenize"): Operation(
        "Tokens",
        "Turn token ids into a text",
        "Control tokens are written out too.",
        DetokenizeRequest,
        Text,
        None,
        {"tokens": [72, 105]},
        True,
    ),
    ("GET", "/tokenizer_info"): Operation(
        "Tokens",
        "Describe the tokenizer",
        "Its special tokens, its size and the chat template, for clients that count tokens or write prompts "
        "themselves. `?model=` names the model.",
        openai_errors=True,
    ),
    ("GET", "/"): Operation("Server", "Say that the server runs", "What Ollama's clients ask; browsers get links."),
    ("GET", "/health"): Operation(
        "Server", "Tell whether requests are answered", "200 with nothing in it, or 503 with the reason."
    ),
    ("GET", "/ping"): Operation("Server", "Tell whether requests are answered", "As `/health`."),
    ("POST", "/ping"): Operation("Server", "Tell whether requests are answered", "As `/health`."),
    ("GET", "/livez"): Operation(
        "Server",
        "Tell whether the process is alive",
        "503 when nothing but a new process helps. For Kubernetes' liveness probe.",
    ),
    ("GET", "/readyz"): Operation(
        "Server",
        "Tell whether the models are ready",
        "503 while they load, with the progress, and when the server is about to stop. For Kubernetes' readiness "
        "probe.",
    ),
    ("GET", "/metrics"): Operation("Server", "Read the metrics", "In Prometheus' text format, under vLLM's names."),
    ("GET", "/version"): Operation("Server", "Tell the version", response=Version, openai_errors=True),
    ("GET", "/docs"): Operation("Server", "Read and try this API", "A page that needs no other server."),
    ("GET", "/openapi.json"): Operation("Server", "Describe this API", "An OpenAPI 3.1 document."),
}
