"""The engine for asyncio programs: the model runs in a worker process, its answers arrive as streams."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

from octavo.config import EngineConfig
from octavo.engine.outputs import OutputDelta, RequestOutput
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.runner.info import ModelInfo
    from octavo.text.tokenizer import Tokenizer

__all__ = ["AsyncEngine", "Progress"]

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total); total is 0 where it is not known."""


class AsyncEngine:
    """One model in a worker process, for one event loop.

    Attributes:
        config: as given.
        model: what was loaded.
        tokenizer: the model's tokenizer and chat template; None for a model that has none.
    """

    config: EngineConfig
    model: ModelInfo
    tokenizer: Tokenizer | None

    @classmethod
    async def start(cls, config: EngineConfig, *, progress: Progress | None = None) -> AsyncEngine:
        """Start the worker process and wait until the model is ready.

        Args:
            config: the model and the engine's settings.
            progress: called in the event loop as the worker loads.

        Raises:
            ModelError, ConfigError: the worker's own refusal (`ModelNotFound`, `CorruptFile`, `NotEnoughMemory`...).
            EngineDead: the worker process ended before it was ready.
        """
        raise NotImplementedError

    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        add_special_tokens: bool = True,
    ) -> AsyncIterator[OutputDelta]:
        """Answer a prompt, piece by piece.

        The request is submitted when the iterator is first advanced, so a refusal is raised by the first
        `__anext__`. Closing the iterator, or cancelling the task that awaits it, aborts the request: its blocks are
        free within a step. Every answer's last delta carries its `finish_reason`; the iterator ends after the last
        answer's.

        A consumer may be as slow as it likes: what arrives meanwhile is merged into one delta an answer, so memory is
        bounded by the answers themselves and no other stream waits.

        Args:
            prompt: text, or token ids.
            params: how to sample; `SamplingParams()` when None.
            request_id: for `abort`; made up when None.
            add_special_tokens: let the tokenizer add its start token to a text (a rendered chat template has its own).

        Raises:
            InvalidRequest: empty prompt, an id outside the vocabulary, a request id in use.
            ContextLengthExceeded, CapacityExceeded: can never fit.
            EngineDead: the worker process ended; the answer is lost.
        """
        raise NotImplementedError

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        add_special_tokens: bool = True,
    ) -> RequestOutput:
        """Answer a prompt, whole; arguments and errors as for `stream`. Cancelling the task aborts the request."""
        raise NotImplementedError

    async def chat(
        self, messages: Sequence[dict[str, Any]], params: SamplingParams | None = None, **template_arguments: Any
    ) -> RequestOutput:
        """Answer a conversation, through the model's chat template.

        Args:
            messages: OpenAI's `{"role": ..., "content": ...}`.
            params: how to sample; up to the context's end when None.
            template_arguments: passed to the template.
        """
        raise NotImplementedError

    async def tokenize(self, prompt: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, computed in a thread."""
        raise NotImplementedError

    def abort(self, request_id: str) -> bool:
        """End a request early; its stream gives one last delta an answer with `finish_reason` "abort".

        Returns:
            False when no such request runs.
        """
        raise NotImplementedError

    async def stats(self) -> dict[str, int | float]:
        """The core's gauges and counters, by name, with the engine's own.

        Raises:
            EngineDead: the worker process ended.
        """
        raise NotImplementedError

    def check_health(self) -> None:
        """Raise EngineDead once the worker process has ended."""
        raise NotImplementedError

    async def close(self) -> None:
        """End the worker process; open streams raise EngineDead. Idempotent."""
        raise NotImplementedError

    async def __aenter__(self) -> AsyncEngine:
        """The engine itself; `close` at the end of the block."""
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Close."""
        await self.close()
