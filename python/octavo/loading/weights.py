"""Access to a model's tensors by name, in files of any format."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

from octavo.errors import CorruptFile, UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch


__all__ = [
    "TORCH_NAMES",
    "RenamedWeights",
    "TensorName",
    "WeightPart",
    "WeightSource",
]

TORCH_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Kinds of tensors that torch has, and its names for them."""


@dataclasses.dataclass(frozen=True)
class WeightPart:
    """One tensor's bytes in memory, row-major and contiguous.

    Attributes:
        kind: `F32`, `F16`, `BF16`, ..., or a GGUF block type such as `Q4_1`.
        shape: in torch's order, in elements.
        pointer: address of the first byte; not necessarily aligned to the element.
        num_bytes: length.
        owner: keeps the memory alive; hold on to the part as long as the pointer is used.
    """

    kind: str
    shape: tuple[int, ...]
    pointer: int
    num_bytes: int
    owner: object = dataclasses.field(repr=False)


class TensorName(Protocol):
    """Names of a tensor in each file format; see `octavo.layers.parameter.Parameter`."""

    @property
    def name(self) -> str:
        """In Hugging Face's files."""
        ...

    @property
    def gguf_name(self) -> str:
        """In GGUF files."""
        ...

    @property
    def gguf_heads(self) -> int:
        """Heads whose rows GGUF files hold in pairs; 0 for the usual order."""
        ...


class WeightSource(ABC):
    """The tensors of a model under Hugging Face's names, such as `model.layers.0.self_attn.q_proj.weight`.

    Attributes:
        has_offsets: norms that are applied as 1 + w are stored as that sum.
    """

    has_offsets = False

    @abstractmethod
    def names(self) -> list[str]:
        """Names of all tensors, in the order they lie in the files."""

    @abstractmethod
    def get(self, name: str) -> WeightPart:
        """One tensor where it lies, with the file format's own transforms undone.

        Raises:
            CorruptFile: there is none of that name.
        """

    @abstractmethod
    def __contains__(self, name: object) -> bool: ...

    @abstractmethod
    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(kind, shape) without touching the tensor's bytes; raises as `get`."""

    def prefetch(self) -> None:  # noqa: B027
        """Ask the system to read the files ahead; returns at once."""

    def require(self, names: Iterable[str]) -> None:
        """Raise CorruptFile that names every tensor of `names` that is missing."""
        missing = [name for name in names if name not in self]
        if missing:
            more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
            raise CorruptFile(f"the model's files lack tensors: {', '.join(missing[:8])}{more}")

    def to_torch(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A copy of one tensor, dequantized.

        Args:
            name: Hugging Face's name.
            dtype: what to convert to; the stored one when None, float32 for GGUF block types.

        Raises:
            CorruptFile: there is none of that name. UnsupportedModel: a kind Octavo cannot convert.
        """
        return part_to_torch(self.get(name), dtype)


def part_to_torch(part: WeightPart, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Convert a part to a tensor; see `WeightSource.to_torch`."""
    import ctypes

    import torch

    stored = TORCH_NAMES.get(part.kind)
    if stored is not None:
        tensor = torch.empty(part.shape, dtype=getattr(torch, stored))
        if tensor.numel() * tensor.element_size() != part.num_bytes:
            raise CorruptFile(f"{part.num_bytes} bytes are not a tensor {part.shape} of {part.kind}")
        ctypes.memmove(tensor.data_ptr(), part.pointer, part.num_bytes)
        return tensor if dtype is None else tensor.to(dtype)
    from octavo import _core

    if len(part.kind) < 2 or not part.kind.startswith(("Q", "I", "T", "M")):
        raise UnsupportedModel(f"tensor kind {part.kind!r} is not one Octavo can convert")
    direct = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    tensor = torch.empty(part.shape, dtype=direct)
    _core.dequantize(
        part.pointer,
        part.num_bytes,
        part.kind,
        tensor.data_ptr(),
        tensor.numel(),
        "bfloat16" if direct == torch.bfloat16 else "float32",
    )
    return tensor if dtype is None else tensor.to(dtype)


class RenamedWeights(WeightSource):
    """Tensors of files with a prefix before the usual names.

    Args:
        inner: the files.
        prefixes: from a prefix in the files to the usual one; the first that fits counts.
    """

    def __init__(self, inner: WeightSource, prefixes: Mapping[str, str]) -> None:
        self.has_offsets = inner.has_offsets
        self._inner = inner
        self._stored: dict[str, str] = {}
        for stored in inner.names():
            name = next((new + stored[len(old) :] for old, new in prefixes.items() if stored.startswith(old)), stored)
            self._stored[name] = stored

    def names(self) -> list[str]:
        """Names of all tensors, in the order they lie in the files."""
        return list(self._stored)

    def get(self, name: str) -> WeightPart:
        """One tensor where it lies."""
        return self._inner.get(self._stored.get(name, name))

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(kind, shape) without touching the tensor's bytes."""
        return self._inner.describe(self._stored.get(name, name))

    def prefetch(self) -> None:
        """Ask the system to read the files ahead."""
        self._inner.prefetch()
