"""Parameters: a model's tensors, declared once by the block that owns them, and checked against the model's files."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from octavo import _core
from octavo.errors import ModelError

__all__ = ["Parameter", "WeightPart", "Weights", "check_tensors", "to_float32"]

_LISTED = 4
_ROTARY_TABLE = ".rotary_emb.inv_freq"


@dataclasses.dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of a model.

    Checking files, loading, dummy weights, counting and the memory plan all read this declaration.

    Attributes:
        name: in Hugging Face's files, such as `model.layers.0.mlp.up_proj.weight`.
        gguf_name: in GGUF files, such as `blk.0.ffn_up.weight`.
        shape: in torch's order.
        shard_axis: the axis that ranks divide among themselves; None for tensors that each rank holds whole.
        quantizable: a quantized format may store it.
        offset: added on loading, for norms that Hugging Face's files store as w and apply as 1 + w. GGUF files
            store the sum.
        gguf_heads: heads whose rows GGUF files hold in the order of interleaved rotary pairs; 0 for the usual order.
    """

    name: str
    gguf_name: str
    shape: tuple[int, ...]
    shard_axis: int | None = None
    quantizable: bool = False
    offset: float = 0.0
    gguf_heads: int = 0

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def num_bytes(self, itemsize: int) -> int:
        """Bytes on the device: matrices in the model's dtype of `itemsize` bytes, vectors in float32."""
        return self.size * (itemsize if len(self.shape) > 1 else 4)


class WeightPart(Protocol):
    """A tensor as it lies in a file or in memory."""

    @property
    def kind(self) -> str:
        """`F32`, `F16`, `BF16`, or a GGUF block type."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """In torch's order."""
        ...

    @property
    def pointer(self) -> int:
        """Address of the first byte; the part keeps the memory alive."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of the stored tensor."""
        ...


class Weights(Protocol):
    """A model's tensors under Hugging Face's names.

    Attributes:
        has_offsets: norms are stored with their `Parameter.offset` added.
    """

    has_offsets: bool

    def names(self) -> list[str]:
        """Names of all tensors."""
        ...

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(kind, shape), from headers alone."""
        ...

    def get(self, name: str) -> WeightPart:
        """One tensor as it is stored."""
        ...


def check_tensors(parameters: Sequence[Parameter], weights: Weights, architecture: str, ignored: Iterable[str]) -> None:
    """Compare the tensors in a model's files with its parameters, before anything is loaded.

    Args:
        parameters: of the model.
        weights: the files.
        architecture: for messages.
        ignored: beginnings of the names of tensors that the model does not need; stored rotary tables are never needed.

    Raises:
        ModelError: names the tensors that are missing, unknown or of another shape.
    """
    expected = {parameter.name: parameter.shape for parameter in parameters}
    shapes = {name: tuple(weights.describe(name)[1]) for name in weights.names()}
    missing = [name for name in expected if name not in shapes]
    if missing:
        raise ModelError(f"the model's files lack {_list(missing)}, which {architecture} needs")
    misshapen = [
        f"{name} ({list(shapes[name])}, not {list(shape)})" for name, shape in expected.items() if shapes[name] != shape
    ]
    if misshapen:
        raise ModelError(f"the shapes in the model's files do not match its configuration: {_list(misshapen)}")
    starts = tuple(ignored)
    unknown = [name for name in shapes if name not in expected and not name.startswith(starts)]
    unknown = [name for name in unknown if not name.endswith(_ROTARY_TABLE)]
    if unknown:
        raise ModelError(
            f"the model's files hold {_list(unknown)}, which {architecture} with this configuration does not use; "
            "its output would be wrong"
        )


def _list(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - _LISTED} more tensors" if len(listed) > _LISTED else ""
    return ", ".join(listed[:_LISTED]) + more


def to_float32(part: WeightPart) -> npt.NDArray[np.float32]:
    """A copy of a stored tensor, dequantized."""
    out = np.empty(part.shape, dtype=np.float32)
    if part.kind == "F32":
        ctypes.memmove(out.ctypes.data, part.pointer, part.num_bytes)
    else:
        _core.dequantize(part.pointer, part.num_bytes, part.kind, out.ctypes.data, out.size, "float32")
    return out
