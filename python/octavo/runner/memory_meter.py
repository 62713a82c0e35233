"""Measures how much GPU memory an engine takes while it is built, apart from other users of the GPU."""

from __future__ import annotations

import threading
import weakref

import torch

__all__ = ["MemoryMeter"]


class MemoryMeter:
    """Counts from when it is made to `stop`.

    torch's allocator counts for a whole process. Of two engines that are built at once in one, none can tell what the
    other took.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._alone = True
        with _LOCK:
            for other in _RUNNING:
                other._alone = self._alone = False
            _RUNNING.add(self)
        self._before = self._held()

    def stop(self) -> int | None:
        """Bytes that tensors take, or the allocator holds for them, beyond those at the start.

        Returns:
            None where another meter ran meanwhile.
        """
        with _LOCK:
            _RUNNING.discard(self)
        taken = max(now - before for now, before in zip(self._held(), self._before, strict=True))
        return taken if self._alone else None

    def _held(self) -> tuple[int, int]:
        # What the allocator had spare at the start counts once tensors are in it.
        return torch.cuda.memory_allocated(self._device), torch.cuda.memory_reserved(self._device)


_LOCK = threading.Lock()
_RUNNING: weakref.WeakSet[MemoryMeter] = weakref.WeakSet()
