"""Scratch memory of a step: buffers by name, sized by a dry run of the blocks that use them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.layers.backend import Backend, Buffer, Memory

__all__ = ["Stream", "Workspace"]


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
        """The buffer of `memory` from row `start` on, for kernels."""
        memory = self.memory(name, rows, columns, float32=float32)
        return None if self._backend is None else self._backend.buffer(memory[start:])


@dataclasses.dataclass(slots=True)
class Stream:
    """The activations that blocks pass on, as buffers of one number of rows.

    Attributes:
        residual: the stream, without the last sublayer's output.
        hidden: the last sublayer's output, not yet added.
        normed: the next sublayer's input.
        attended: attention's output, before its projection. It shares memory with `normed`.
        slices: (first row, normed from there, hidden from there) of the MLP's slices.
        residual_memory, attended_memory: the memory behind the buffers.
    """

    residual: Buffer
    hidden: Buffer
    normed: Buffer
    attended: Buffer
    slices: list[tuple[int, Buffer, Buffer]]
    residual_memory: Memory
    attended_memory: Memory

    @classmethod
    def of(cls, workspace: Workspace, prefix: str, rows: int, hidden_size: int, q_size: int, mlp_rows: int) -> Stream:
        """The stream of `rows` rows in a workspace."""
        narrow, hidden, residual = f"{prefix}narrow", f"{prefix}hidden", f"{prefix}residual"
        return cls(
            residual=workspace.buffer(residual, rows, hidden_size),
            hidden=workspace.buffer(hidden, rows, hidden_size),
            normed=workspace.buffer(narrow, rows, hidden_size),
            attended=workspace.buffer(narrow, rows, q_size),
            slices=[
                (
                    start,
                    workspace.buffer(narrow, rows, hidden_size, start=start),
                    workspace.buffer(hidden, rows, hidden_size, start=start),
                )
                for start in range(0, rows, mlp_rows)
            ],
            residual_memory=workspace.memory(residual, rows, hidden_size),
            attended_memory=workspace.memory(narrow, rows, q_size),
        )
