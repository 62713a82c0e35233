"""The admission queue in front of one model's engine.

The engine runs requests first come, first served, and never gives one back, so it holds few of them: as many
completions as it runs at once and some that follow. All others wait here, by priority class and, within a class, by
tenant.

Classes (`high`, `normal`, `low`) and tenants share by virtual time. Each has a clock that its requests advance by their
tokens, divided by the class's weight; the one with the lowest clock is next. If all wait, `high` gets 16 tokens and
`normal` 4 for each token of `low`. No request starves, and a tenant that floods the server delays only itself. Requests
of one tenant and class are admitted in the order of their arrival. The tokens that a completion really took are settled
at its end.

Every operation takes at most time that is logarithmic in the number of tenants.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from octavo.server.access.identity import PRIORITIES
from octavo.server.error_responses import QueueFull, QueueTimeout
from octavo.server.queueing.fair_queue import ClassQueue, Ticket
from octavo.server.settings import ServerSettings

__all__ = ["AdmissionQueue"]

_WEIGHTS = {"high": 16.0, "normal": 4.0, "low": 1.0}
_MIN_UNSTARTED = 16


class AdmissionQueue:
    """Requests that wait for one model's engine.

    Args:
        capacity: completions in the engine, at most.
        max_unstarted: prompts in the engine without a first token, at most, unless they are short.
        unstarted_tokens: prompts without a first token are admitted up to this number of tokens in any case.
        max_requests: prompts that may wait.
        max_tokens: tokens that may wait, of prompts and expected completions.
    """

    def __init__(
        self, capacity: int, max_unstarted: int, unstarted_tokens: int, max_requests: int, max_tokens: int
    ) -> None:
        self._capacity = capacity
        self._max_unstarted = max_unstarted
        self._unstarted_limit = unstarted_tokens
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._classes = {name: ClassQueue(_WEIGHTS[name]) for name in PRIORITIES}
        self._virtual = 0.0
        self._running = 0
        self._unstarted = 0
        self._unstarted_tokens = 0
        self._waiting = 0
        self._waiting_tokens = 0
        self._last_number = 0
        self._rejected = 0
        self._timed_out = 0
        self._rate = 0.0
        self._window_began = time.monotonic()
        self._window_tokens = 0

    @classmethod
    def of(cls, engine: Any, settings: ServerSettings) -> AdmissionQueue:
        """The queue in front of an engine, sized by the completions that it runs at once."""
        config = getattr(engine, "config", None)
        at_once = int(engine.model.max_num_seqs)
        batched = getattr(config, "max_num_batched_tokens", None)
        if batched is None:
            batched = 8192 if str(engine.model.device).startswith("cuda") else 2048
        follow = max(_MIN_UNSTARTED, at_once // 4)
        return cls(
            settings.max_engine_requests or at_once + follow,
            follow,
            4 * int(batched),
            settings.max_queue_requests,
            settings.max_queue_tokens,
        )

    @property
    def max_requests(self) -> int:
        """Requests of one completion that may run or wait; the next one is refused."""
        return self._capacity + self._max_requests

    def stats(self) -> dict[str, Any]:
        """Gauges and counters by name; `waiting_by_class` holds one of each class."""
        return {
            "waiting": self._waiting,
            "waiting_tokens": self._waiting_tokens,
            "waiting_by_class": {name: level.waiting for name, level in self._classes.items()},
            "in_engine": self._running,
            "in_engine_unstarted": self._unstarted,
            "rejected": self._rejected,
            "timed_out": self._timed_out,
        }

    def join(self, level: str, tenant: str, sizes: Sequence[int], answers: int, expected: int) -> list[Ticket]:
        """Queue the prompts of a request and admit those that need not wait.

        Args:
            level: priority class.
            tenant: requests of one tenant share its turns.
            sizes: tokens of each prompt.
            answers: completions of each prompt.
            expected: tokens of all completions of one prompt.

        Returns:
            A ticket for each prompt.

        Raises:
            QueueFull: too many requests or tokens wait; nothing was queued.
        """
        tokens = sum(sizes) + expected * len(sizes)
        if self._waiting and (
            self._waiting + len(sizes) > self._max_requests or self._waiting_tokens + tokens > self._max_tokens
        ):
            self._rejected += 1
            raise QueueFull(
                f"The server is busy: {self._waiting} requests of about {self._waiting_tokens} tokens wait "
                f"(max_queue_requests {self._max_requests}, max_queue_tokens {self._max_tokens}); try again later",
                self.expected_wait(),
            )
        queue = self._classes[level]
        if not queue.waiting:
            queue.tag = max(queue.tag, self._virtual)
        tickets = []
        for size in sizes:
            self._last_number += 1
            ticket = Ticket(self._last_number, level, tenant, size, answers, size + expected)
            queue.push(ticket)
            tickets.append(ticket)
        self._waiting += len(tickets)
        self._waiting_tokens += tokens
        self._dispatch()
        return tickets

    async def turn(self, ticket: Ticket) -> None:
        """Wait until a ticket is admitted to the engine."""
        if not ticket.entered:
            ticket.turn = asyncio.get_running_loop().create_future()
            await ticket.turn

    def timed_out(self) -> QueueTimeout:
        """The error of a request whose deadline passed before its first token."""
        self._timed_out += 1
        return QueueTimeout(
            "The request's deadline passed before its first token; try again later, or allow more time (timeout, "
            "X-Request-Timeout)",
            self.expected_wait(),
        )

    def started(self, ticket: Ticket) -> None:
        """A ticket's first token came."""
        ticket.started = True
        self._unstarted -= 1
        self._unstarted_tokens -= ticket.prompt_tokens
        if self._waiting:
            self._dispatch()

    def leave(self, ticket: Ticket, used: int) -> None:
        """The completions of a ticket are complete, or its request was cancelled. Calling it again changes nothing.

        Args:
            ticket: from `join`.
            used: tokens of the prompt and of the completions.
        """
        if ticket.left:
            return
        ticket.left = True
        queue = self._classes[ticket.level]
        if not ticket.entered:
            queue.remove(ticket)
            self._waiting -= 1
            self._waiting_tokens -= ticket.cost
            # The ticket behind it may be small enough.
            self._dispatch()
            return
        self._running -= ticket.answers
        if not ticket.started:
            self._unstarted -= 1
            self._unstarted_tokens -= ticket.prompt_tokens
        queue.settle(ticket, used)
        queue.tag += (used - ticket.cost) / queue.weight
        if self._waiting:
            self._dispatch()

    def expected_wait(self) -> float:
        """Estimated seconds until all waiting requests are admitted, between 1 and 60."""
        return min(60.0, max(1.0, self._waiting_tokens / self._rate)) if self._rate else 1.0

    def _dispatch(self) -> None:
        """Admit tickets in turn while there is room."""
        while self._waiting:
            queue = min((queue for queue in self._classes.values() if queue.waiting), key=lambda queue: queue.tag)
            ticket = queue.first()
            if ticket is None or not self._has_room(ticket):
                return
            queue.pop(ticket)
            self._virtual = max(self._virtual, queue.tag)
            queue.tag += ticket.cost / queue.weight
            self._waiting -= 1
            self._waiting_tokens -= ticket.cost
            self._running += ticket.answers
            self._unstarted += 1
            self._unstarted_tokens += ticket.prompt_tokens
            self._count(ticket.cost)
            ticket.entered = True
            if ticket.turn is not None and not ticket.turn.done():
                ticket.turn.set_result(None)

    def _has_room(self, ticket: Ticket) -> bool:
        if not self._running:
            return True
        if self._running + ticket.answers > self._capacity:
            return False
        return (
            self._unstarted < self._max_unstarted
            or self._unstarted_tokens + ticket.prompt_tokens <= self._unstarted_limit
        )

    def _count(self, tokens: int) -> None:
        self._window_tokens += tokens
        now = time.monotonic()
        seconds = now - self._window_began
        if seconds >= 1.0:
            rate = self._window_tokens / seconds
            self._rate = rate if not self._rate else (self._rate + rate) / 2
            self._window_began, self._window_tokens = now, 0
