"""Progress of a load on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from octavo.log_format import for_people

__all__ = ["loading_progress"]


@contextmanager
def loading_progress() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on standard error; silent without a terminal, and with JSON logs.

    Yields:
        to be called with (stage, done, total); total 0 where unknown.
    """
    if not for_people():
        yield lambda stage, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[share]}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def update(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total or None, share="")
            share = f"{100 * done // total} %" if total else ""
            bars.update(tasks[stage], completed=done, total=total or None, share=share)

        yield update
