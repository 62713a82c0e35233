"""Constraints are compiled once before the engine is asked: a mistake has its status, and costs the engine nothing."""

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
    """A compilation that requests wait for; it is given up when all of them have left."""

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
    """What one engine's tokens can be held to.

    What was found out of a constraint is remembered, a mistake too; requests that bring the same one at once share one
    compilation. The trie of the vocabulary is built for the first constraint.

    Args:
        engine: whose tokenizer and model it is. One that cannot tell its tokens' bytes is taken at its word.
        queue: where compilations wait.
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
        """Refuse what cannot be compiled.

        Args:
            kind: as of `octavo._core.Vocabulary.compile`.
            text: the same.
            field: of the request, for the error.
            tenant: whose turn it takes.

        Raises:
            InvalidRequest: what is wrong with it.
            QueueFull: too many others wait to be compiled.
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
        """What is wrong; None for nothing. In a thread."""
        try:
            self._made_vocabulary().compile(kind, text)
        except InvalidRequest as error:
            return _short(str(error))
        except ModelError as error:
            return f"this model cannot be held to it ({_short(str(error))})"
        except Exception:
            raise
        except BaseException as error:
            # A panic, which is no Exception and would end the connection without an answer.
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
    """A message that may quote a whole pattern or grammar."""
    return message if len(message) <= _MAX_MESSAGE else f"{message[:_MAX_MESSAGE]}..."
