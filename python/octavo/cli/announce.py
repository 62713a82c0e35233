"""Messages of `octavo serve` about its state: text on a terminal, otherwise log lines."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from octavo.log_format import current_format
from octavo.server.service_manager import notify

if TYPE_CHECKING:
    from octavo.server.models.model_handle import ModelHandle
    from octavo.server.models.registry import ModelRegistry

__all__ = ["Announcer"]

_LOG = logging.getLogger("octavo.server")
_LOADING_INTERVAL_S = 10.0
_EXTENSION_US = 120_000_000


class Announcer:
    """Announces that the server starts, is ready, stops and has stopped.

    On a terminal that is a text with calls to copy. Else every event is a line of the log, with fields for machines.

    Args:
        url: where the server answers.
        admin_url: where its admin listener does.
        shutdown_timeout: seconds.
        needs_key: requests must show an API key.
    """

    def __init__(self, url: str, admin_url: str | None, shutdown_timeout: float, *, needs_key: bool) -> None:
        self._url = url
        self._admin_url = admin_url
        self._shutdown_timeout = shutdown_timeout
        self._needs_key = needs_key
        self._began = self._told = time.monotonic()
        self._for_people = current_format() == "console" and sys.stdout.isatty()

    def starting(self, models: Sequence[str], **more: Any) -> None:
        """The server listens, and the models begin to load."""
        if self._for_people:
            return
        from octavo._core import __version__

        self._log("starting", version=__version__, address=self._url, models=list(models), pid=os.getpid(), **more)

    def loading(self, stage: str, done: int, total: int) -> None:
        """A load makes progress; announced at intervals.

        Args:
            stage: of the load.
            done: of `total`.
            total: 0 where unknown.
        """
        now = time.monotonic()
        if now - self._told < _LOADING_INTERVAL_S:
            return
        self._told = now
        share = f" {100 * done // total} %" if total else ""
        # A load may take longer than systemd waits.
        notify(f"EXTEND_TIMEOUT_USEC={_EXTENSION_US}\nSTATUS=loading: {stage}{share}")
        if not self._for_people:
            self._log("loading", stage=stage, progress=round(done / total, 3) if total else None)

    def ready(self, models: Sequence[ModelHandle], registry: ModelRegistry) -> None:
        """All models are loaded."""
        seconds = time.monotonic() - self._began
        names = list(registry.names)
        notify(f"READY=1\nSTATUS=serving {', '.join(names)} at {self._url}")
        if self._for_people:
            typer.echo(_announcement(self._url, models, registry, seconds, self._needs_key))
            if self._admin_url is not None:
                typer.echo(f"Admin routes at {self._admin_url}/admin/models")
            return
        for model in models:
            self._log("model ready", model=model.version, **_facts(model))
        self._log("ready", seconds=round(seconds, 3), address=self._url, admin_address=self._admin_url, models=names)

    def stopping(self, number: signal.Signals, running: int, delay: float) -> None:
        """A signal arrived; requests are accepted for `delay` seconds more."""
        notify(f"STOPPING=1\nSTATUS=stopping: {_answers(running)}")
        if not self._for_people:
            fields = {"drain_delay": delay, "shutdown_timeout": self._shutdown_timeout}
            self._log("stopping", signal=number.name, running=running, **fields)

    def waiting(self, running: int) -> None:
        """New requests are refused; running requests may finish."""
        if self._for_people:
            grace = f"{self._shutdown_timeout:g}"
            typer.echo(f"stopping: {_answers(running)} may take {grace} s more (Ctrl-C: none)", err=True)
        else:
            self._log("refusing new requests", running=running, shutdown_timeout=self._shutdown_timeout)

    def stopped(self, finished: int, aborted: int, seconds: float) -> None:
        """The server has stopped.

        Args:
            finished: answers since the signal that came to their end.
            aborted: answers that were cut short.
            seconds: since the signal.
        """
        if not self._for_people:
            self._log("stopped", finished=finished, aborted=aborted, seconds=round(seconds, 3))

    def _log(self, message: str, **fields: Any) -> None:
        # Lists are for JSON; on a terminal they are words.
        if current_format() != "json":
            fields = {name: ",".join(value) if isinstance(value, list) else value for name, value in fields.items()}
        _LOG.info(message, extra={"fields": fields})


def _answers(running: int) -> str:
    return "1 running answer" if running == 1 else f"{running} running answers"


def _facts(served: ModelHandle) -> dict[str, Any]:
    info = served.engine.model
    return {
        "architecture": info.architecture,
        "dtype": info.dtype,
        "device": info.device,
        "max_model_len": info.max_model_len,
        "kv_cache_tokens": (info.num_blocks - 1) * info.block_size,
    }


def _announcement(
    url: str, models: Sequence[ModelHandle], registry: ModelRegistry, seconds: float, needs_key: bool
) -> str:
    names = ", ".join(registry.names)
    if not models:
        return f"\nServing {names} at {url}, each loaded when it is asked for"
    served = models[0]
    chat = served.engine.tokenizer is not None and served.engine.tokenizer.has_chat_template
    name = registry.default
    if name is None or served.version not in (entry.id for entry in registry.targets(name)):
        name = served.name
    lines = "\n".join(_line(model, len(models) > 1) for model in models)
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
    return f"""
Serving {names} at {url} (ready in {seconds:.1f} s)
{lines}

curl {url}/v1/{path} {header}-H 'Content-Type: application/json' \\
  -d '{{"model": "{name}", {body}}}'

from openai import OpenAI

client = OpenAI(base_url="{url}/v1", api_key="{key}")
{call}
"""


def _line(served: ModelHandle, named: bool) -> str:
    facts = _facts(served)
    what = f"{facts['architecture']}, {facts['dtype']} on {facts['device']}"
    name = f"{served.version}: " if named else ""
    context, kv_tokens = facts["max_model_len"], facts["kv_cache_tokens"]
    return f"  {name}{what}, context {context:,} tokens, KV cache {kv_tokens:,} tokens"
