"""Fair queue of one priority class: tenants take turns by virtual time. See `admission_queue`."""

from __future__ import annotations

import asyncio
import heapq
from collections import OrderedDict

__all__ = ["ClassQueue", "Ticket"]

_MAX_TENANTS = 4096


class Ticket:
    """One prompt that waits for the engine or runs in it."""

    __slots__ = ("answers", "cost", "entered", "left", "level", "number", "prompt_tokens", "started", "tenant", "turn")

    def __init__(self, number: int, level: str, tenant: str, prompt_tokens: int, answers: int, cost: int) -> None:
        self.number = number
        self.level = level
        self.tenant = tenant
        self.prompt_tokens = prompt_tokens
        self.answers = answers
        self.cost = cost
        self.entered = False
        self.started = False
        self.left = False
        self.turn: asyncio.Future[None] | None = None


class _Tenant:
    """Requests of one tenant and class.

    Attributes:
        tag: the virtual time up to which it has been charged.
        owed: tokens to charge at its next turn; negative to give back.
        waiting: tickets in the order of their arrival.
        listed: whether it is in the heap of its class.
    """

    __slots__ = ("listed", "owed", "tag", "waiting")

    def __init__(self) -> None:
        self.tag = 0.0
        self.owed = 0
        self.waiting: OrderedDict[int, Ticket] = OrderedDict()
        self.listed = False


class ClassQueue:
    """Requests of one priority class, round robin between tenants.

    Attributes:
        tag: the virtual time, shared by all classes, up to which it has been charged.
        waiting: number of tickets.
    """

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.tag = 0.0
        self.waiting = 0
        self._virtual = 0.0
        self._tenants: dict[str, _Tenant] = {}
        self._heap: list[tuple[float, int, _Tenant]] = []
        self._order = 0

    def push(self, ticket: Ticket) -> None:
        """Add a ticket behind the others of its tenant."""
        tenant = self._tenants.get(ticket.tenant)
        if tenant is None:
            if len(self._tenants) >= _MAX_TENANTS:
                self._forget_idle()
            tenant = self._tenants[ticket.tenant] = _Tenant()
        if not tenant.waiting:
            # A tenant gets no credit for the time without requests.
            tenant.tag = max(tenant.tag + tenant.owed, self._virtual)
            tenant.owed = 0
        tenant.waiting[ticket.number] = ticket
        self.waiting += 1
        if not tenant.listed:
            self._list(tenant)

    def remove(self, ticket: Ticket) -> None:
        """Remove a waiting ticket."""
        del self._tenants[ticket.tenant].waiting[ticket.number]
        self.waiting -= 1

    def first(self) -> Ticket | None:
        """The next ticket."""
        while self._heap:
            tag, _, tenant = self._heap[0]
            if tenant.waiting and tag == tenant.tag:
                return next(iter(tenant.waiting.values()))
            # Its tickets were removed since it was listed.
            heapq.heappop(self._heap)
            tenant.listed = False
            if tenant.waiting:
                self._list(tenant)
        return None

    def pop(self, ticket: Ticket) -> None:
        """Take the ticket that `first` returned, and charge its tenant."""
        tag, _, tenant = heapq.heappop(self._heap)
        tenant.listed = False
        self.remove(ticket)
        self._virtual = max(self._virtual, tag)
        charge = max(1, ticket.cost + tenant.owed)
        tenant.owed += ticket.cost - charge
        tenant.tag += charge
        if tenant.waiting:
            self._list(tenant)

    def settle(self, ticket: Ticket, used: int) -> None:
        """Charge the tokens used instead of those expected."""
        tenant = self._tenants.get(ticket.tenant)
        if tenant is not None:
            tenant.owed += used - ticket.cost

    def _list(self, tenant: _Tenant) -> None:
        self._order += 1
        heapq.heappush(self._heap, (tenant.tag, self._order, tenant))
        tenant.listed = True

    def _forget_idle(self) -> None:
        idle = [name for name, tenant in self._tenants.items() if not tenant.waiting and not tenant.listed]
        for name in idle:
            del self._tenants[name]
