"""`POST /tokenize`, `POST /detokenize`, `GET /tokenizer_info`: for evaluation tools."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta
from starlette.routing import BaseRoute, Route

from octavo.errors import InvalidRequest
from octavo.server.apis.openai.sampling_fields import TokenId, check_token_ids
from octavo.server.request.decoding import RequestBody, decode, doc
from octavo.server.request.endpoint import Endpoint, RequestContext
from octavo.server.request.limits import check_messages
from octavo.server.request.messages import flatten, render, template_variables

if TYPE_CHECKING:
    from octavo.server.state import ServerState

__all__ = [
    "DetokenizeRequest",
    "Text",
    "TokenizeRequest",
    "Tokens",
    "detokenize",
    "routes",
    "tokenize",
    "tokenizer_info",
]

_MAX_TOKENS = 1 << 20


class TokenizeRequest(RequestBody, kw_only=True):
    """The body of `POST /tokenize`: a text, or messages that the model's chat template writes as one."""

    model: Annotated[str | None, doc("A name that `/v1/models` lists. Default: the server's first.")] = None
    prompt: Annotated[str | None, doc("The text to reply to or to continue.")] = None
    messages: Annotated[
        list[dict[str, Any]] | None, doc("The conversation. Contents are texts, or lists of parts of type text.")
    ] = None
    add_special_tokens: Annotated[
        bool | None,
        doc("Let the tokenizer add its special tokens. Default: false for chats, whose template writes them."),
    ] = None
    return_token_strs: Annotated[bool | None, doc("Return the text of each token too.")] = None
    add_generation_prompt: Annotated[
        bool | None, doc("Let the template open the reply. Default: true, unless the last message is continued.")
    ] = None
    continue_final_message: Annotated[bool | None, doc("Continue the last message where it ends.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, doc("Variables for the model's chat template.")] = None

    def check(self) -> None:
        """Refuse what contradicts itself."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("prompt: give either a prompt or messages", "prompt")
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message: cannot be true together with add_generation_prompt", "continue_final_message"
            )


class DetokenizeRequest(RequestBody, kw_only=True):
    """The body of `POST /detokenize`."""

    tokens: Annotated[Annotated[list[TokenId], Meta(max_length=_MAX_TOKENS)], doc("Token ids.")]
    model: Annotated[str | None, doc("A name that `/v1/models` lists. Default: the server's first.")] = None


class Tokens(msgspec.Struct):
    """The response of `POST /tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(msgspec.Struct):
    """The response of `POST /detokenize`."""

    prompt: str


def routes(state: ServerState) -> list[BaseRoute]:
    """The routes of the tokenizer."""
    return [
        Route("/tokenize", Endpoint(state, tokenize), methods=["POST"]),
        Route("/detokenize", Endpoint(state, detokenize), methods=["POST"]),
        Route("/tokenizer_info", Endpoint(state, tokenizer_info), methods=["GET"]),
    ]


async def tokenize(context: RequestContext) -> None:
    """Token ids of a text or a conversation."""
    request = decode(TokenizeRequest, context.body)
    check_messages(request.messages, context.state.settings)
    model = await context.route(request.model)
    if request.prompt is not None:
        special = True if request.add_special_tokens is None else request.add_special_tokens
        tokens = await model.tokenize(request.prompt, add_special_tokens=special)
    else:
        tokens = await render(
            model,
            flatten(request.messages),
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            add_special_tokens=request.add_special_tokens,
            variables=template_variables(request.chat_template_kwargs),
        )
    strings = None
    if request.return_token_strs:
        token_bytes = await model.token_bytes("return_token_strs")
        strings = [token_bytes(token).decode("utf-8", "replace") for token in tokens]
    await context.reply.json(
        Tokens(count=len(tokens), max_model_len=model.max_model_len, tokens=tokens, token_strs=strings)
    )


async def detokenize(context: RequestContext) -> None:
    """The text of token ids, control tokens included."""
    request = decode(DetokenizeRequest, context.body)
    model = await context.route(request.model)
    tokenizer = model.tokenizer("tokens")

    def work() -> str:
        check_token_ids(request.tokens, model.engine.model.vocab_size, "tokens")
        return tokenizer.decode(request.tokens, False)

    text = await asyncio.to_thread(work)
    await context.reply.json(Text(text))


async def tokenizer_info(context: RequestContext) -> None:
    """Describe the tokenizer, for clients that count tokens or write prompts. `?model=` names the model."""
    from starlette.requests import Request

    model = await context.route(Request(context.scope).query_params.get("model"))
    tokenizer = model.tokenizer("model")
    await context.reply.json(
        {
            "tokenizer_class": type(tokenizer).__name__,
            "vocab_size": model.engine.model.vocab_size,
            "model_max_length": model.max_model_len,
            "bos_token": None,
            "eos_token": None,
            "pad_token": None,
            "unk_token": None,
            **tokenizer.special_tokens,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_ids": sorted({*tokenizer.eos_token_ids, *model.engine.model.eos_token_ids}),
            "chat_template": tokenizer.chat_template,
        }
    )
