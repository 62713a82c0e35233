"""Progress of downloads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from octavo.log_format import for_people

__all__ = ["Progress", "progress_bar"]

Progress = Callable[[str, int, int], None]
"""Called while something arrives: what it is, how much so far, how much in all (0 when not known)."""


@contextlib.contextmanager
def progress_bar(progress: Progress | None) -> Iterator[Progress]:
    """The progress callback: the caller's function, else a bar on standard error if it is a terminal."""
    if progress is not None:
        yield progress
        return
    if not for_people():
        yield lambda label, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, object] = {}

        def report(label: str, done: int, total: int) -> None:
            if label not in tasks:
                tasks[label] = bar.add_task(label, total=total or None)
            bar.update(tasks[label], completed=min(done, total) if total else done)  # type: ignore[arg-type]

        yield report
