"""Garbage collection policy: no full collection while the device waits for a step."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["set_aside", "young_objects_only"]


def set_aside() -> None:
    """Let no later collection walk through what the program holds now: for a process whose loading is over.

    A server's modules and models are tens of thousands of objects; walking through them stalls every stream for 20 ms.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def young_objects_only() -> Iterator[None]:
    """Meanwhile, collections see only what was made meanwhile; before and after, everything.

    With torch loaded a full collection takes longer than many steps. Setting objects aside takes no time, as they are
    only moved from list to list. Programs that have set objects aside themselves (`gc.freeze`) are left alone.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
