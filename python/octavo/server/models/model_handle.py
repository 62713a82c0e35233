"""Handle of a model under a served name, and the interface of its engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

from octavo.engine.outputs import OutputDelta
from octavo.errors import ContextLengthExceeded, InvalidRequest
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.engine.collect import Sink
    from octavo.text.tokenizer import Tokenizer

__all__ = ["TEXT_THREADS", "ClosableEngine", "Engine", "ModelHandle", "split_id"]

TEXT_THREADS = 2
"""Number of threads that render templates and tokenize; the tokenizers crate releases the GIL."""
_text_threads = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="octavo-text")


def split_id(id: str) -> tuple[str, str | None]:
    """Name and version of a model id: `m@v1` gives `m` and `v1`. An `@` within a path does not count."""
    name, at, version = id.rpartition("@")
    return (name, version) if at and name and version and "/" not in version else (id, None)


class Engine(Protocol):
    """Interface of an engine, as `octavo.engine.async_engine.AsyncEngine` has it."""

    @property
    def model(self) -> Any:
        """A `ModelInfo`."""
        ...

    @property
    def tokenizer(self) -> Any:
        """An `octavo.text.tokenizer.Tokenizer`, or None."""
        ...

    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        sink: Sink | None = None,
        whole: bool = False,
    ) -> AsyncIterator[OutputDelta]:
        """Generate for a prompt; closing the iterator aborts. It may ignore `sink` and `whole`."""
        ...

    async def stats(self) -> dict[str, int | float]:
        """Gauges and counters by name."""
        ...

    def check_health(self) -> None:
        """Raise EngineDead if the engine has ended."""
        ...


class ClosableEngine(Engine, Protocol):
    """An engine that the server closes."""

    async def close(self) -> None:
        """End the engine."""
        ...


class ModelHandle:
    """A running engine under one name.

    Args:
        engine: a running engine.
        names: the first one is used in responses; `engine.model.name` if empty.
        version: the model's id in the registry; the name if None.
        created: Unix time.

    Attributes:
        name: name of the model in responses, as the request gave it.
        version: the model's id, for `system_fingerprint` and `X-Model-Version`.
        model_label: the id without its version, for metrics.
        created: Unix time of its registration.
    """

    def __init__(
        self, engine: Engine, names: Sequence[str] = (), *, version: str | None = None, created: int | None = None
    ) -> None:
        self.engine = engine
        self.names = tuple(names) or (str(engine.model.name),)
        self.name = self.names[0]
        self.version = version or self.name
        self.model_label = split_id(self.version)[0]
        self.created = int(time.time()) if created is None else created

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of prompt and completion together."""
        return int(self.engine.model.max_model_len)

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """Sampling fields that the model's makers recommend."""
        defaults: Mapping[str, Any] = self.engine.model.sampling_defaults
        return defaults

    @property
    def constrains_output(self) -> bool:
        """Whether the engine supports `SamplingParams.structured_outputs`."""
        return bool(getattr(self.engine, "constrains_output", False))

    def check_length(self, prompt: Sequence[int], field: str) -> None:
        """Refuse a prompt that leaves no room for a completion, with the message that clients expect.

        Raises:
            ContextLengthExceeded: naming `field`.
        """
        if len(prompt) >= self.max_model_len:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {self.max_model_len} tokens. However, your {field} came to "
                f"{len(prompt)} tokens, which leaves no room for a completion. Please reduce the length of the {field}",
                field,
            )

    def _check_text(self, tokenizer: Tokenizer, text: str, field: str) -> None:
        """Refuse a text that is too long for the context before it is tokenized."""
        if len(text) > self.max_model_len * tokenizer.max_token_bytes:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {self.max_model_len} tokens. However, your {field} came to "
                f"{len(text)} characters, more than this many tokens can hold. Please reduce the length of the {field}",
                field,
            )

    def tokenizer(self, field: str) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            InvalidRequest: the model has none; the message names `field`.
        """
        tokenizer: Tokenizer | None = self.engine.tokenizer
        if tokenizer is None:
            raise InvalidRequest(f"{field}: this model has no tokenizer; send token ids to /v1/completions", field)
        return tokenizer

    async def tokenize(self, text: str, *, add_special_tokens: bool, field: str = "prompt") -> list[int]:
        """Token ids of a text, in a thread.

        Raises:
            ContextLengthExceeded: far more text than the context holds.
        """
        tokenizer = self.tokenizer(field)

        def work() -> list[int]:
            self._check_text(tokenizer, text, field)
            return tokenizer.encode(text, add_special_tokens)

        return await asyncio.get_running_loop().run_in_executor(_text_threads, work)

    async def render(
        self,
        messages: list[dict[str, Any]],
        /,
        *,
        add_special_tokens: bool,
        continue_final_message: bool,
        **arguments: Any,
    ) -> list[int]:
        """Token ids of a conversation in the model's chat template, in a thread.

        Args:
            messages: each with a text.
            add_special_tokens: let the tokenizer add its special tokens to the template's text.
            continue_final_message: end at the last message's text, so that the completion continues it.
            arguments: of the template.

        Raises:
            InvalidRequest: the model has no template, or it refuses the messages.
            ContextLengthExceeded: far more text than the context holds.
        """
        tokenizer = self.tokenizer("messages")

        def work() -> list[int]:
            if continue_final_message:
                arguments["continue_final_message"] = True
            text = tokenizer.apply_chat_template(messages, **arguments)
            self._check_text(tokenizer, text, "messages")
            return tokenizer.encode(text, add_special_tokens)

        return await asyncio.get_running_loop().run_in_executor(_text_threads, work)

    async def token_bytes(self, field: str) -> Callable[[int], bytes]:
        """A function from a token id to its bytes, which are empty for an unknown id.

        Raises:
            InvalidRequest: the model has no tokenizer.
        """
        of_token = self.tokenizer(field).token_bytes
        # The first call reads the whole vocabulary.
        await asyncio.get_running_loop().run_in_executor(_text_threads, of_token, 0)
        return of_token
