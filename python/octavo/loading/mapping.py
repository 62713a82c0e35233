"""A file mapped into memory, read-only."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np

from octavo.errors import CorruptFile

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["MappedFile"]


class MappedFile:
    """The bytes of a file where the page cache holds them; nothing is read before it is touched.

    Attributes:
        path: the file.
        data: uint8[bytes of the file], read-only. It keeps the mapping alive, as does every slice of it.
    """

    def __init__(self, path: Path) -> None:
        """Map the file.

        Raises:
            CorruptFile: the file is empty. OSError: it cannot be opened.
        """
        self.path = path
        with path.open("rb") as file:
            try:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as error:
                raise CorruptFile(f"{path}: the file is empty") from error
        self.data: NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)

    def prefetch(self) -> None:
        """Ask the system to read the whole file ahead; returns at once."""
        if hasattr(mmap, "MADV_WILLNEED"):
            self._map.madvise(mmap.MADV_WILLNEED)

    def view(self, offset: int, num_bytes: int) -> NDArray[np.uint8]:
        """uint8[num_bytes] at an offset.

        Raises:
            CorruptFile: it does not lie in the file.
        """
        if offset < 0 or num_bytes < 0 or offset + num_bytes > self.data.size:
            raise CorruptFile(
                f"{self.path}: bytes {offset} to {offset + num_bytes} lie outside the file of {self.data.size}"
            )
        return self.data[offset : offset + num_bytes]
