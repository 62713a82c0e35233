"""Ollama's routes for models: list, describe, load and unload."""

from __future__ import annotations

import contextlib
import hashlib
import html
import re
import time
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from octavo._core import __version__
from octavo.errors import InvalidRequest, ModelNotServed
from octavo.server.apis.ollama.requests import ModelBody
from octavo.server.error_responses import Forbidden
from octavo.server.models.model_handle import ModelHandle
from octavo.server.models.registry_entry import RegistryEntry
from octavo.server.request.decoding import decode
from octavo.server.request.endpoint import RequestContext

if TYPE_CHECKING:
    from octavo.server.models.registry import ModelRegistry
    from octavo.server.state import ServerState
from octavo.server.transport.http import json_response

__all__ = ["Reads", "load_or_unload", "now", "refuse", "route", "set_keep_alive", "show"]

_NEVER = "9999-12-31T23:59:59Z"
_QUANTIZATION = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def now() -> str:
    """The time, as `created_at` has it."""
    return _time(time.time())


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat().replace("+00:00", "Z")


# -------------------------------------------------------- by name


def _known_as(registry: ModelRegistry, name: str) -> str:
    """The name that the registry has for a model.

    Raises:
        ModelNotServed: in Ollama's words.
    """
    for candidate in (name, name.removesuffix(":latest")):
        try:
            registry.targets(candidate)
        except ModelNotServed:
            continue
        return candidate
    raise ModelNotServed(f"model '{name[:200]}' not found, try pulling it first", "model")


async def route(context: RequestContext, name: str) -> ModelHandle:
    """The model for a name as Ollama's clients give it."""
    context.state.check_ready()
    return await context.route(_known_as(context.state.registry, name))


def _may_unload(context: RequestContext) -> bool:
    """Whether the client may unload models: with an admin key, or without keys if idle models are unloaded anyway."""
    identity = context.identity
    return "admin" in identity.scopes and (not identity.anonymous or context.state.settings.idle_unload is not None)


def set_keep_alive(context: RequestContext, model: ModelHandle, seconds: float | None) -> None:
    """Apply a request's `keep_alive` if the client may unload models; else ignore it."""
    if seconds is not None and _may_unload(context):
        # A model that was removed meanwhile completes its running requests.
        with contextlib.suppress(ModelNotServed):
            context.state.registry.set_keep_alive(model.version, seconds)


async def load_or_unload(context: RequestContext, name: str, seconds: float | None, empty: dict[str, Any]) -> None:
    """Respond to a request without a prompt, which loads a model or, with a `keep_alive` of 0, unloads it.

    Raises:
        Forbidden: to unload takes a key of the scope `admin`.
        InvalidRequest: the model could not be loaded again, or is to stay.
    """
    if seconds == 0:
        await _unload(context, name)
    else:
        set_keep_alive(context, await route(context, name), seconds)
    reason = "unload" if seconds == 0 else "load"
    await context.reply.json({"model": name, "created_at": now(), **empty, "done": True, "done_reason": reason})


async def _unload(context: RequestContext, name: str) -> None:
    state = context.state
    state.check_ready()
    entries = state.registry.targets(_known_as(state.registry, name))
    entry = entries[0]
    if not _may_unload(context):
        raise Forbidden(
            "keep_alive: unloading a model requires an API key with the scope `admin`; remove the field, or start the "
            "server with --idle-unload to unload idle models"
        )
    if entry.pinned or entry.config is None or not state.settings.autoload:
        raise InvalidRequest(
            f"keep_alive: `{entry.id}` cannot be unloaded on this server; remove the field", "keep_alive"
        )
    if len(entries) > 1:
        raise InvalidRequest(
            f"keep_alive: `{name[:80]}` is an alias of {len(entries)} models; name one of them", "keep_alive"
        )
    await state.registry.unload(entry.id)


# -------------------------------------------------------- what a model is


def _details(entry: RegistryEntry) -> dict[str, Any]:
    info = entry.info
    architecture = "" if info is None else str(info.architecture)
    family = re.sub(r"(For[A-Z]\w*|Model|LMHead\w*)$", "", architecture).lower() or "unknown"
    dtype = "" if info is None else str(info.dtype)
    return {
        "parent_model": "",
        "format": "gguf" if _source(entry).lower().endswith(".gguf") else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": _QUANTIZATION.get(dtype, dtype),
    }


def _source(entry: RegistryEntry) -> str:
    if entry.info is not None:
        return str(entry.info.name)
    return entry.id if entry.config is None else entry.config.model


def _listed(entry: RegistryEntry, name: str) -> dict[str, Any]:
    details = _details(entry)
    size = 0 if entry.info is None else int(entry.info.weights_bytes)
    # Ollama's is of the files; ours tells models apart without reading them.
    digest = hashlib.sha256(f"{entry.id}\n{_source(entry)}".encode()).hexdigest()
    return {
        "name": name,
        "model": name,
        "modified_at": _time(entry.created),
        "size": size,
        "digest": digest,
        "details": details,
    }


async def show(context: RequestContext) -> None:
    """`POST /api/show`; loads nothing."""
    context.state.check_ready()
    registry = context.state.registry
    entry = registry.targets(_known_as(registry, decode(ModelBody, context.body).model_name))[0]
    details, info = _details(entry), entry.info
    family = details["family"]
    model_info: dict[str, Any] = {"general.architecture": family, "general.basename": _source(entry)}
    if info is not None:
        model_info |= {
            f"{family}.context_length": int(info.max_model_len),
            f"{family}.vocab_size": int(info.vocab_size),
            "tokenizer.ggml.eos_token_ids": list(info.eos_token_ids),
        }
    defaults = {} if info is None else info.sampling_defaults
    await context.reply.json(
        {
            "license": "",
            "modelfile": f"FROM {_source(entry)}\n",
            "parameters": "\n".join(f"{key} {value:g}" for key, value in defaults.items()),
            "template": "",
            "details": details,
            "model_info": model_info,
            "capabilities": ["completion"],
            "modified_at": _time(entry.created),
        }
    )


async def refuse(context: RequestContext) -> None:
    """Refuse changes of the models on disk, and embeddings.

    Raises:
        InvalidRequest: always.
    """
    action = context.scope["path"].rsplit("/", 1)[-1]
    if action.startswith("embed"):
        raise InvalidRequest(f"{action}: this server does not support embeddings")
    raise InvalidRequest(
        f"{action}: the models of this server cannot be changed; start another server with "
        "`octavo serve NAME`, or ask the operator of this one"
    )


class Reads:
    """The GET routes."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def index(self, request: Request) -> Response:
        """`GET /`: the text that Ollama's clients look for, and an index for browsers and others."""
        if "ollama" in request.headers.get("user-agent", "").lower():
            return PlainTextResponse("Ollama is running")
        models = self._state.registry.names
        links = ["/v1/models", "/health", "/metrics", "/docs", "/openapi.json"]
        if "text/html" not in request.headers.get("accept", ""):
            return json_response({"name": "octavo", "version": __version__, "models": models, "links": links})
        items = "".join(f'<li><a href=".{link}">{link}</a></li>' for link in links)
        names = "".join(f"<li>{html.escape(name)}</li>" for name in models) or "<li>none yet</li>"
        page = f"<!doctype html><title>Octavo</title><h1>Octavo {__version__}</h1><ul>{names}</ul><ul>{items}</ul>"
        return HTMLResponse(page)

    async def tags(self, request: Request) -> Response:
        """`GET /api/tags`: all models, loaded or not."""
        registry = self._state.registry
        return json_response({"models": [_listed(registry.targets(name)[0], name) for name in registry.names]})

    async def running(self, request: Request) -> Response:
        """`GET /api/ps`: the loaded models."""
        registry = self._state.registry
        models = []
        for name in registry.names:
            for entry in registry.targets(name):
                if entry.engine is not None:
                    models.append(_listed(entry, name) | self._runs(entry))
        return json_response({"models": models})

    def _runs(self, entry: RegistryEntry) -> dict[str, Any]:
        info, granted = entry.info, self._state.registry.keep_alive(entry)
        left = None if granted is None else entry.last_used + granted - time.monotonic()
        return {
            "expires_at": _NEVER if left is None else _time(time.time() + max(left, 0.0)),
            "size_vram": int(info.weights_bytes + info.kv_bytes) if info.device == "cuda" else 0,
            "context_length": int(info.max_model_len),
        }

    async def version(self, request: Request) -> Response:
        """`GET /api/version`."""
        return json_response({"version": __version__})
