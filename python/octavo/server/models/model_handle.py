"""A model behind one or more served names, and what the server asks of its engine."""

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
"""That render and tokenize."""
# Templates and tokenizing leave the event loop; the tokenizers crate releases the GIL.
_text_threads = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="octavo-text")


def split_id(id: str) -> tuple[str, str | None]:
    """A model id's name and version: `m@v1` gives `m` and `v1`; an `@` within a path parts nothing."""
    name, at, version = id.rpartition("@")
    return (name, version) if at and name and version and "/" not in version else (id, None)


class Engine(Protocol):
    """What the server uses of `octavo.engine.async_engine.AsyncEngine`; any such object can be served."""

    @property
    def model(self) -> Any:
        """A `ModelInfo`."""
        ...

    @property
    def tokenizer(self) -> Any:
        """A `octavo.text.tokenizer.Tokenizer`, or None."""
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
        """Answer a prompt piece by piece; closing the iterator aborts. It may ignore `sink` and `whole`."""
        ...

    async def stats(self) -> dict[str, int | float]:
        """Gauges and counters by name."""
        ...

    def check_health(self) -> None:
        """Raise EngineDead once the engine has ended."""
        ...


class ClosableEngine(Engine, Protocol):
    """An engine that is ended by whoever serves it."""

    async def close(self) -> None:
        """End it."""
        ...


class ModelHandle:
    """One engine, under one name.

    Args:
        engine: a running engine.
        names: the first is the one that answers carry; `engine.model.name` when empty.
        version: the model's id in the registry; the name when None.
        created: Unix time.

    Attributes:
        name: the name answers carry: the one that the request gave.
        version: the model's id, of whatever alias or weight led to it; in `system_fingerprint` and `X-Model-Version`.
        model_label: the id without its version, for metrics.
        created: Unix time at which it was registered.
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
        """Tokens of prompt and output together, at most."""
        return int(self.engine.model.max_model_len)

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """Sampling fields that the model's makers recommend."""
        defaults: Mapping[str, Any] = self.engine.model.sampling_defaults
        return defaults

    @property
    def constrains_output(self) -> bool:
        """Whether the engine can hold an answer to `SamplingParams.structured_outputs`."""
        return bool(getattr(self.engine, "constrains_output", False))

    def check_length(self, prompt: Sequence[int], field: str) -> None:
        """Refuse a prompt that leaves no room for an answer, in the words that clients look for.

        Raises:
            ContextLengthExceeded: naming `field`.
        """
        if len(prompt) >= self.max_model_len:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {self.max_model_len} tokens. However, your {field} came to "
                f"{len(prompt)} tokens, which leaves no room for an answer. Please reduce the length of the {field}.",
                field,
            )

    def _check_text(self, tokenizer: Tokenizer, text: str, field: str) -> None:
        """As `check_length`, for a text so long that tokenizing it would be a waste of time and memory."""
        if len(text) > self.max_model_len * tokenizer.max_token_bytes:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {self.max_model_len} tokens. However, your {field} came to "
                f"{len(text)} characters, more than as many tokens can hold. Please reduce the length of the {field}.",
                field,
            )

    def tokenizer(self, field: str) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            InvalidRequest: it has none; `field` is the request's field that needs one.
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
        """A conversation's token ids, as the model's template writes it, in a thread.

        Args:
            messages: with a text each.
            add_special_tokens: let the tokenizer add its own to what the template wrote.
            continue_final_message: end where the last message's text ends, so that the answer goes on with it.
            arguments: of the template.

        Raises:
            InvalidRequest: the model has no template, or it refuses the messages.
            ContextLengthExceeded: far more text than the context holds.
        """
        tokenizer = self.tokenizer("messages")

        def work() -> list[int]:
            text = tokenizer.apply_chat_template(messages, **arguments)
            if continue_final_message:
                text = _cut_after(text, messages[-1]["content"])
            self._check_text(tokenizer, text, "messages")
            return tokenizer.encode(text, add_special_tokens)

        return await asyncio.get_running_loop().run_in_executor(_text_threads, work)

    async def token_bytes(self, field: str) -> Callable[[int], bytes]:
        """What gives the bytes of a token: none for an id the tokenizer does not know.

        Raises:
            InvalidRequest: the model has no tokenizer.
        """
        of_token = self.tokenizer(field).token_bytes
        # The first call works through the whole vocabulary.
        await asyncio.get_running_loop().run_in_executor(_text_threads, of_token, 0)
        return of_token


def _cut_after(text: str, final: str) -> str:
    final = final.strip()
    place = text.rfind(final)
    if not final or place < 0:
        raise InvalidRequest(
            "continue_final_message: the last message has no text that the template keeps", "continue_final_message"
        )
    return text[: place + len(final)]
