"""Whether a worker that lives still gets anywhere.

Three things are believed, all of them kept by someone else than the part that may hang: what the kernel says of the
process (stopped or not, how much it has computed), what the loop noted when it last went on (see `heartbeat`), and this
process's own clock, but only as far as it ran itself.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import msgspec

from octavo.config import EngineConfig
from octavo.engine.heartbeat import Phase

__all__ = ["ProcessLook", "RestartPolicy", "Watchdog", "look_at"]

_TICKS = os.sysconf("SC_CLK_TCK")
_BUSY_SHARE = 0.05


class RestartPolicy(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """When an engine's process counts as hung, and how it is started again; all in seconds.

    Attributes:
        first_delay_s: before the first restart; each further one in a row waits twice as long.
        max_delay_s: the longest wait.
        max_failures: restarts in a row that may fail, or end soon, before the engine is given up.
        stable_s: an engine that served for as long starts to count anew.
        stall_s: a step may stand still for as long: on a CPU without computing, on a GPU whatever the host does.
        step_limit_s: a step may take as long, whatever it does.
        stopped_s: a process may be stopped (SIGSTOP) for as long.
        wait_s: a request waits for a restart, at most.
    """

    first_delay_s: float = 0.5
    max_delay_s: float = 30.0
    max_failures: int = 5
    stable_s: float = 60.0
    stall_s: float = 30.0
    step_limit_s: float = 900.0
    stopped_s: float = 2.0
    wait_s: float = 5.0

    @classmethod
    def of(cls, config: EngineConfig) -> RestartPolicy:
        """The policy of an engine's settings."""
        return cls(max_failures=config.restart_limit, stall_s=config.stall_timeout)

    @property
    def interval_s(self) -> float:
        """Between two looks."""
        return min(0.5, self.stall_s / 4, self.stopped_s / 4)

    def delay(self, failures: int) -> float:
        """Seconds before the next start, after so many failures in a row."""
        return min(self.max_delay_s, self.first_delay_s * 2.0 ** min(failures - 1, 32))


class ProcessLook(NamedTuple):
    """A process as the kernel sees it: its state's letter, and the seconds that all its threads have computed."""

    state: str
    cpu_s: float


def look_at(pid: int) -> ProcessLook | None:
    """Look at a process; None when it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command's name is in brackets and may hold anything, brackets too.
    fields = text[text.rindex(")") + 2 :].split()
    return ProcessLook(fields[0], (int(fields[11]) + int(fields[12])) / _TICKS)


class Watchdog:
    """Decides, look by look, whether a worker hangs.

    Args:
        policy: how long what may last.
    """

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._looked_at: float | None = None
        self._stopped_s = self._still_s = self._idle_s = self._cpu_s = 0.0
        self._mark: tuple[Phase, int] | None = None

    def look(self, now: float, process: ProcessLook | None, phase: Phase, steps: int, *, computes: bool) -> str | None:
        """Judge.

        Args:
            now: seconds of a clock that only goes forward.
            process: as the kernel sees it; None when it has ended, which is not judged here.
            phase: what the loop does.
            steps: steps completed.
            computes: a step is computed by the process itself, so that one that does not compute stands still.

        Returns:
            What is wrong, in words; None while nothing is.
        """
        policy = self._policy
        # Where this process was stopped or busy itself, the worker may not have had its chance either.
        elapsed = 0.0 if self._looked_at is None else min(now - self._looked_at, 2 * policy.interval_s)
        self._looked_at = now
        if process is None:
            return None
        computed = process.cpu_s - self._cpu_s
        self._cpu_s = process.cpu_s
        self._stopped_s = self._stopped_s + elapsed if process.state == "T" else 0.0
        if self._stopped_s >= policy.stopped_s:
            return f"the engine process was stopped by a signal for {self._stopped_s:.1f} s"
        mark = (phase, steps)
        if mark != self._mark or not phase.working:
            self._mark = mark
            self._still_s = self._idle_s = 0.0
            return None
        self._still_s += elapsed
        # Waiting for a disk (D) is slow, not hung; the limit of a step holds for it too.
        moving = computes and (process.state == "D" or computed > _BUSY_SHARE * elapsed)
        self._idle_s = 0.0 if moving else self._idle_s + elapsed
        where = f"step {steps + 1}, {phase.name.lower()}"
        if self._idle_s >= policy.stall_s:
            return f"the engine process made no progress for {self._idle_s:.1f} s ({where})"
        if self._still_s >= policy.step_limit_s:
            return f"the engine process took more than {policy.step_limit_s:g} s for one step ({where})"
        return None
