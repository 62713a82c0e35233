"""`octavo serve`."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec
import typer

from octavo.cli.console import loading_progress
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.server.hosts import check_exposure, check_settings
from octavo.server.listen import bind
from octavo.server.logs import configure_logging

if TYPE_CHECKING:
    from octavo.server.auth import KeyRing
    from octavo.server.served import ServedModel
    from octavo.server.settings import ServerSettings

__all__ = ["serve_command"]

_LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


def serve_command(
    config: EngineConfig,
    settings: ServerSettings,
    host: str,
    port: int,
    shutdown_timeout: float,
    uvicorn_log_level: str,
    log_format: str,
    log_level: str,
    keys: KeyRing,
    insecure: bool,
) -> None:
    """Take the port, load the model, serve until a signal.

    Raises:
        OctavoError: the port is taken or would be open to all, or the model cannot be loaded.
    """
    if uvicorn_log_level not in _LOG_LEVELS:
        raise ConfigError(f"uvicorn_log_level: {uvicorn_log_level!r} is not one of {', '.join(_LOG_LEVELS)}")
    configure_logging(log_format, log_level)
    settings = msgspec.structs.replace(settings, host=host)
    check_settings(settings, has_keys=keys.required)
    listener = bind(host, port)
    try:
        check_exposure(listener.getsockname()[0], has_keys=keys.required, insecure=insecure)
    except ConfigError:
        listener.close()
        raise
    import uvloop

    uvloop.run(_serve(config, settings, listener, shutdown_timeout, uvicorn_log_level, keys))


async def _serve(
    config: EngineConfig,
    settings: ServerSettings,
    listener: socket.socket,
    shutdown_timeout: float,
    uvicorn_log_level: str,
    keys: KeyRing,
) -> None:
    from octavo.engine.async_engine import AsyncEngine

    began = time.monotonic()
    url = _url(listener, settings)

    with ExitStack() as shown:
        progress = shown.enter_context(loading_progress())
        engine = asyncio.ensure_future(AsyncEngine.start(config, progress=progress))
        # The engine's process starts now, and loads while this one imports the server.
        await asyncio.sleep(0)
        from octavo.server.lifecycle import serve
        from octavo.server.state import ServerState

        def announce(models: list[ServedModel]) -> None:
            shown.close()
            typer.echo(_announcement(url, models[0], config.served_model_name, time.monotonic() - began, keys.required))

        def wait(num_running: int) -> None:
            answers = "1 running answer" if num_running == 1 else f"{num_running} running answers"
            typer.echo(f"stopping: {answers} may take {shutdown_timeout:g} s more (Ctrl-C: none)", err=True)

        await serve(
            listener,
            engine,
            names=config.served_model_name,
            grace=shutdown_timeout,
            log_level=uvicorn_log_level,
            on_ready=announce,
            on_wait=wait,
            state=ServerState(settings, keys=keys),
        )


def _url(listener: socket.socket, settings: ServerSettings) -> str:
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
    return f"{'https' if settings.ssl_certfile else 'http'}://{shown}:{port}"


def _announcement(url: str, served: ServedModel, names: Sequence[str], seconds: float, needs_key: bool) -> str:
    info = served.engine.model
    kv_tokens = (info.num_blocks - 1) * info.block_size
    chat = served.engine.tokenizer is not None and served.engine.tokenizer.has_chat_template
    name = served.name
    if chat:
        path, body = "chat/completions", '"messages": [{"role": "user", "content": "What is the capital of France?"}]'
        call = (
            f'answer = client.chat.completions.create(\n    model="{name}",\n'
            f'    messages=[{{"role": "user", "content": "What is the capital of France?"}}],\n)\n'
            "print(answer.choices[0].message.content)"
        )
    else:
        path, body = "completions", '"prompt": "The capital of France is", "max_tokens": 64'
        call = (
            f'answer = client.completions.create(model="{name}", prompt="The capital of France is", max_tokens=64)\n'
            "print(answer.choices[0].text)"
        )
    header = "-H 'Authorization: Bearer KEY' " if needs_key else ""
    key = "KEY" if needs_key else "none"
    what = f"{info.architecture}, {info.dtype} on {info.device}"
    return f"""
Serving {", ".join(names or served.names)} at {url} (ready in {seconds:.1f} s)
  {what}, context {info.max_model_len:,} tokens, KV cache {kv_tokens:,} tokens

curl {url}/v1/{path} {header}-H 'Content-Type: application/json' \\
  -d '{{"model": "{name}", {body}}}'

from openai import OpenAI

client = OpenAI(base_url="{url}/v1", api_key="{key}")
{call}
"""
