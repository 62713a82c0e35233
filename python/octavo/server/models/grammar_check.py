"""Compiles the constraints of requests before they reach the engine, so that a mistake costs the engine nothing."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any

from octavo.errors import InvalidRequest, ModelError

if TYPE_CHECKING:
    from octavo._core import Vocabulary
    from octavo.server.models.model_handle import Engine
    from octavo.server.queueing.compile_queue import CompileQueue

__all__ = ["GrammarCheck"]

_MAX_KNOWN = 1024
_MAX_MESSAGE = 600


class _Pending:
    """A compilation that requests wait for. It is cancelled when all of them have left."""

    __slots__ = ("future", "waiters")

    def __init__(self, future: asyncio.Future[str | None]) -> None:
        self.future = future
        self.waiters = 0

    async def result(self) -> str | None:
        self.waiters += 1
        try:
            return await asyncio.shield(self.future)
        finally:
            self.waiters -= 1
            if not self.waiters:
                self.future.cancel()


class GrammarCheck:
    """Checks whether constraints can be compiled for one model.

    Results are cached, errors too, and concurrent requests with the same constraint share one compilation. The trie of
    the vocabulary is built for the first constraint.

    Args:
        engine: of the model. If its tokenizer does not know the bytes of its tokens, nothing is checked.
        queue: of compilations.
    """

    def __init__(self, engine: Engine, queue: CompileQueue) -> None:
        self._tokenizer: Any = engine.tokenizer
        self._model: Any = engine.model
        self._queue = queue
        self._vocabulary: Vocabulary | None = None
        self._making = threading.Lock()
        self._known: OrderedDict[bytes, str | None] = OrderedDict()
        self._pending: dict[bytes, _Pending] = {}

    async def check(self, kind: str, text: str, field: str, tenant: str = "") -> None:
        """Refuse a constraint that cannot be compiled.

        Args:
            kind: of `octavo._core.Vocabulary.compile`.
            text: the constraint.
            field: of the request, for the message.
            tenant: of the request; tenants take turns.

        Raises:
            InvalidRequest: the constraint is invalid.
            QueueFull: too many compilations wait.
        """
        if not hasattr(self._tokenizer, "token_table"):
            return
        key = hashlib.blake2b(f"{kind}\0{text}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if key in self._known:
            self._known.move_to_end(key)
            wrong = self._known[key]
        else:
            wrong = await self._compiling(key, kind, text, tenant).result()
        if wrong is not None:
            raise InvalidRequest(f"{field}: {wrong}", field)

    def _compiling(self, key: bytes, kind: str, text: str, tenant: str) -> _Pending:
        pending = self._pending.get(key)
        if pending is None or pending.future.cancelled():
            pending = self._pending[key] = _Pending(
                self._queue.submit(tenant, partial(self._compile, kind, text)),
            )
            pending.future.add_done_callback(partial(self._compiled, key, pending))
        return pending

    def _compiled(self, key: bytes, pending: _Pending, done: asyncio.Future[str | None]) -> None:
        if self._pending.get(key) is pending:
            del self._pending[key]
        if done.cancelled() or done.exception() is not None:
            return
        self._known[key] = done.result()
        while len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)

    def _compile(self, kind: str, text: str) -> str | None:
        """Compile in a thread. Returns the error message, or None."""
        try:
            self._made_vocabulary().compile(kind, text)
        except InvalidRequest as error:
            return _short(str(error))
        except ModelError as error:
            return f"this model does not support the constraint ({_short(str(error))})"
        except Exception:
            raise
        except BaseException as error:
            # A panic is not an Exception and would end the connection without a response.
            raise RuntimeError("the compiler of constraints failed") from error
        return None

    def _made_vocabulary(self) -> Vocabulary:
        from octavo._core import Vocabulary

        with self._making:
            if self._vocabulary is None:
                size = int(self._model.vocab_size)
                table = self._tokenizer.token_table(size)
                self._vocabulary = Vocabulary(table, sorted(self._model.eos_token_ids), size)
            return self._vocabulary


def _short(message: str) -> str:
    """A message, cut because it may quote a whole pattern or grammar."""
    return message if len(message) <= _MAX_MESSAGE else f"{message[:_MAX_MESSAGE]}..."
