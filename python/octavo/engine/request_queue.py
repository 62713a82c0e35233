"""Requests on their way into the core: they wait for their constraints to be compiled, and batches enter as a whole."""

from __future__ import annotations

import functools
import queue
import time
from collections.abc import Callable

from octavo.engine.clients import Client, Clients
from octavo.engine.constraints import Compiled
from octavo.engine.loop import EngineLoop
from octavo.engine.protocol import Accepted, ErrorRecord, Rejected, Request, Submit
from octavo.engine.requests import CheckedRequest, read_request
from octavo.errors import InvalidRequest, OctavoError

__all__ = ["RequestQueue"]


class _Batch:
    """Requests of one client that are queued together or not at all.

    Attributes:
        pending: the requests so far; empty once one was rejected.
        num_compiling: of those, how many are not compiled yet.
        whole: no more are to come.
        refusal: the first request that cannot be served, and why.
    """

    def __init__(self) -> None:
        self.pending: list[_Pending] = []
        self.num_compiling = 0
        self.whole = False
        self.refusal: tuple[int, OctavoError] | None = None


class _Pending:
    """A request that is not in the core yet."""

    __slots__ = ("arrival_us", "batch", "client", "compiled", "is_compiling", "request", "request_id")

    def __init__(
        self, client: Client, request_id: int, request: CheckedRequest, arrival_us: int, batch: _Batch | None
    ) -> None:
        self.client = client
        self.request_id = request_id
        self.request = request
        self.arrival_us = arrival_us
        self.batch = batch
        self.compiled: Compiled | None = None
        self.is_compiling = False


class RequestQueue:
    """Queues requests. They keep their order, except that one waiting for its constraint does not delay others.

    Args:
        clients: receive rejections.
        loop: takes the requests.
        wake: ends the worker's sleep; called by other threads.
    """

    def __init__(self, clients: Clients, loop: EngineLoop, wake: Callable[[], None]) -> None:
        self._clients = clients
        self._loop = loop
        self._wake = wake
        self._pending: dict[int, _Pending] = {}
        self._batches: dict[Client, _Batch] = {}
        self._compiled: queue.SimpleQueue[tuple[_Pending, Compiled | OctavoError]] = queue.SimpleQueue()

    @property
    def num_answers(self) -> int:
        """Completions whose request is not in the core yet."""
        return sum(pending.request.params.n for pending in self._pending.values())

    def submit(self, client: Client, message: Submit) -> None:
        """Take a client's requests.

        Raises:
            ProtocolError: an id out of range.
        """
        now_us = time.monotonic_ns() // 1000
        batch = self._batches.setdefault(client, _Batch()) if message.batch else None
        for request in message.requests:
            self._take(client, request, now_us, batch)
        if batch is not None and not message.more:
            # What follows is of another batch.
            del self._batches[client]
            batch.whole = True
            self._close(client, batch)

    def abort(self, client: Client, request_ids: list[int]) -> None:
        """End requests in any state.

        Raises:
            ProtocolError: an id out of range.
        """
        for request_id in request_ids:
            core_id = client.core_id(request_id)
            client.unfinished.pop(core_id, None)
            pending = self._pending.pop(core_id, None)
            if pending is None:
                self._loop.abort(core_id)
            elif pending.batch is not None:
                pending.batch.pending.remove(pending)
                pending.batch.num_compiling -= pending.is_compiling
                self._close(client, pending.batch)

    def leave(self, client: Client) -> None:
        """End all requests of a client."""
        self._batches.pop(client, None)
        for core_id in [core_id for core_id, pending in self._pending.items() if pending.client is client]:
            del self._pending[core_id]
        for core_id in client.unfinished:
            self._loop.abort(core_id)

    def take_compiled(self) -> None:
        """Queue requests whose constraints were compiled since the last call."""
        while True:
            try:
                pending, outcome = self._compiled.get_nowait()
            except queue.Empty:
                return
            core_id = pending.request.request_id
            if self._pending.get(core_id) is not pending:
                # It was aborted, or its client has gone.
                continue
            pending.is_compiling = False
            if isinstance(outcome, Compiled):
                pending.compiled = outcome
            batch = pending.batch
            if batch is not None:
                batch.num_compiling -= 1
                if isinstance(outcome, OctavoError):
                    self._refuse_batch(batch, pending.request_id, outcome)
                self._close(pending.client, batch)
                continue
            del self._pending[core_id]
            if isinstance(outcome, OctavoError):
                self._refuse(pending.client, pending.request_id, outcome)
            else:
                self._enter(pending)

    def _take(self, client: Client, request: Request, now_us: int, batch: _Batch | None) -> None:
        if batch is not None and batch.refusal is not None:
            return
        core_id = client.core_id(request.request_id)
        try:
            if core_id in self._pending:
                raise InvalidRequest(f"request_id: {request.request_id} is in use", "request_id")
            pending = _Pending(client, request.request_id, read_request(request, core_id), now_us, batch)
        except OctavoError as error:
            if batch is None:
                self._refuse(client, request.request_id, error)
            else:
                self._refuse_batch(batch, request.request_id, error)
            return
        constraint = pending.request.constraint
        if batch is None and constraint is None:
            self._enter(pending)
            return
        self._pending[core_id] = pending
        if batch is not None:
            batch.pending.append(pending)
        if constraint is not None:
            pending.is_compiling = True
            if batch is not None:
                batch.num_compiling += 1
            self._loop.constraints.compile_soon(
                constraint,
                functools.partial(self._deliver, pending),
                # Asked by the thread that would compile; an abort or a leave ends the need.
                lambda: self._pending.get(core_id) is pending,
            )

    def _deliver(self, pending: _Pending, outcome: Compiled | OctavoError) -> None:
        """Take a compiled constraint; called by its thread."""
        self._compiled.put((pending, outcome))
        self._wake()

    def _enter(self, pending: _Pending) -> None:
        try:
            self._loop.submit(pending.request, pending.arrival_us, pending.compiled)
        except OctavoError as error:
            self._refuse(pending.client, pending.request_id, error)
        else:
            self._note(pending)

    def _close(self, client: Client, batch: _Batch) -> None:
        """Queue a complete batch, all or nothing: no step runs in between."""
        if not batch.whole:
            return
        if batch.refusal is not None:
            self._refuse(client, *batch.refusal)
            return
        if batch.num_compiling:
            return
        for pending in batch.pending:
            del self._pending[pending.request.request_id]
        for count, pending in enumerate(batch.pending):
            try:
                self._loop.submit(pending.request, pending.arrival_us, pending.compiled)
            except OctavoError as error:
                for entered in batch.pending[:count]:
                    self._loop.abort(entered.request.request_id)
                self._refuse(client, pending.request_id, error)
                return
        for pending in batch.pending:
            self._note(pending)
        self._clients.send(client, Accepted())

    def _refuse_batch(self, batch: _Batch, request_id: int, error: OctavoError) -> None:
        """Reject a whole batch."""
        batch.refusal = (request_id, error)
        for pending in batch.pending:
            del self._pending[pending.request.request_id]
        batch.pending.clear()

    def _refuse(self, client: Client, request_id: int, error: OctavoError) -> None:
        self._clients.send(client, Rejected(request_id, ErrorRecord.of(error)))

    @staticmethod
    def _note(pending: _Pending) -> None:
        if pending.client.number:
            pending.client.unfinished[pending.request.request_id] = pending.request.params.n
