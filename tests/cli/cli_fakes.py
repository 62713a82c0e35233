"""`octavo` with the server tests' engine in place of the real one: `python cli_fakes.py serve fake ...`.

FAKE_ENGINE_DELAY sets its seconds a token, FAKE_ENGINE_LOADING how long it loads; the model `missing` cannot be loaded.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

from octavo.config import EngineConfig
from octavo.engine import async_engine, supervisor
from octavo.engine.outputs import OutputDelta
from octavo.errors import ModelNotFound
from octavo.sampling_params import SamplingParams
from server_fakes import FakeEngine


class CommandEngine(FakeEngine):
    """Takes texts too, and says on standard error what it was asked."""

    @classmethod
    async def start(cls, config: EngineConfig, *, progress: Any = None) -> CommandEngine:
        if config.model == "missing":
            raise ModelNotFound("model: there is no 'missing'")
        progress("weights", 1, 2)
        if seconds := float(os.environ.get("FAKE_ENGINE_LOADING", "0")):
            sys.stderr.write("[loading]\n")
            sys.stderr.flush()
            try:
                await asyncio.sleep(seconds)
            finally:
                sys.stderr.write("[loading ended]\n")
        return cls(float(os.environ.get("FAKE_ENGINE_DELAY", "0")), config.max_model_len or 256)

    async def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        add_special_tokens: bool = True,
        **how: Any,
    ) -> AsyncIterator[OutputDelta]:
        if isinstance(prompt, str):
            sys.stderr.write(f"[prompt {prompt!r} {params.max_tokens} {params.temperature:g}]\n")
            prompt = self.tokenizer.encode(prompt, add_special_tokens)
        async for delta in super().stream(prompt, params, **how):
            yield delta


if __name__ == "__main__":
    async_engine.AsyncEngine = CommandEngine  # type: ignore[assignment, misc]
    supervisor.SupervisedEngine = CommandEngine  # type: ignore[assignment, misc]
    from octavo.cli import main

    main()
