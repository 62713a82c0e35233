"""One engine and its answers, for commands that talk in a terminal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

from octavo.cli.console import loading_progress
from octavo.cli.flags import reading_options
from octavo.config import EngineConfig
from octavo.errors import InvalidRequest
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.engine.async_engine import AsyncEngine

__all__ = ["Session", "open_session"]


class Session:
    """A loaded model.

    Args:
        engine: that runs it.
        sampling: `SamplingParams` fields by the command line; None is absent.
    """

    def __init__(self, engine: AsyncEngine, sampling: Mapping[str, Any]) -> None:
        self.engine = engine
        self._sampling = {key: value for key, value in sampling.items() if value is not None}

    @property
    def can_chat(self) -> bool:
        """Whether the model has a chat template."""
        tokenizer = self.engine.tokenizer
        return tokenizer is not None and tokenizer.has_chat_template

    async def complete(self, text: str, max_tokens: int | None) -> AsyncIterator[str]:
        """Go on with a text, piece by piece.

        Args:
            text: the prompt.
            max_tokens: when the command line names none.
        """
        stream: Any = self._stream(text, max_tokens, add_special_tokens=True)
        async with aclosing(stream):
            async for piece in stream:
                yield piece

    async def reply(self, messages: Sequence[Mapping[str, str]]) -> AsyncIterator[str]:
        """Answer a conversation, piece by piece.

        Raises:
            InvalidRequest: the model has no chat template, or the conversation is too long.
        """
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise InvalidRequest("prompt: the model has no tokenizer; name one with --tokenizer")
        text = await asyncio.to_thread(tokenizer.apply_chat_template, messages)
        stream: Any = self._stream(text, None, add_special_tokens=False)
        async with aclosing(stream):
            async for piece in stream:
                yield piece

    async def _stream(self, prompt: str, max_tokens: int | None, *, add_special_tokens: bool) -> AsyncIterator[str]:
        defaults: dict[str, Any] = self.engine.model.sampling_defaults
        params = SamplingParams(**{**defaults, "max_tokens": max_tokens, **self._sampling})
        # A prompt that a chat template wrote has its special tokens already, and the answer begins a text.
        params.begins_text = not add_special_tokens
        stream: Any = self.engine.stream(prompt, params, add_special_tokens=add_special_tokens)
        async with aclosing(stream):
            async for delta in stream:
                if delta.text:
                    yield delta.text


@asynccontextmanager
async def open_session(config: EngineConfig, sampling: Mapping[str, Any]) -> AsyncIterator[Session]:
    """Load a model, with a progress bar, and unload it at the end.

    Raises:
        WrongOption: a sampling field out of range.
        OctavoError: the model cannot be loaded.
    """
    with reading_options():
        SamplingParams(**{key: value for key, value in sampling.items() if value is not None})
    from octavo.engine.async_engine import AsyncEngine

    with loading_progress() as progress:
        engine = await AsyncEngine.start(config, progress=progress)
    try:
        yield Session(engine, sampling)
    finally:
        await engine.close()
