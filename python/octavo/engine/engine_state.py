"""State of an engine."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["EngineState"]


class EngineState(msgspec.Struct, kw_only=True, frozen=True):
    """State of an engine, for probes and people.

    Attributes:
        name: `loading` for the first time, `ready`, `restarting` after its process ended, or `dead` for good.
        reason: why it is not ready; the last reason of a restart while it is.
        since: Unix time at which this state began.
        restarts: times its process was started again.
        pid: of its process; 0 where there is none, or another process started it.
        progress: (stage, done, total) of the load that runs; total 0 where it is not known.
        retry_after: seconds after which a request is worth a try; None where that is not known.
    """

    name: Literal["loading", "ready", "restarting", "dead"]
    reason: str | None = None
    since: float = 0.0
    restarts: int = 0
    pid: int = 0
    progress: tuple[str, int, int] | None = None
    retry_after: float | None = None
