"""A progress bar for people: on standard error, if that is a terminal, and only once the work turns out to be long."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["ProgressBar"]

_PATIENCE_S = 1.0


class ProgressBar:
    """Shows nothing for a second, then a bar.

    Args:
        label: what is being done.
        total: how much there is; 0 where it is not known.
        enabled: False never shows anything.
    """

    def __init__(self, label: str, total: int = 0, *, enabled: bool = True) -> None:
        self._label = label
        self._total = total
        self._enabled = enabled and sys.stderr.isatty()
        self._show_at = time.monotonic() + _PATIENCE_S
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def stage(self, label: str, done: int, total: int) -> None:
        """Show a stage of the work, with its own total."""
        self._label, self._total = label, total
        self.update(done)

    def due(self) -> bool:
        """Whether `update` would show anything."""
        return self._enabled and (self._bar is not None or time.monotonic() >= self._show_at)

    def update(self, done: int, note: str = "") -> None:
        """Show how much is done, and a note beside it."""
        if not self.due():
            return
        if self._bar is None:
            self._open()
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=self._label, completed=done, total=self._total or None, note=note)

    def _open(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task(self._label, total=self._total or None, note="")
        self._bar.start()

    def __enter__(self) -> ProgressBar:
        """The bar."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take it off the screen."""
        if self._bar is not None:
            self._bar.stop()
