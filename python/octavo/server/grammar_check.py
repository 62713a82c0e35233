"""Constraints are compiled once before the engine is asked: a mistake has its status, and costs the engine nothing."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from octavo.errors import InvalidRequest, ModelError
from octavo.server.errors import QueueFull

if TYPE_CHECKING:
    from octavo._core import Vocabulary
    from octavo.server.served import Engine

__all__ = ["GrammarCheck"]

_MAX_KNOWN = 1024
_MAX_PENDING = 64
_MAX_MESSAGE = 600
# The compiler releases the interpreter's lock; two of them leave the loop and the text threads a core.
_threads = ThreadPoolExecutor(2, thread_name_prefix="octavo-grammar-check")


class GrammarCheck:
    """What one engine's tokens can be held to.

    What was found out of a constraint is remembered, a mistake too; requests that bring the same one at once share one
    compilation. The trie of the vocabulary is built for the first constraint.

    Args:
        engine: whose tokenizer and model it is. One that cannot tell its tokens' bytes is taken at its word.
    """

    def __init__(self, engine: Engine) -> None:
        self._tokenizer: Any = engine.tokenizer
        self._model: Any = engine.model
        self._vocabulary: Vocabulary | None = None
        self._making = threading.Lock()
        self._known: OrderedDict[bytes, str | None] = OrderedDict()
        self._pending: dict[bytes, asyncio.Future[str | None]] = {}

    async def check(self, kind: str, text: str, field: str) -> None:
        """Refuse what cannot be compiled.

        Args:
            kind: as of `octavo._core.Vocabulary.compile`.
            text: the same.
            field: of the request, for the error.

        Raises:
            InvalidRequest: what is wrong with it.
            QueueFull: too many others are being compiled.
        """
        if not hasattr(self._tokenizer, "token_table"):
            return
        key = hashlib.blake2b(f"{kind}\0{text}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if key in self._known:
            self._known.move_to_end(key)
            wrong = self._known[key]
        else:
            # Who leaves does not take the compilation from the others.
            wrong = await asyncio.shield(self._compiling(key, kind, text))
        if wrong is not None:
            raise InvalidRequest(f"{field}: {wrong}", field)

    def _compiling(self, key: bytes, kind: str, text: str) -> asyncio.Future[str | None]:
        running = self._pending.get(key)
        if running is None:
            if len(self._pending) >= _MAX_PENDING:
                raise QueueFull(
                    f"The server is busy: {_MAX_PENDING} constraints wait to be compiled already; try again later", 1.0
                )
            running = asyncio.get_running_loop().run_in_executor(_threads, self._compile, kind, text)
            self._pending[key] = running
            running.add_done_callback(lambda done: self._compiled(key, done))
        return running

    def _compiled(self, key: bytes, done: asyncio.Future[str | None]) -> None:
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
