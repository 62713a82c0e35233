"""Random weights from a model's configuration alone, for measurements without a checkpoint."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from octavo.errors import ModelError
from octavo.layers.parameter import Parameter

if TYPE_CHECKING:
    import torch

__all__ = ["DummyWeights"]

_DEVIATION = np.float32(0.02)
_CHUNK = 1 << 20


@dataclasses.dataclass(frozen=True)
class _Part:
    kind: str
    shape: tuple[int, ...]
    pointer: int
    num_bytes: int
    owner: npt.NDArray[Any] = dataclasses.field(repr=False)


class DummyWeights:
    """Random weights. A tensor's values depend only on the seed, its name and the kind of device.

    Matrices are normal with deviation 0.02, norms and rotary divisors are ones, biases are zeros.
    """

    has_offsets = True

    def __init__(self, parameters: Iterable[Parameter], seed: int) -> None:
        self._shapes = {parameter.name: parameter.shape for parameter in parameters}
        self._seed = seed

    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._shapes)

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(kind, shape)."""
        if name not in self._shapes:
            raise ModelError(f"there is no tensor {name!r}")
        return "BF16" if len(self._shapes[name]) == 2 else "F32", self._shapes[name]

    def get(self, name: str) -> _Part:
        """One tensor, drawn anew."""
        kind, shape = self.describe(name)
        values: npt.NDArray[Any]
        if kind == "BF16":
            values = self._draw(name, math.prod(shape))
        else:
            values = np.full(shape, 0.0 if name.endswith(".bias") else 1.0, dtype=np.float32)
        return _Part(kind, shape, values.ctypes.data, values.nbytes, values)

    def draw(self, name: str, out: torch.Tensor) -> None:
        """Fill a tensor where it lies, with the device's own generator: a GPU draws gigabytes in milliseconds."""
        import torch

        if self.describe(name)[0] == "BF16":
            generator = torch.Generator(out.device)
            generator.manual_seed(int(self._entropy(name).generate_state(1, np.uint64)[0]))
            out.normal_(0.0, float(_DEVIATION), generator=generator)
        else:
            out.fill_(0.0 if name.endswith(".bias") else 1.0)

    def _entropy(self, name: str) -> np.random.SeedSequence:
        return np.random.SeedSequence([self._seed % (1 << 64), zlib.crc32(name.encode())])

    def _draw(self, name: str, count: int) -> npt.NDArray[np.uint16]:
        """Bits of bfloat16 numbers, made a chunk at a time so that float32 never holds the whole tensor."""
        generator = np.random.Generator(np.random.SFC64(self._entropy(name)))
        out = np.empty(count, dtype=np.uint16)
        for start in range(0, count, _CHUNK):
            chunk = generator.standard_normal(min(_CHUNK, count - start), dtype=np.float32) * _DEVIATION
            out[start : start + _CHUNK] = chunk.view(np.uint32) >> np.uint32(16)
        return out
