"""Scratch memory of a step: buffers by name, sized by a dry run of the blocks that use them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.layers.backend import Backend, Buffer, Memory

__all__ = ["Workspace"]


class Workspace:
    """Scratch buffers by name.

    Buffers of one name share memory, so only one of them may be live at a time. Without a backend nothing is
    allocated: every request is recorded, and `sizes` says what a real workspace needs. Blocks bind to both in the
    same way, so no second formula can drift.

    Args:
        backend: allocates the memory; None for a dry run.
        sizes: of a dry run, when there is a backend.

    Attributes:
        sizes: elements by name and whether they are float32 (else of the model's dtype).
    """

    def __init__(self, backend: Backend | None = None, sizes: dict[tuple[str, bool], int] | None = None) -> None:
        self.sizes: dict[tuple[str, bool], int] = dict(sizes or {})
        self._backend = backend
        self._memory: dict[tuple[str, bool], Memory] = {}
        if backend is not None:
            for (name, float32), size in self.sizes.items():
                self._memory[name, float32] = backend.empty(size, float32=float32)

    def num_bytes(self, itemsize: int) -> int:
        """Bytes of all buffers, the model's dtype taking `itemsize`."""
        return sum(size * (4 if float32 else itemsize) for (_, float32), size in self.sizes.items())

    def memory(self, name: str, rows: int, columns: int, *, float32: bool = False) -> Memory:
        """The named memory as [rows, columns]; None in a dry run."""
        if self._backend is None:
            key = (name, float32)
            self.sizes[key] = max(self.sizes.get(key, 0), rows * columns)
            return None
        return self._memory[name, float32][: rows * columns].reshape(rows, columns)

    def buffer(self, name: str, rows: int, columns: int, *, float32: bool = False, start: int = 0) -> Buffer:
        """As `memory`, from row `start` on, as the kernels take it."""
        memory = self.memory(name, rows, columns, float32=float32)
        return None if self._backend is None else self._backend.buffer(memory[start:])
