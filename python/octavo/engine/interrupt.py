"""Ctrl-C between two steps instead of inside one."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

__all__ = ["DeferredInterrupt"]


class DeferredInterrupt:
    """While it is open, the first Ctrl-C is noted, not raised; a second one is raised at once.

    Outside the main thread, and where the program handles SIGINT its own way, nothing changes.

    Attributes:
        pending: Ctrl-C was pressed.
        forced: it was pressed again, and raised wherever the program was.
    """

    def __init__(self) -> None:
        self.pending = False
        self.forced = False
        self._installed = False

    def __enter__(self) -> DeferredInterrupt:
        """Take SIGINT over."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._installed = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give SIGINT back."""
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.pending:
            self.forced = True
            signal.default_int_handler(number, frame)
        self.pending = True
