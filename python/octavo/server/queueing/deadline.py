"""The end of a request's time."""

from __future__ import annotations

import asyncio
from typing import Any

__all__ = ["Deadline"]


class Deadline:
    """The end of a request's time: interrupts the wait for its next piece, never the sending of one.

    Args:
        at: on the loop's clock.

    Attributes:
        at: as given.
        passed: whether it is over.
    """

    __slots__ = ("_handle", "_interrupted", "_waiting", "at", "passed")

    def __init__(self, at: float) -> None:
        self.at = at
        self.passed = False
        self._interrupted = False
        self._waiting: asyncio.Task[Any] | None = None
        self._handle = asyncio.get_running_loop().call_at(at, self._expire)

    def _expire(self) -> None:
        self.passed = True
        if self._waiting is not None:
            self._interrupted = True
            self._waiting.cancel()

    def begin_wait(self) -> bool:
        """The current task is about to wait for what the deadline may interrupt; False when it is over already."""
        if self.passed:
            return False
        self._waiting = asyncio.current_task()
        return True

    def end_wait(self) -> None:
        """The wait is over."""
        self._waiting = None

    def interrupted(self) -> bool:
        """Whether the cancellation just caught came from here; it then counts for nothing else."""
        mine, self._interrupted = self._interrupted, False
        if mine:
            task = asyncio.current_task()
            uncancel = getattr(task, "uncancel", None)  # from Python 3.11 on
            if uncancel is not None:
                uncancel()
        return mine

    def close(self) -> None:
        """No longer needed."""
        self._handle.cancel()
