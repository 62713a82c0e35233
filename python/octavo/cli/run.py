"""`octavo run`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from typing import Any

from octavo.cli.session import open_session
from octavo.config import EngineConfig
from octavo.errors import InvalidRequest

__all__ = ["RAW_MAX_TOKENS", "run_command"]

# A plain completion seldom ends by itself.
RAW_MAX_TOKENS = 256


def run_command(config: EngineConfig, prompt: str, raw: bool, system: str | None, sampling: Mapping[str, Any]) -> None:
    """Answer one prompt on standard output.

    Args:
        config: the model.
        prompt: `-` reads it from standard input.
        raw: go on with the text as it is; else the model's chat template is used where it has one.
        system: the system message.
        sampling: `SamplingParams` fields; None is absent.

    Raises:
        OctavoError: nothing to answer, or the model cannot be loaded or refuses.
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise InvalidRequest("prompt: empty; give a text", "prompt")
    asyncio.run(_run(config, text, raw, system, sampling))


async def _run(config: EngineConfig, text: str, raw: bool, system: str | None, sampling: Mapping[str, Any]) -> None:
    async with open_session(config, sampling) as session:
        if raw or not session.can_chat:
            pieces = session.complete(text, RAW_MAX_TOKENS)
        else:
            messages = [{"role": "system", "content": system}] if system else []
            pieces = session.reply([*messages, {"role": "user", "content": text}])
        last = ""
        async for piece in pieces:
            sys.stdout.write(piece)
            sys.stdout.flush()
            last = piece
        if not last.endswith("\n"):
            sys.stdout.write("\n")
