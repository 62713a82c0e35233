"""`POST /tokenize`, `POST /detokenize`, `GET /tokenizer_info`: what evaluation tools ask of a served model."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta
from starlette.routing import BaseRoute, Route

from octavo.errors import InvalidRequest
from octavo.server.apis.openai.requests import RequestBody, TokenId, check_token_ids, decode
from octavo.server.request.endpoint import Call, Exchange
from octavo.server.request.limits import check_messages
from octavo.server.request.messages import flatten, render, template_variables

if TYPE_CHECKING:
    from octavo.server.state import ServerState

__all__ = ["DetokenizeRequest", "TokenizeRequest", "detokenize", "routes", "tokenize", "tokenizer_info"]

_MAX_TOKENS = 1 << 20


class TokenizeRequest(RequestBody, kw_only=True):
    """The body of `POST /tokenize`: a text, or messages that the model's chat template writes as one."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        """As `RequestBody.check`."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("prompt: give either a prompt or messages", "prompt")
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message: cannot be true together with add_generation_prompt", "continue_final_message"
            )


class DetokenizeRequest(RequestBody, kw_only=True):
    """The body of `POST /detokenize`."""

    tokens: Annotated[list[TokenId], Meta(max_length=_MAX_TOKENS)]
    model: str | None = None


def routes(state: ServerState) -> list[BaseRoute]:
    """All of them."""
    return [
        Route("/tokenize", Exchange(state, tokenize), methods=["POST"]),
        Route("/detokenize", Exchange(state, detokenize), methods=["POST"]),
        Route("/tokenizer_info", Exchange(state, tokenizer_info), methods=["GET"]),
    ]


async def tokenize(call: Call) -> None:
    """Token ids of a text or a conversation."""
    request = decode(TokenizeRequest, call.body)
    check_messages(request.messages, call.state.settings)
    served = await call.route(request.model)
    if request.prompt is not None:
        special = True if request.add_special_tokens is None else request.add_special_tokens
        tokens = await served.tokenize(request.prompt, add_special_tokens=special)
    else:
        tokens = await render(
            served,
            flatten(request.messages),
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            add_special_tokens=request.add_special_tokens,
            variables=template_variables(request.chat_template_kwargs),
        )
    strings = None
    if request.return_token_strs:
        token_bytes = await served.token_bytes("return_token_strs")
        strings = [token_bytes(token).decode("utf-8", "replace") for token in tokens]
    await call.reply.json(
        {"count": len(tokens), "max_model_len": served.max_model_len, "tokens": tokens, "token_strs": strings}
    )


async def detokenize(call: Call) -> None:
    """The text of token ids, control tokens included."""
    request = decode(DetokenizeRequest, call.body)
    served = await call.route(request.model)
    tokenizer = served.tokenizer("tokens")

    def work() -> str:
        check_token_ids(request.tokens, served.engine.model.vocab_size, "tokens")
        return tokenizer.decode(request.tokens, False)

    text = await asyncio.to_thread(work)
    await call.reply.json({"prompt": text})


async def tokenizer_info(call: Call) -> None:
    """What a client must know of the tokenizer to count and to write prompts itself; `?model=` names the model."""
    from starlette.requests import Request

    served = await call.route(Request(call.scope).query_params.get("model"))
    tokenizer = served.tokenizer("model")
    await call.reply.json(
        {
            "tokenizer_class": type(tokenizer).__name__,
            "vocab_size": served.engine.model.vocab_size,
            "model_max_length": served.max_model_len,
            "bos_token": None,
            "eos_token": None,
            "pad_token": None,
            "unk_token": None,
            **tokenizer.special_tokens,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_ids": sorted({*tokenizer.eos_token_ids, *served.engine.model.eos_token_ids}),
            "chat_template": tokenizer.chat_template,
        }
    )
