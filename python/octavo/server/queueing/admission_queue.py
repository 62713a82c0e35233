"""Who may enter the engine next: one queue a model in front of it.

The engine takes requests first come, first served, and never gives one back, so what it holds is kept short: as many
answers as run at once and a few to follow. Everyone else waits here, by class and, within a class, by tenant.

Classes (`high`, `normal`, `low`) and tenants share by virtual time: each has a clock that its requests advance by their
tokens, divided by the class's weight, and the one whose clock is behind is next. Where all wait, `high` is served 16
tokens and `normal` 4 for each of `low`; nobody starves, and a tenant that floods waits behind its own requests alone.
What an answer really took is settled at its end.

Every operation takes time that grows with the logarithm of the number of tenants at most.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Sequence
from typing import Any

from octavo.errors import InvalidRequest
from octavo.sampling_params import SamplingParams
from octavo.server.access.api_keys import PRIORITIES, Identity
from octavo.server.error_responses import ConcurrencyExceeded, QueueFull, QueueTimeout
from octavo.server.queueing.deadline import Deadline
from octavo.server.queueing.fair_queue import ClassQueue, Ticket
from octavo.server.settings import ServerSettings

__all__ = [
    "Admission",
    "AdmissionQueue",
    "Concurrency",
    "class_of",
    "engine_priority",
    "queue_of",
    "salt_of",
]

_WEIGHTS = {"high": 16.0, "normal": 4.0, "low": 1.0}
# Of an answer's max_tokens, which most never reach; the rest is settled at the end.
_EXPECTED_TOKENS = 1024
_MIN_UNSTARTED = 16
_INTEGER = re.compile(r"-?[0-9]{1,19}")


class Concurrency:
    """How many requests each key has under way, over all models of a server."""

    def __init__(self) -> None:
        self._running: dict[str, int] = {}

    def enter(self, identity: Identity, limit: int | None) -> None:
        """Count one more.

        Raises:
            ConcurrencyExceeded: as many as may run already.
        """
        running = self._running.get(identity.name, 0)
        if limit is not None and running >= limit:
            raise ConcurrencyExceeded(
                f"This API key has {running} requests under way, as many as it may (max_concurrency {limit}); "
                "wait for one to end",
                1.0,
            )
        self._running[identity.name] = running + 1

    def leave(self, identity: Identity) -> None:
        """Count one less."""
        running = self._running.get(identity.name, 0) - 1
        if running > 0:
            self._running[identity.name] = running
        else:
            self._running.pop(identity.name, None)


class AdmissionQueue:
    """What waits for one model's engine.

    Args:
        capacity: answers in the engine, at most.
        max_unstarted: prompts in the engine without a first token, at most, unless they are short.
        unstarted_tokens: of prompts in the engine without a first token, that are let in however many they are.
        max_requests: prompts that may wait.
        max_tokens: tokens that may wait, of prompts and expected answers.
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

    @property
    def max_requests(self) -> int:
        """Requests of one answer that may be under way, waiting ones among them; the next is refused."""
        return self._capacity + self._max_requests

    def stats(self) -> dict[str, Any]:
        """Gauges and counters by name; `waiting_by_class` holds one a class."""
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
        """A ticket for each of a request's prompts; those that need not wait are entered.

        Args:
            level: priority class.
            tenant: who shares turns.
            sizes: tokens of each prompt.
            answers: to each prompt.
            expected: tokens of all answers to one prompt.

        Raises:
            QueueFull: too much waits already; nothing was queued.
        """
        tokens = sum(sizes) + expected * len(sizes)
        if self._waiting and (
            self._waiting + len(sizes) > self._max_requests or self._waiting_tokens + tokens > self._max_tokens
        ):
            self._rejected += 1
            raise QueueFull(
                f"The server is busy: {self._waiting} requests of about {self._waiting_tokens} tokens wait already "
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
        """Wait until a ticket may enter the engine."""
        if not ticket.entered:
            ticket.turn = asyncio.get_running_loop().create_future()
            await ticket.turn

    def timed_out(self) -> QueueTimeout:
        """What to answer to a request whose time was over before its first token."""
        self._timed_out += 1
        return QueueTimeout(
            "The request's time was over before its first token; try again later, or give it more time (timeout, "
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
        """A ticket's answers are complete, or it is taken back; more than once is once.

        Args:
            ticket: of `join`.
            used: tokens of the prompt and of the answers.
        """
        if ticket.left:
            return
        ticket.left = True
        queue = self._classes[ticket.level]
        if not ticket.entered:
            queue.remove(ticket)
            self._waiting -= 1
            self._waiting_tokens -= ticket.cost
            # What stood behind it may be small enough.
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
        """Seconds until what waits now has entered, between 1 and 60; a guess."""
        return min(60.0, max(1.0, self._waiting_tokens / self._rate)) if self._rate else 1.0

    def _dispatch(self) -> None:
        """Let in whoever's turn it is, while there is room."""
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


class Admission:
    """One request's way into the engine: `async with` it around the generating.

    Args:
        queue: of the model.
        concurrency: of the server.
        identity: whom the request is from.
        limit: requests that the identity may have under way.
        level: priority class.
        prompts: token ids each.
        params: as the engine is to get them.
        room: tokens of an answer, at most, where `max_tokens` names none.
        deadline: end of the request's time on the loop's clock; None for none.

    Attributes:
        params: as given.
        deadline: as given; while generating.
        waited: seconds until the first prompt entered the engine.
    """

    def __init__(
        self,
        queue: AdmissionQueue,
        concurrency: Concurrency,
        identity: Identity,
        limit: int | None,
        level: str,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        room: int,
        deadline: float | None,
    ) -> None:
        self._queue = queue
        self._concurrency = concurrency
        self._identity = identity
        self._limit = limit
        self._level = level
        self._sizes = [len(prompt) for prompt in prompts]
        self.params = params
        self._room = room
        self._ends = deadline
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
        params = self.params
        longest = self._room if params.max_tokens is None else min(params.max_tokens, self._room)
        try:
            self._tickets = self._queue.join(
                self._level, self._identity.tenant, self._sizes, params.n, params.n * min(longest, _EXPECTED_TOKENS)
            )
        except BaseException:
            self._concurrency.leave(self._identity)
            raise
        self._used = list(self._sizes)
        self._began = time.monotonic()
        if self._ends is not None:
            self.deadline = Deadline(self._ends)
        return self

    async def turn(self, prompt: int = 0) -> None:
        """Wait until a prompt may enter the engine."""
        ticket = self._tickets[prompt]
        if not ticket.entered:
            await self._queue.turn(ticket)
            if not self.waited:
                self.waited = time.monotonic() - self._began

    def timed_out(self) -> QueueTimeout:
        """What to answer when the time was over before the first token."""
        return self._queue.timed_out()

    def count(self, prompt: int, tokens: int) -> None:
        """A piece of that many tokens came for a prompt."""
        self._used[prompt] += tokens
        ticket = self._tickets[prompt]
        if not ticket.started:
            self._queue.started(ticket)

    def done(self, prompt: int) -> None:
        """All answers to a prompt are complete."""
        self._queue.leave(self._tickets[prompt], self._used[prompt])

    async def __aexit__(self, *exception: object) -> None:
        """Leave the queue, and the engine's count."""
        if self.deadline is not None:
            self.deadline.close()
        self._concurrency.leave(self._identity)
        for prompt in range(len(self._tickets)):
            self.done(prompt)


def class_of(identity: Identity, asked: str | int | None, field: str) -> str:
    """The priority class of a request.

    Args:
        identity: bounds it; what is more urgent than its `best_priority` becomes that.
        asked: a class, or a number as vLLM's clients send it: below 0 is `high`, above `low`; None for the key's.
        field: where it was asked, for the message.

    Raises:
        InvalidRequest: neither.
    """
    if asked is None:
        return identity.priority
    if isinstance(asked, str):
        word = asked.strip().lower()
        if word in PRIORITIES:
            return max(word, identity.best_priority, key=PRIORITIES.index)
        if not _INTEGER.fullmatch(word):
            raise InvalidRequest(f"{field}: {word[:40]!a} is neither {', '.join(PRIORITIES)} nor a whole number", field)
        asked = int(word)
    wanted = "high" if asked < 0 else "low" if asked > 0 else "normal"
    return max(wanted, identity.best_priority, key=PRIORITIES.index)


def queue_of(engine: Any, settings: ServerSettings) -> AdmissionQueue:
    """The queue in front of an engine, sized by what it runs at once."""
    config = getattr(engine, "config", None)
    at_once = int(getattr(config, "max_num_seqs", 256))
    batched = getattr(config, "max_num_batched_tokens", None)
    if batched is None:
        batched = 8192 if str(engine.model.device).startswith("cuda") else 2048
    follow = max(_MIN_UNSTARTED, at_once // 4)
    return AdmissionQueue(
        settings.max_engine_requests or at_once + follow,
        follow,
        4 * int(batched),
        settings.max_queue_requests,
        settings.max_queue_tokens,
    )


def engine_priority(level: str, asked: int) -> int:
    """The number that an engine under the `priority` policy is given: the one asked for, within its class."""
    if level == "high":
        return min(asked, -1)
    return max(asked, 1) if level == "low" else 0


def salt_of(identity: Identity, salt: str, *, shared: bool) -> str:
    """What keeps the cached prefixes of one key from others: who could find them could time what others have asked.

    Args:
        identity: whom the request is from.
        salt: the request's own.
        shared: all keys find each other's prefixes; the request's own salt still counts.
    """
    if shared or identity.anonymous:
        return salt
    return hashlib.blake2b(f"{identity.name}\0{salt}".encode(), digest_size=16).hexdigest()
