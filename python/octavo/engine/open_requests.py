"""The requests that the worker process runs, as the engine's client sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from octavo.engine.collect import RequestState, apply
from octavo.engine.protocol import Abort, Rejected, Request, StepOutputs
from octavo.engine.requests import submissions
from octavo.sampling_params import SamplingParams

__all__ = ["OpenRequest", "OpenRequests"]

_T = TypeVar("_T")


class OpenRequest(RequestState):
    """A request and its consumer.

    Attributes:
        ready: set when there is something to take, or (with `whole`) when all is there.
        whole: the consumer wants the request as a whole, so wake it once.
    """

    def __init__(
        self, name: str, prompt: str | None, prompt_token_ids: list[int], params: SamplingParams, whole: bool
    ) -> None:
        super().__init__(name, prompt, prompt_token_ids, params)
        self.ready = asyncio.Event()
        self.whole = whole

    def fail(self, error: Exception) -> None:
        """Raise an error in the consumer."""
        self.error = error
        self.ready.set()


class OpenRequests:
    """Requests by number and by name, and the messages about them that are still to be sent.

    Args:
        send: gives the worker a message.
    """

    def __init__(self, send: Callable[[Any], None]) -> None:
        self._send = send
        self._by_number: dict[int, OpenRequest] = {}
        self._numbers: dict[str, int] = {}
        self._last_number = 0
        self._outbox: list[Request] = []
        self._aborts: list[int] = []

    def __len__(self) -> int:
        return len(self._by_number)

    def new_number(self) -> int:
        """Take a number, for a query."""
        self._last_number += 1
        return self._last_number

    @property
    def next_number(self) -> int:
        """The number of the next request."""
        return self._last_number + 1

    def find(self, name: str) -> OpenRequest | None:
        """The open request with a name."""
        number = self._numbers.get(name)
        return None if number is None else self._by_number[number]

    def add(self, number: int, stream: OpenRequest, request: Request) -> None:
        """Open a request under `next_number` and send it."""
        self._last_number = number
        self._by_number[number] = stream
        self._numbers[stream.name] = number
        self._queue(self._outbox, request)

    def leave(self, stream: OpenRequest) -> None:
        """Forget a request, and abort it if it still runs."""
        number = self._numbers.get(stream.name)
        if number is not None and self._by_number.get(number) is stream:
            self._forget(number, stream)
            self._queue(self._aborts, number)

    def apply(self, outputs: StepOutputs, *, push: bool) -> None:
        """Hand a step's outputs to their requests and wake the consumers; `push` as of `collect.apply`."""
        for number, stream in apply(outputs, self._by_number, push=push):
            if stream.num_unfinished == 0:
                self._forget(number, stream)
                stream.ready.set()
            elif not stream.whole:
                stream.ready.set()

    def reject(self, message: Rejected) -> None:
        """End a request that the worker refused."""
        stream = self._by_number.get(message.request_id)
        if stream is not None:
            self._forget(message.request_id, stream)
            stream.fail(message.error.exception())

    def fail(self, error: Callable[[], Exception]) -> None:
        """End every request with an error of its own."""
        streams, self._by_number = self._by_number, {}
        self._numbers.clear()
        self._outbox.clear()
        self._aborts.clear()
        for stream in streams.values():
            stream.fail(error())

    def _forget(self, number: int, stream: OpenRequest) -> None:
        del self._by_number[number]
        del self._numbers[stream.name]

    def _queue(self, queue: list[_T], item: _T) -> None:
        """Send with whatever else this round of the event loop brings, as one message."""
        if not self._outbox and not self._aborts:
            asyncio.get_running_loop().call_soon(self._flush)
        queue.append(item)

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, []
        aborts, self._aborts = self._aborts, []
        for message in submissions(outbox):
            self._send(message)
        if aborts:
            self._send(Abort(aborts))
