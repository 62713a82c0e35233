"""Queue of compilations: round robin between tenants, so a flood delays only its sender."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from octavo.server.error_responses import QueueFull

__all__ = ["CompileQueue"]

Result = TypeVar("Result")

_NUM_THREADS = 2
# The compiler releases the GIL. Few threads leave cores to the event loop and the text threads.
_threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="octavo-compile")


class CompileQueue:
    """Compilations of one server, used from its event loop only.

    Args:
        limit: compilations that may wait.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: dict[str, OrderedDict[asyncio.Future[Any], Callable[[], Any]]] = {}
        self._turns: deque[str] = deque()
        self._num_waiting = 0
        self._num_running = 0

    def submit(self, tenant: str, work: Callable[[], Result]) -> asyncio.Future[Result]:
        """Run `work` in a thread at the tenant's turn, unless the future is cancelled before.

        Raises:
            QueueFull: too many compilations wait.
        """
        if self._num_waiting >= self._limit:
            raise QueueFull(
                f"The server is busy: {self._num_waiting} constraints wait for compilation (max_queue_requests "
                f"{self._limit}); try again later",
                1.0,
            )
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        if tenant not in self._waiting:
            self._waiting[tenant] = OrderedDict()
            self._turns.append(tenant)
        self._waiting[tenant][future] = work
        self._num_waiting += 1
        future.add_done_callback(partial(self._leave, tenant))
        self._start()
        return future

    def _leave(self, tenant: str, future: asyncio.Future[Any]) -> None:
        """Remove a cancelled compilation, so that it takes no place and keeps no text."""
        jobs = self._waiting.get(tenant)
        if jobs is None or jobs.pop(future, None) is None:
            return
        self._num_waiting -= 1
        if not jobs:
            del self._waiting[tenant]
            self._turns.remove(tenant)

    def _start(self) -> None:
        while self._num_running < _NUM_THREADS and self._turns:
            tenant = self._turns.popleft()
            jobs = self._waiting[tenant]
            future, work = jobs.popitem(last=False)
            self._num_waiting -= 1
            if jobs:
                self._turns.append(tenant)
            else:
                del self._waiting[tenant]
            self._num_running += self._begin(future, work)

    def _begin(self, future: asyncio.Future[Any], work: Callable[[], Any]) -> bool:
        if future.cancelled():
            return False
        running = asyncio.get_running_loop().run_in_executor(_threads, work)
        running.add_done_callback(partial(self._end, future))
        return True

    def _end(self, future: asyncio.Future[Result], done: asyncio.Future[Result]) -> None:
        self._num_running -= 1
        self._start()
        if done.cancelled():
            future.cancel()
            return
        error = done.exception()
        if future.cancelled():
            return
        if error is None:
            future.set_result(done.result())
        else:
            future.set_exception(error)
