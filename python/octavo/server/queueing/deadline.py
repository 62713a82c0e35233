"""The deadline of a request."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from octavo.errors import InvalidRequest
from octavo.server.transport.http import Scope, header

__all__ = ["Deadline", "request_deadline"]

_MAX_SECONDS = 7 * 86400.0


def request_deadline(scope: Scope, arrival: float, limit: float | None, timeout: float | None) -> float | None:
    """The earliest deadline of a request, on the loop's clock. None if it has none.

    Args:
        scope: ASGI's. The header `X-Request-Timeout` gives seconds.
        arrival: when the request came, on the loop's clock.
        limit: seconds that the server allows.
        timeout: seconds that the request's body asks for.

    Raises:
        InvalidRequest: the header or the body does not give a valid number of seconds.
    """
    limits = [limit]
    if timeout is not None:
        limits.append(_checked(timeout, "timeout"))
    given = header(scope, b"x-request-timeout")
    if given is not None:
        try:
            seconds = float(given)
        except ValueError:
            raise InvalidRequest(
                f"X-Request-Timeout: {given[:40]!a} is not a number of seconds", "X-Request-Timeout"
            ) from None
        limits.append(_checked(seconds, "X-Request-Timeout"))
    known = [seconds for seconds in limits if seconds is not None]
    return arrival + min(known) if known else None


def _checked(value: float, field: str) -> float:
    if not (math.isfinite(value) and 0 < value <= _MAX_SECONDS):
        raise InvalidRequest(f"{field}: {value:g} is not a number of seconds above 0 and up to {_MAX_SECONDS:g}", field)
    return value


class Deadline:
    """Interrupts the wait for a request's next token when its time is over. It never interrupts a send.

    Args:
        at: the deadline, on the loop's clock.

    Attributes:
        at: as given.
        passed: whether the deadline is over.
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
        """Announce a wait of the current task that the deadline may interrupt. False if the deadline is over."""
        if self.passed:
            return False
        self._waiting = asyncio.current_task()
        return True

    def end_wait(self) -> None:
        """The wait is over."""
        self._waiting = None

    def interrupted(self) -> bool:
        """Whether the cancellation just caught came from this deadline. If so, it is taken back."""
        mine, self._interrupted = self._interrupted, False
        if mine:
            task = asyncio.current_task()
            uncancel = getattr(task, "uncancel", None)  # from Python 3.11 on
            if uncancel is not None:
                uncancel()
        return mine

    def close(self) -> None:
        """Stop the timer."""
        self._handle.cancel()
