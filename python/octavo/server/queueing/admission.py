"""Admission of one request: its place in the queue and its share of the engine."""

from __future__ import annotations

import time
from collections.abc import Sequence

from octavo.sampling_params import SamplingParams
from octavo.server.access.identity import Identity
from octavo.server.error_responses import ConcurrencyExceeded, QueueTimeout
from octavo.server.queueing.admission_queue import AdmissionQueue
from octavo.server.queueing.deadline import Deadline
from octavo.server.queueing.fair_queue import Ticket

__all__ = ["Admission", "ConcurrencyLimit"]

# Tokens of a completion that are charged before it runs. Few completions reach their max_tokens; the rest is charged
# at the end.
_EXPECTED_TOKENS = 1024


class ConcurrencyLimit:
    """Counts the running requests of each API key, over all models of a server."""

    def __init__(self) -> None:
        self._running: dict[str, int] = {}

    def enter(self, identity: Identity, limit: int | None) -> None:
        """Count one more request.

        Raises:
            ConcurrencyExceeded: `limit` requests run already.
        """
        running = self._running.get(identity.name, 0)
        if limit is not None and running >= limit:
            raise ConcurrencyExceeded(
                f"This API key has {running} requests running, which is its limit (max_concurrency {limit}); "
                "wait for one to end",
                1.0,
            )
        self._running[identity.name] = running + 1

    def leave(self, identity: Identity) -> None:
        """Count one request less."""
        running = self._running.get(identity.name, 0) - 1
        if running > 0:
            self._running[identity.name] = running
        else:
            self._running.pop(identity.name, None)


class Admission:
    """Admits one request: use it with `async with` around the generation.

    Args:
        queue: of the model.
        concurrency: of the server.
        identity: who sends the request.
        limit: requests that the identity may run at once.
        level: priority class.
        prompts: token ids each.
        params: as the engine gets them.
        max_completion: tokens of a completion, at most, if `max_tokens` is None.
        deadline: on the loop's clock; None for none.

    Attributes:
        params: as given.
        deadline: of the request, while it generates.
        waited: seconds until the first prompt was admitted.
    """

    def __init__(
        self,
        queue: AdmissionQueue,
        concurrency: ConcurrencyLimit,
        identity: Identity,
        limit: int | None,
        level: str,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        max_completion: int,
        deadline: float | None,
    ) -> None:
        self._queue = queue
        self._concurrency = concurrency
        self._identity = identity
        self._limit = limit
        self._level = level
        self._sizes = [len(prompt) for prompt in prompts]
        self.params = params
        self._max_completion = max_completion
        self._deadline_at = deadline
        self.deadline: Deadline | None = None
        self.waited = 0.0
        self._began = 0.0
        self._tickets: list[Ticket] = []
        self._used: list[int] = []

    async def __aenter__(self) -> Admission:
        """Join the queue.

        Raises:
            ConcurrencyExceeded, QueueFull.
        """
        self._concurrency.enter(self._identity, self._limit)
        params, longest = self.params, self._max_completion
        if params.max_tokens is not None:
            longest = min(params.max_tokens, longest)
        try:
            self._tickets = self._queue.join(
                self._level, self._identity.tenant, self._sizes, params.n, params.n * min(longest, _EXPECTED_TOKENS)
            )
        except BaseException:
            self._concurrency.leave(self._identity)
            raise
        self._used = list(self._sizes)
        self._began = time.monotonic()
        if self._deadline_at is not None:
            self.deadline = Deadline(self._deadline_at)
        return self

    @property
    def deadline_passed(self) -> bool:
        """Whether the request ran out of time."""
        return self.deadline is not None and self.deadline.passed

    async def turn(self, prompt: int = 0) -> None:
        """Wait until a prompt is admitted to the engine."""
        ticket = self._tickets[prompt]
        if not ticket.entered:
            await self._queue.turn(ticket)
            if not self.waited:
                self.waited = time.monotonic() - self._began

    def timed_out(self) -> QueueTimeout:
        """The error of a request whose deadline passed before its first token."""
        return self._queue.timed_out()

    def count(self, prompt: int, tokens: int) -> None:
        """Count tokens that the engine generated for a prompt."""
        self._used[prompt] += tokens
        ticket = self._tickets[prompt]
        if not ticket.started:
            self._queue.started(ticket)

    def done(self, prompt: int) -> None:
        """All completions of a prompt are complete."""
        self._queue.leave(self._tickets[prompt], self._used[prompt])

    async def __aexit__(self, *exception: object) -> None:
        """Leave the queue and the engine."""
        if self.deadline is not None:
            self.deadline.close()
        self._concurrency.leave(self._identity)
        for prompt in range(len(self._tickets)):
            self.done(prompt)
