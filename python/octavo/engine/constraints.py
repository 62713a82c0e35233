"""Output constraints: compiled in threads, and matched token by token beside the loop."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from octavo.engine.protocol import Constraint
from octavo.errors import InvalidRequest, OctavoError, Overloaded

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from octavo._core import Constraints, Grammar, StepOutput, TokenTable, Vocabulary

__all__ = ["Compiled", "Failure", "OutputConstraints"]

_LOG = logging.getLogger(__name__)
_MAX_THREADS = 4

Failure = tuple[int, InvalidRequest]
"""A request that cannot be followed any further, and why."""


class Compiled:
    """A constraint that is ready to be followed.

    Attributes:
        constraint: what was asked.
        grammar: compiled; None where the constraint has none.
    """

    __slots__ = ("constraint", "grammar")

    def __init__(self, constraint: Constraint, grammar: Grammar | None) -> None:
        self.constraint = constraint
        self.grammar = grammar


class OutputConstraints:
    """The constraints of one engine's requests. An engine that never sees one pays nothing: no trie, no thread.

    `compile` and `compile_soon` may be called by any thread, all else by the loop's alone.

    Args:
        table: the vocabulary's texts; None for a model without: every constraint is refused then.
        eos_token_ids: tokens that end an answer.
        vocab_size: logits of a row.
    """

    def __init__(self, table: TokenTable | None, eos_token_ids: tuple[int, ...], vocab_size: int) -> None:
        self._table = table
        self._eos_token_ids = list(eos_token_ids)
        self._vocab_size = vocab_size
        self._vocabulary: Vocabulary | None = None
        self._making = threading.Lock()
        self._followed: Constraints | None = None
        # Answers still running, by request.
        self._unfinished: dict[int, int] = {}
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._num_threads = 0

    def __len__(self) -> int:
        """Requests that are followed."""
        return len(self._unfinished)

    # -------------------------------------------------------- in threads

    def compile(self, constraint: Constraint) -> Compiled:
        """Make a constraint ready, which may take seconds.

        Raises:
            InvalidRequest: it is no grammar, too large, or this engine has no texts to hold to it.
            Overloaded: not now.
        """
        field = _field(constraint)
        try:
            vocabulary = self._get_vocabulary()
            grammar = None if constraint.grammar is None else vocabulary.compile(*constraint.grammar)
        except Overloaded:
            raise
        except OctavoError as error:
            raise InvalidRequest(f"{field}: {error}", field) from None
        except BaseException as error:
            # Also a panic, which is no Exception: it costs this request alone.
            _LOG.exception("a constraint could not be compiled")
            raise InvalidRequest(f"{field}: cannot be compiled ({type(error).__name__}: {error})", field) from error
        return Compiled(constraint, grammar)

    def compile_soon(
        self,
        constraint: Constraint,
        deliver: Callable[[Compiled | OctavoError], None],
        is_wanted: Callable[[], bool],
    ) -> None:
        """Compile in a thread, which then calls `deliver`; or does nothing if it `is_wanted` no more."""

        def job() -> None:
            if not is_wanted():
                return
            try:
                outcome: Compiled | OctavoError = self.compile(constraint)
            except OctavoError as error:
                outcome = error
            deliver(outcome)

        self._jobs.put(job)
        if self._num_threads < min(_MAX_THREADS, os.cpu_count() or 1):
            self._num_threads += 1
            # A daemon: an engine that ends waits for nobody's grammar.
            threading.Thread(target=_work, args=(self._jobs,), name="octavo-grammar", daemon=True).start()

    def compile_all(self, constraints: list[Constraint | None]) -> list[Compiled | None]:
        """Compile many at once and wait for all; equal ones are compiled once.

        Raises:
            InvalidRequest: the first, in the list's order, that cannot be.
        """
        outcomes: queue.SimpleQueue[tuple[int, Compiled | OctavoError]] = queue.SimpleQueue()
        distinct = {id(constraint): constraint for constraint in constraints if constraint is not None}
        given_up = False
        for key, constraint in distinct.items():
            self.compile_soon(
                constraint,
                lambda outcome, key=key: outcomes.put((key, outcome)),  # type: ignore[misc]
                lambda: not given_up,
            )
        try:
            found = dict(outcomes.get() for _ in distinct)
        finally:
            # An interrupt leaves nobody who waits for the rest.
            given_up = True
        ready: list[Compiled | None] = []
        for asked in constraints:
            outcome = None if asked is None else found[id(asked)]
            if isinstance(outcome, OctavoError):
                raise outcome
            ready.append(outcome)
        return ready

    def close(self) -> None:
        """Let the threads end once they have done what they were given. Idempotent."""
        while self._num_threads:
            self._num_threads -= 1
            self._jobs.put(None)

    def _get_vocabulary(self) -> Vocabulary:
        from octavo._core import Vocabulary

        if self._table is None:
            raise InvalidRequest("the model has no tokenizer, so its tokens have no texts; name one in the settings")
        with self._making:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._table, self._eos_token_ids, self._vocab_size)
            return self._vocabulary

    # -------------------------------------------------------- by the loop

    def add(self, request_id: int, n: int, compiled: Compiled) -> None:
        """Follow a request's n answers from their first token on."""
        if self._followed is None:
            from octavo._core import Constraints

            self._followed = Constraints(self._get_vocabulary())
        asked = compiled.constraint
        self._followed.add(request_id, n, compiled.grammar, asked.allowed_token_ids, asked.bad_words or None)
        self._unfinished[request_id] = n

    def remove(self, request_id: int) -> None:
        """Forget a request; one that is not known is none."""
        if self._unfinished.pop(request_id, None) is not None and self._followed is not None:
            self._followed.remove(request_id)

    def fill(self, keys: bytes, masks: npt.NDArray[np.int32]) -> list[Failure]:
        """Write what each masked sample of the step planned last may be.

        Args:
            keys: as of `Core.masked`.
            masks: int32 [max_num_seqs, words]; a row a sample, a bit a token.

        Returns:
            The requests whose answers cannot be followed any further.
        """
        assert self._followed is not None, "a masked sample is of a request that was added"
        failed = self._followed.fill(keys, masks.ctypes.data, masks.shape[1])
        if not failed:
            return []
        ids = memoryview(keys).cast("q")
        return _failures([(ids[2 * index], message) for index, message in failed])

    def advance(self, frame: StepOutput) -> list[Failure]:
        """Take a step's tokens, and forget requests whose last answer has ended.

        Returns:
            As `fill`.
        """
        if self._followed is None:
            return []
        ids = memoryview(frame.request_ids).cast("q")
        failed = [(ids[index], message) for index, message in self._followed.advance(frame)]
        finished = memoryview(frame.finish_reasons).cast("i")
        for event, reason in enumerate(finished):
            left = self._unfinished.get(ids[event], 0) if reason else 0
            if left > 1:
                self._unfinished[ids[event]] = left - 1
            elif left:
                self.remove(ids[event])
        # What fails with an answer's last token is of no consequence.
        return _failures([(request_id, message) for request_id, message in failed if request_id in self._unfinished])


def _work(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    """Body of a thread; it refers only to the queue, so it keeps nothing alive."""
    while (job := jobs.get()) is not None:
        job()
        del job


def _field(constraint: Constraint) -> str:
    """The parameter at fault where a constraint cannot be followed."""
    if constraint.grammar is not None:
        return "structured_outputs"
    return "bad_words" if constraint.allowed_token_ids is None else "allowed_token_ids"


def _failures(messages: list[tuple[int, str]]) -> list[Failure]:
    """Each request once."""
    return [
        (
            request_id,
            InvalidRequest(
                f"structured_outputs: the answer cannot be held to them any further ({message}); simplify them",
                "structured_outputs",
            ),
        )
        for request_id, message in dict(messages).items()
    ]
