"""The worker's clients: the first, without whom it ends, and any others, who come and go."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from octavo.engine.connection import ClientGone, Connection
from octavo.engine.protocol import FromWorker, Logprobs, ProtocolError, StepOutputs

__all__ = ["ID_BITS", "ID_MASK", "Client", "Clients", "split"]

ID_BITS = 48
"""Bits of a request's id that its client may choose; the core sees the client's number above them."""

ID_MASK = (1 << ID_BITS) - 1
"""The bits of its own choice."""
_MAX_CLIENTS = 1 << 14
_PATIENCE_S = 5.0


class Client:
    """One client, its connection and what it waits for.

    Attributes:
        number: 0 for the first.
        unfinished: answers still running, by the core's id of their request; kept for all clients but the first.
        gone: it was given up; nothing of it counts any more.
    """

    def __init__(self, number: int, connection: Connection) -> None:
        self.number = number
        self.connection = connection
        self.unfinished: dict[int, int] = {}
        self.gone = False
        self.clogged_since: float | None = None

    def core_id(self, request_id: int) -> int:
        """The core's id of one of this client's requests.

        Raises:
            ProtocolError: an id out of range.
        """
        if not 0 < request_id <= ID_MASK:
            raise ProtocolError(f"the request id {request_id} is out of range")
        return self.number << ID_BITS | request_id


class Clients:
    """The clients of the worker.

    Args:
        first: the connection that the worker lives for.
        wake: a descriptor that ends a blocking `exchange` when it becomes readable.
        invitations: brings the connections of more clients.

    Attributes:
        newcomers: clients taken in and not greeted yet.
        leavers: clients that have gone, whose requests are still to be aborted.
    """

    def __init__(self, first: Connection, wake: int | None, invitations: socket.socket | None) -> None:
        self.first = Client(0, first)
        self.newcomers: list[Client] = []
        self.leavers: list[Client] = []
        self._others: dict[int, Client] = {}
        self._by_descriptor = {first.fileno(): self.first}
        self._last = 0
        self._wake = wake
        self._invitations = invitations
        self._poll = select.poll()
        self._poll.register(first.fileno(), select.POLLIN)
        if wake is not None:
            self._poll.register(wake, select.POLLIN)
        if invitations is not None:
            invitations.setblocking(False)
            self._poll.register(invitations, select.POLLIN)

    @property
    def held(self) -> bool:
        """Whether a step must wait: a client is too far behind.

        The first client may be behind for as long as it likes. Another one is given up after some seconds.
        """
        held = self.first.connection.clogged
        for client in list(self._others.values()):
            if not client.connection.clogged:
                client.clogged_since = None
            elif client.clogged_since is None:
                client.clogged_since = time.monotonic()
                held = True
            elif time.monotonic() - client.clogged_since > _PATIENCE_S:
                self._drop(client)
            else:
                held = True
        return held

    def exchange(self, *, block: bool) -> list[tuple[Client, Any]]:
        """Send what waits and take what came.

        Args:
            block: wait until there is something to do; a while at most where a client may have to be given up.

        Raises:
            ClientGone: the first client's end is closed.
            ProtocolError: the first client sent a frame that is none of ours.
        """
        for descriptor, client in self._by_descriptor.items():
            # One look a client and step: what waits changes with every message sent.
            self._poll.modify(descriptor, select.POLLIN | (select.POLLOUT if client.connection.pending else 0))
        impatient = any(client.clogged_since is not None for client in self._others.values())
        timeout = (500 if impatient else None) if block else 0
        messages: list[tuple[Client, Any]] = []
        for descriptor, events in self._poll.poll(timeout):
            who = self._by_descriptor.get(descriptor)
            if who is not None:
                messages += [(who, message) for message in self._attempt(who, events)]
            elif descriptor != self._wake:
                self._take_in()
            else:
                self._rest()
        return messages

    def send(self, client: Client, message: FromWorker) -> None:
        """Send, or queue what does not go at once.

        Raises:
            ClientGone: the first client's end is closed.
        """
        if client.gone:
            return
        try:
            client.connection.send(message)
        except ClientGone:
            if client is self.first:
                raise
            self._drop(client)

    def deliver(self, outputs: StepOutputs) -> None:
        """Send a step's events to those they are for."""
        if not self._others and not self._last:
            self.send(self.first, outputs)
            return
        for number, part in split(outputs):
            client = self.owner(number << ID_BITS)
            if client is None:
                continue
            if number:
                self._count_down(client, part)
            self.send(client, part)

    def refuse(self, client: Client, error: ProtocolError) -> None:
        """Give up a client that sent what is no message.

        Raises:
            ProtocolError: the first one did.
        """
        if client is self.first:
            raise error
        self._drop(client)

    def _attempt(self, client: Client, events: int) -> list[Any]:
        try:
            return client.connection.attend(events)
        except (ClientGone, ProtocolError):
            if client is self.first:
                raise
            self._drop(client)
            return []

    def owner(self, core_id: int) -> Client | None:
        """The client of a request; None if it has left."""
        number = core_id >> ID_BITS
        return self.first if number == 0 else self._others.get(number)

    def _rest(self) -> None:
        """Have had enough of the waking up."""
        assert self._wake is not None
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)

    def _take_in(self) -> None:
        assert self._invitations is not None
        try:
            data, descriptors, _, _ = socket.recv_fds(self._invitations, 16, 1)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        if not data:
            self._poll.unregister(self._invitations)
            return
        for descriptor in descriptors:
            self._last += 1
            client = Client(self._last, Connection(socket.socket(fileno=descriptor)))
            self._others[client.number] = client
            self._by_descriptor[descriptor] = client
            self._poll.register(descriptor, select.POLLIN)
            self.newcomers.append(client)
            if self._last >= _MAX_CLIENTS:
                # Numbers are not used again: an id of a client that has gone must never be another's.
                self._poll.unregister(self._invitations)

    def _drop(self, client: Client) -> None:
        if self._others.pop(client.number, None) is None:
            return
        descriptor = client.connection.fileno()
        self._poll.unregister(descriptor)
        del self._by_descriptor[descriptor]
        client.connection.close()
        client.gone = True
        self.leavers.append(client)

    @staticmethod
    def _count_down(client: Client, outputs: StepOutputs) -> None:
        """Forget requests whose last answer has ended."""
        finished = np.frombuffer(outputs.finish_reasons, np.int32).nonzero()[0]
        if not finished.size:
            return
        for request_id in np.frombuffer(outputs.request_ids, np.int64)[finished].tolist():
            core_id = client.core_id(request_id)
            left = client.unfinished.get(core_id, 0) - 1
            if left > 0:
                client.unfinished[core_id] = left
            else:
                client.unfinished.pop(core_id, None)


def split(outputs: StepOutputs) -> Iterator[tuple[int, StepOutputs]]:
    """A step's events by client: (number, events under the ids that the client chose), in the order of the events."""
    ids = np.frombuffer(outputs.request_ids, np.int64)
    started = np.frombuffer(outputs.started, np.int64)
    owners, owners_started = ids >> ID_BITS, started >> ID_BITS
    numbers = np.unique(np.concatenate((owners, owners_started)) if started.size else owners).tolist()
    if len(numbers) == 1:
        own = outputs if numbers[0] == 0 else _with_ids(outputs, ids, started)
        yield numbers[0], own
        return
    for number in numbers:
        yield number, _part(outputs, np.flatnonzero(owners == number), started[owners_started == number])


def _with_ids(outputs: StepOutputs, ids: npt.NDArray[np.int64], started: npt.NDArray[np.int64]) -> StepOutputs:
    return msgspec.structs.replace(
        outputs, request_ids=(ids & ID_MASK).tobytes(), started=(started & ID_MASK).tobytes()
    )


def _part(outputs: StepOutputs, events: npt.NDArray[np.int64], started: npt.NDArray[np.int64]) -> StepOutputs:
    """Some of a step's events."""

    def take(name: str) -> bytes:
        return np.frombuffer(getattr(outputs, name), np.int32)[events].tobytes()

    ends = np.frombuffer(outputs.text_ends, np.int32)
    lasts = ends[events].tolist()
    firsts = np.where(events > 0, ends[events - 1], 0).tolist()
    texts = [outputs.text[first:last] for first, last in zip(firsts, lasts, strict=True)]
    ids = np.frombuffer(outputs.request_ids, np.int64)[events] & ID_MASK
    return StepOutputs(
        ids.tobytes(),
        take("sample_indices"),
        take("token_ids"),
        np.cumsum([len(text) for text in texts], dtype=np.int32).tobytes(),
        b"".join(texts),
        take("finish_reasons"),
        take("stop_reasons"),
        take("cached_tokens"),
        None if outputs.logprobs is None else _logprobs_part(outputs.logprobs, events),
        (started & ID_MASK).tobytes(),
        outputs.started_at if started.size else 0.0,
    )


def _logprobs_part(logprobs: Logprobs, events: npt.NDArray[np.int64]) -> Logprobs:
    def take(data: bytes, width: int) -> bytes:
        return np.frombuffer(data, np.int32).reshape(-1, width)[events].tobytes() if width else b""

    width = logprobs.width
    return Logprobs(take(logprobs.chosen, 1), width, take(logprobs.top_ids, width), take(logprobs.top, width))
