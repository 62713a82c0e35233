"""The worker's current activity, on a page of memory that its parent reads without messages or threads.

The worker's loop notes where it is as it goes. That says more than a thread that beats: a thread shows that it lives
itself, and goes on beating beside a loop that hangs.
"""

from __future__ import annotations

import contextlib
import enum
import mmap
import os
import time

__all__ = ["Heartbeat", "Phase"]

_PAGE_BYTES = 4096
_PHASE, _STEPS, _TOTALS = 0, 1, 2


class Phase(enum.IntEnum):
    """Activity of the loop; all but the first four are phases of serving, in order."""

    STARTING = 0
    LOADING = 1
    IDLE = 2
    HELD = 3
    """The client does not read what it is sent."""
    RECEIVE = 4
    PLAN = 5
    LAUNCH = 6
    WAIT = 7
    COMMIT = 8
    SEND = 9

    @property
    def working(self) -> bool:
        """Whether a step is due."""
        return self >= Phase.RECEIVE


class Heartbeat:
    """Phase, steps and seconds a phase, as 64-bit numbers on a page.

    One process writes, any may read. A number is written whole, so a reader sees the old one or the new one.

    Args:
        descriptor: of the shared page; one of this process alone when None.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self._map = mmap.mmap(-1 if descriptor is None else descriptor, _PAGE_BYTES)
        self._page = memoryview(self._map).cast("q")
        self._phase = self._page[_PHASE]
        self._since = time.perf_counter_ns()

    @staticmethod
    def create() -> tuple[Heartbeat, int]:
        """A page to share, and the descriptor that a process which inherits it opens it by."""
        descriptor = os.memfd_create("octavo-heartbeat")
        try:
            os.ftruncate(descriptor, _PAGE_BYTES)
            return Heartbeat(descriptor), descriptor
        except BaseException:
            os.close(descriptor)
            raise

    def enter(self, phase: Phase) -> None:
        """Note that a phase begins, and how long the one before took."""
        now = time.perf_counter_ns()
        page = self._page
        page[_TOTALS + self._phase] += now - self._since
        page[_PHASE] = self._phase = phase
        self._since = now

    def resume(self) -> None:
        """Forget the time since the last phase began: nobody asked for a step meanwhile."""
        self._since = time.perf_counter_ns()

    def count_step(self) -> None:
        """Note that a step is complete."""
        self._page[_STEPS] += 1

    @property
    def phase(self) -> Phase:
        """Activity of the loop; `STARTING` for an unknown number."""
        number = self._page[_PHASE]
        return Phase(number) if 0 <= number < len(Phase) else Phase.STARTING

    @property
    def steps(self) -> int:
        """Steps completed."""
        return self._page[_STEPS]

    def seconds(self, phase: Phase) -> float:
        """Time spent in a phase, up to the last change."""
        return self._page[_TOTALS + phase] / 1e9

    def stats(self) -> dict[str, int | float]:
        """The host's time by part of the step, as `stats()` carries it; `host_steps` is what to divide by."""
        parts = (Phase.RECEIVE, Phase.PLAN, Phase.LAUNCH, Phase.WAIT, Phase.COMMIT, Phase.SEND)
        totals: dict[str, int | float] = {f"host_{part.name.lower()}_seconds": self.seconds(part) for part in parts}
        totals["host_steps"] = self.steps
        return totals

    def close(self) -> None:
        """Let go of the page. Idempotent."""
        with contextlib.suppress(ValueError):
            self._page.release()
            self._map.close()
