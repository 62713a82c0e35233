"""Tensors of a GGUF file under the model's own names, with the converter's transforms undone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from octavo import _core
from octavo.errors import CorruptFile
from octavo.loading.gguf_config import refuse_split
from octavo.loading.mapping import MappedFile
from octavo.loading.weights import WeightPart, WeightSource

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from numpy.typing import NDArray

    from octavo.loading.weights import TensorName

__all__ = ["GgufWeights"]


class GgufWeights(WeightSource):
    """The tensors of one GGUF file.

    Args:
        path: of the file.
        tensors: of the model; a tensor that it does not name keeps its GGUF name.

    Raises:
        CorruptFile, UnsupportedModel: as `_core.read_gguf`, and two tensors of one name.
    """

    has_offsets = True

    def __init__(self, path: Path, tensors: Iterable[TensorName] = ()) -> None:
        metadata, stored = _core.read_gguf(str(path))
        refuse_split(metadata, path)
        known = {tensor.gguf_name: tensor for tensor in tensors}
        self._heads = {tensor.name: tensor.gguf_heads for tensor in known.values() if tensor.gguf_heads}
        self._file = MappedFile(path)
        self._tensors: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        for stored_name, kind, shape, offset, num_bytes in stored:
            name = known[stored_name].name if stored_name in known else stored_name
            if name in self._tensors:
                raise CorruptFile(f"{path}: holds the tensor `{stored_name}` twice")
            self._tensors[name] = (kind, tuple(shape), offset, num_bytes)

    def names(self) -> list[str]:
        """All names, in file order."""
        return list(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def prefetch(self) -> None:
        """Ask for read-ahead of the file."""
        self._file.prefetch()

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(kind, shape) of one tensor."""
        return self._entry(name)[:2]

    def get(self, name: str) -> WeightPart:
        """One tensor where it is mapped; q and k as a copy with the rows in order."""
        kind, shape, offset, num_bytes = self._entry(name)
        data = self._file.view(offset, num_bytes)
        heads = self._heads.get(name)
        if heads is not None:
            data = self._unpermute(name, data, shape[0], heads)
        return WeightPart(kind, shape, data.ctypes.data, num_bytes, data)

    def _entry(self, name: str) -> tuple[str, tuple[int, ...], int, int]:
        entry = self._tensors.get(name)
        if entry is None:
            raise CorruptFile(f"{self._file.path}: lacks the tensor `{name}`")
        return entry

    def _unpermute(self, name: str, data: NDArray[np.uint8], rows: int, heads: int) -> NDArray[np.uint8]:
        """Rows (head, pair, half) back to (head, half, pair): whole rows of bytes move, blocks stay whole."""
        if rows % (2 * heads) or data.size % rows:
            raise CorruptFile(f"{self._file.path}: `{name}` has {rows} rows, which {heads} heads cannot share")
        paired = data.reshape(heads, rows // heads // 2, 2, data.size // rows)
        return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(-1)
